"""Turns the journals of sweeps into tables, rankings and figures."""
