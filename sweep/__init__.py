"""The pure functions that decide what a sweep does: configuration, grid, rules, prediction, plan."""
