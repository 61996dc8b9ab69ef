"""Asks Slurm, writes its job scripts, and submits, finds and ends its jobs."""
