"""The Hydra tree that ships with ultrabench."""
