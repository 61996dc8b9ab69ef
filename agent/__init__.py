"""Runs inside an allocation: starts ranks, watches, kills, cleans, classifies."""
