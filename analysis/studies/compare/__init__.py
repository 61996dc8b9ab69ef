"""What is slower, faster or failing in a second table of results."""
