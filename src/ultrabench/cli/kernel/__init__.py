"""The commands of `ultrabench kernel`."""
