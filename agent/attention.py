"""How long an agent itself was away: suspended with its job, or held up by a disk."""

import time

ABSENT_S = 0.5
"""Shorter delays are the machine's ordinary ones."""


class Attention:
    """Asked once a round; what others did not say meanwhile they may well have said."""

    def __init__(self) -> None:
        self._back = time.monotonic()

    def absence_s(self, waited_s: float) -> float:
        """Seconds since the end of the last round beyond the `waited_s` meant to pass; 0 when short."""
        away = time.monotonic() - self._back - waited_s
        return away if away > ABSENT_S else 0.0

    def rest(self) -> None:
        """Ends a round."""
        self._back = time.monotonic()
