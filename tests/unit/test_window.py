import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ultrabench.store.allocation import inside

DAY = 1440
MINUTES = st.integers(0, DAY - 1)


def clock(minute):
    return f"{minute // 60:02d}:{minute % 60:02d}"


def at(text, seconds=0):
    """Seconds since 1970 at a local time of a day without a change of clocks."""
    return time.mktime((2026, 1, 14, int(text[:2]), int(text[3:]), seconds, 0, 0, 0))


@pytest.mark.parametrize(
    ("window", "now", "seconds", "expected"),
    [
        ("09:00-17:00", "08:59", 59, False), ("09:00-17:00", "09:00", 0, True), ("09:00-17:00", "17:00", 0, False),
        ("19:00-07:00", "18:59", 59, False), ("19:00-07:00", "19:00", 0, True), ("19:00-07:00", "06:59", 59, True),
        ("19:00-07:00", "07:00", 0, False), ("00:00-00:00", "23:59", 59, True), (None, "03:00", 0, True),
    ],
)  # fmt: skip
def test_windows_by_hand(window, now, seconds, expected):
    assert inside(window, at(now, seconds)) is expected


@given(begin=MINUTES, end=MINUTES, now=MINUTES, seconds=st.integers(0, 59))
def test_a_window_and_its_reverse_share_the_day(begin, end, now, seconds):
    there, back = (inside(w, at(clock(now), seconds)) for w in (
        f"{clock(begin)}-{clock(end)}", f"{clock(end)}-{clock(begin)}"
    ))  # fmt: skip
    assert there is True if begin == end else there is not back


@pytest.fixture
def zone(request, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setenv("TZ", request.param)
        time.tzset()
        yield request.param
    time.tzset()


@pytest.mark.parametrize(
    ("zone", "hour"),
    [("UTC0", 12), ("CET-1CEST,M3.5.0,M10.5.0/3", 13), ("PST8PDT,M3.2.0,M11.1.0", 4)],
    indirect=["zone"],
)
@pytest.mark.usefixtures("zone")
def test_the_time_is_that_of_this_host(hour):
    noon_utc = 1768392000  # of 2026-01-14
    assert inside(f"{hour:02d}:00-{hour:02d}:01", noon_utc)
    assert not inside(f"{hour:02d}:01-{hour:02d}:00", noon_utc)
