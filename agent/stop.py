"""The wish of Slurm or the user that an allocation should end."""

import signal
from types import FrameType


class StopRequest:
    """Set by SIGTERM, SIGINT or SIGUSR2; the agent then ends its run and leaves."""

    def __init__(self) -> None:
        self.reason: str | None = None
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2):
            signal.signal(number, self._asked)

    def _asked(self, number: int, frame: FrameType | None) -> None:
        self.reason = self.reason or f"the allocation was ended by {signal.Signals(number).name}"
