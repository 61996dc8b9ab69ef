"""ultrabench measures which parallel layout trains a model fastest on a cluster."""

__version__ = "0.2.0.dev0"
