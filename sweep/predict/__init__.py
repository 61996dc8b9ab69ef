"""Predicts the memory and the time that a layout needs."""
