"""Runs on the login node: submits allocations, sees what becomes of them, and submits what is still to be done."""
