"""The command line of ultrabench."""
