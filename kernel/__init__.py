"""The embedded training kernel: one plain decoder, and the forms of parallelism around it."""
