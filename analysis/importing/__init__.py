"""Reads result tables of other programs into the columns of runs.parquet."""
