"""Runs the kernel without data and without other ranks, to find what a step costs."""
