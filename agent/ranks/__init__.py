"""The ranks of one node: how they are started, watched, killed and cleaned up."""
