"""Pure decisions of a sweep: configuration, grid, rules, prediction, plan."""
