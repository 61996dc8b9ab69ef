"""The embedded training kernel: a plain decoder, and the forms of parallelism that change it."""
