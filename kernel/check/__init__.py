"""Checks that layouts train as a single process does."""
