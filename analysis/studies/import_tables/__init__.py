"""Converts result tables of other programs to result files."""
