"""Queries Slurm, writes job scripts for it, and submits, finds and ends its jobs."""
