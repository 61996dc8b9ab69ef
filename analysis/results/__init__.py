"""The results of sweeps as tables: rows and columns, cells and their ranking, and what several studies use."""
