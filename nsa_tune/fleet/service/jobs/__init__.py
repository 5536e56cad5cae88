"""The service's jobs: targets, queue and its page, proposals, and how often engines ran a batch."""
