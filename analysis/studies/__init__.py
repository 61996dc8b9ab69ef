"""Studies: each folder answers one question about results, and can be deleted (see docs/design/how-to-add.md)."""
