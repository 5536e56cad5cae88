"""The tables of a database, and how older schemas become the newest."""
