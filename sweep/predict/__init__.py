"""What a layout is expected to need."""
