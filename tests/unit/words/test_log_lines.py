"""Lines of a log end at line feeds and carriage returns, have no codes of terminals,
and keep the time of their arrival.
"""

import time

import pytest

from ultrabench.log_lines import LogLines, clock_time, split_log, without_escapes


@pytest.mark.parametrize(
    "text",
    [
        "\x1b[32mstep:  1\x1b[39m", "\x1b[1;38;5;208mstep:  1\x1b[0m", "\x1b[38:2::1:2:3mstep:  1\x1b[m",
        "step:  1\x1b[K", "\x1b[Astep:  1",
        "\x1b]0;title\x07step:  1", "\x1b]8;;http://x\x1b\\step:  1\x1b]8;;\x1b\\", "\x1b(Bstep:  1",
        "\x1b7step:  1\x1b8", "\x1b[?25lstep:  1\x08",
    ],
)  # fmt: skip
def test_codes_of_terminals_are_no_text(text):
    assert without_escapes(text) == "step:  1"


def test_a_carriage_return_ends_a_line():
    lines = split_log("a\rb\r\nc\n\rd")
    assert [(line.text, line.is_redrawn) for line in lines] == [
        ("a", True), ("b", False), ("c", False), ("", True), ("d", False),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("text", "seconds", "resolution_s"),
    [
        ("[titan] 2026-11-21 16:03:54,469 - root", 54.469, 0.001), ("2026-11-21T16:03:54Z", 54.0, 1.0),
        ("2026/11/21 16:03:54.5", 54.5, 0.1),
    ],
)  # fmt: skip
def test_the_clock_of_a_line(text, seconds, resolution_s):
    sighting = clock_time(text)
    assert (sighting.at_s % 60, sighting.error_s) == (pytest.approx(seconds), pytest.approx(resolution_s))


@pytest.mark.parametrize("text", ["step 3/9 [00:01<00:02]", "16:03:54", "2026-13-41 16:03:54", "1.2.3"])
def test_no_clock(text):
    assert clock_time(text) is None


def write(path, text):
    with path.open("ab") as file:
        file.write(text)


def test_a_bar_has_the_time_at_which_it_was_drawn(tmp_path):
    """The carriage return that ends its text comes with the next state."""
    path = tmp_path / "log"
    path.touch()
    lines = LogLines(path)
    write(path, b"\r1/3")
    assert [line.text for line in lines.read()] == [""]
    drawn_s = time.monotonic()
    time.sleep(0.1)
    assert lines.read() == []
    write(path, b"\r2/3")
    time.sleep(0.1)
    (line,) = lines.read()
    assert line.text == "1/3"
    assert line.sighting.at_s <= drawn_s
    (last,) = lines.read(is_last=True)
    assert last.text == "2/3"
    assert last.sighting.at_s > drawn_s + 0.1


def test_the_end_of_a_line_that_came_in_parts_is_its_arrival(tmp_path):
    path = tmp_path / "log"
    write(path, b"step 1 ti")
    lines = LogLines(path)
    assert lines.read() == []
    between_s = time.monotonic()
    write(path, b"me 0.5\nstep 2 time 0.6\n")
    first, second = lines.read()
    assert (first.text, second.text) == ("step 1 time 0.5", "step 2 time 0.6")
    assert min(first.sighting.at_s, second.sighting.at_s) >= between_s


def test_a_line_that_is_too_long_is_skipped(tmp_path):
    path = tmp_path / "log"
    write(path, b"a\n" + b"x" * 50 + b"\rb\n" + b"c")
    lines, texts = LogLines(path, max_bytes=16), []
    for is_last in (False, False, False, False, False, True):
        texts += [line.text for line in lines.read(is_last=is_last)]
    assert texts == ["a", "b", "c"]
