"""What results say about the nodes they were measured on: their speed relative to others, and their failures."""
