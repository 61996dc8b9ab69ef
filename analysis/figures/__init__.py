"""Figures of results and of layouts: one module for each kind of `ultrabench plot`, and the heatmap."""
