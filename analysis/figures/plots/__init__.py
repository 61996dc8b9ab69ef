"""The figures of `ultrabench plot`: a module for each kind, with `points`, `figure` and `notes`."""
