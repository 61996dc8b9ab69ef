"""What each value of each axis is worth, all else equal."""
