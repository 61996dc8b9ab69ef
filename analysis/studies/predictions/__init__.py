"""Fits predictions to measured runs, and tells how good they are."""
