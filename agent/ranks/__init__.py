"""The ranks of one node: started, watched, ended and cleaned up."""
