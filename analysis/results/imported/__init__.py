"""What columns and numbers of other programs mean, and what follows from them for columns of results."""
