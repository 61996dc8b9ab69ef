"""ultrabench: which parallel layout trains a model fastest on a cluster, measured."""

__version__ = "0.1.0"
