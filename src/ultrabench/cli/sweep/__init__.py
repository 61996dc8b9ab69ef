"""The commands of `ultrabench sweep`."""
