"""ultrabench: which parallel layout trains a model fastest on a cluster, measured."""

__version__ = "0.2.0.dev0"
