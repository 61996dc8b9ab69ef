"""Exports the runs of a sweep to a CSV file or to a tracker of experiments."""
