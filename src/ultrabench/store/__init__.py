"""What a sweep keeps on disk: its folder, its journal, the state that follows, claims and allocations."""
