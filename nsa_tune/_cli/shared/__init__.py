"""What several commands share: options and output."""
