"""The commands `ultrabench predict ...`."""
