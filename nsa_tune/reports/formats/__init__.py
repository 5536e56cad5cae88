"""A report as text: terminal, Markdown, CSV, JSON."""
