"""The commands `db ...`: tables listed, exported, imported, merged and shared."""
