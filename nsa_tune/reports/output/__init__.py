"""How a report is written: terminal, Markdown, CSV, JSON, pictures."""
