"""What whole passes take: times by way and size, kept from one start to the next."""
