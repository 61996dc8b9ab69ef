"""What `sweep launch` uses of this study when `launcher.track` names a tracker; it finds this module by its name."""

from ultrabench.analysis.studies.export.library import require_library

PROGRAM = "ultrabench.analysis.studies.export.live"
"""The module that logs the runs of a sweep as they end, run as `python -m PROGRAM KIND FOLDER`."""

__all__ = ["PROGRAM", "require_library"]
