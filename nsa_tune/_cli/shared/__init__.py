"""What several commands share: options, messages, JSON documents."""
