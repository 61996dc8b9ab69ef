"""Reads config.json files of models whose layers are of several types, or of types that the fields of a shape lack."""
