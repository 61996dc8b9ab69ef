"""Figures of results and of layouts: the heatmap, those of `ultrabench plot`, and what all of them share."""
