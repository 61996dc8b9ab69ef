"""Windows are times of day in the launcher's time zone, wherever an agent runs."""

import time

import pytest

from ultrabench.store.allocation import is_in_window, window_text

NOON_UTC = 1_750_000_000 // 86400 * 86400 + 12 * 3600


@pytest.fixture(params=["UTC", "Asia/Kolkata", "America/New_York"])
def zone(request, monkeypatch):
    monkeypatch.setenv("TZ", request.param)
    time.tzset()
    yield request.param
    monkeypatch.undo()
    time.tzset()


@pytest.mark.parametrize(
    ("window", "hours_ahead", "is_inside"),
    [
        ("11:59-12:01", 0, True), ("12:01-11:59", 0, False), ("14:00-14:01", 2, True), ("13:00-14:00", 2, False),
        ("07:00-19:00", -5.5, False), ("06:30-06:31", -5.5, True), ("19:00-07:00", 12, True),
    ],
)  # fmt: skip
def test_a_window_means_the_time_zone_of_the_launcher(zone, window, hours_ahead, is_inside):
    assert is_in_window(window, NOON_UTC, int(3600 * hours_ahead)) == is_inside


def test_messages_name_both_time_zones_where_they_differ(monkeypatch):
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    assert (
        window_text("19:00-07:00", 0, NOON_UTC) == window_text("19:00-07:00", None, NOON_UTC) == "19:00-07:00"
    )
    text = window_text("19:00-07:00", -19800, NOON_UTC)
    assert text == "19:00-07:00 UTC-05:30, the time zone of the launcher; here it is UTC+00:00"
    monkeypatch.undo()
    time.tzset()
