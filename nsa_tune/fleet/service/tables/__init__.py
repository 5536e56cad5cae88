"""The tables of the service: what hosts upload and pull, and what the database holds."""
