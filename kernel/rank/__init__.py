"""The life of a rank beside its training: environment, memory, progress, stacks, probes and traces."""
