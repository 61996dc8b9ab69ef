"""The files of a sweep: its folder, its journal with the state that it gives, claims and allocations."""
