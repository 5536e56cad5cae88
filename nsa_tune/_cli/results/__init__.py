"""The commands that read tables: `report`, `dashboard`, `compare`, `lookup` and `explain`."""
