"""Figures of the results: the heatmap and the bandwidth of the links."""
