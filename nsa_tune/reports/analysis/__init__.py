"""What a report says, worked out from tables and kept as plain records."""
