"""Tables and views of a database: how older schemas become the newest, and what SQL may ask."""
