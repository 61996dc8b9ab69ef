"""What a running sweep does next, how far it is, and which numbers count."""
