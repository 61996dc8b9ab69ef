"""Checks whether a cluster, or this machine, can run sweeps."""
