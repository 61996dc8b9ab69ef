"""The agent: it runs inside an allocation, where it starts, watches, kills and cleans up ranks and names failures."""
