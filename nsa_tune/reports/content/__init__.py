"""What a report says: records made from tables."""
