"""From YAML and overrides to the frozen values of a sweep."""
