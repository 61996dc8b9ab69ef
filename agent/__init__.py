"""The agent runs inside an allocation; it starts, watches, kills and cleans up ranks, and names failures."""
