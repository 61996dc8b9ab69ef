"""Runs on the login node: submits allocations, follows them, and submits the work that is still left."""
