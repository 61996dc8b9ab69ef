"""One HTML page that holds all results of a table and opens from disk without a network."""
