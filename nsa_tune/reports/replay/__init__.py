"""What a table is worth on given traffic: passes priced, added up, and compared."""
