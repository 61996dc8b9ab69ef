"""The time of day in which nodes may be used."""

import time


def inside(window: str | None, now_s: float) -> bool:
    """Whether `now_s` (seconds since 1970) is inside a window such as 19:00-07:00 of local time.

    The first minute belongs to the window, the last does not; equal ends are the whole day.
    """
    if window is None:
        return True
    begin, end = (60 * int(text[:2]) + int(text[3:]) for text in window.split("-"))
    local = time.localtime(now_s)
    minute = 60 * local.tm_hour + local.tm_min
    return (minute - begin) % 1440 < ((end - begin) % 1440 or 1440)
