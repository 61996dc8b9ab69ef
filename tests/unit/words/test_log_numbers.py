"""Numbers and units of logs are read as programs write them, whatever stands before the decimals."""

import math

import pytest

from ultrabench.log_numbers import (
    UnreadableError,
    decimal_mark_in,
    read_number,
    uncut_number_text,
    unit_beside,
)


@pytest.mark.parametrize(
    ("text", "value", "other"),
    [
        ("5444.9", 5444.9, None), ("1,53", 1.53, None), ("0,512", 0.512, None), ("12,3456", 12.3456, None),
        (".5", 0.5, None),
        ("7,282", 7282.0, 7.282), ("1,234,567", 1234567.0, None), ("1,234.5", 1234.5, None), ("1.234,5", 1234.5, None),
        ("1.234.567", 1234567.0, None), ("4.71K", 4710.0, None), ("12.3k", 12300.0, None), ("2.02E+00", 2.02, None),
        ("1e-3", 0.001, None), ("-0.5", -0.5, None), ("0.41s/it", 0.41, None), ("123.45ms,", 123.45, None),
        ("inf", math.inf, None),
        ("1.5GiB)", 1.5, None), ("2,71e1", 27.1, None), ("1, ", 1.0, None),
    ],
)  # fmt: skip
def test_a_number_has_one_reading_or_two(text, value, other):
    number = read_number(text)
    assert (number.value, number.other_value) == (value, other)


@pytest.mark.parametrize(
    ("text", "mark", "value"), [("7,282", ",", 7.282), ("7,282", ".", 7282.0), ("1.530", ",", 1.53)]
)
def test_the_mark_of_the_log_decides(text, mark, value):
    assert read_number(text, mark).value == value


def test_a_point_before_three_digits_is_in_doubt_in_a_log_with_commas():
    assert read_number("1.530", ",").other_value == 1530.0


@pytest.mark.parametrize("text", ["N/A", "nan.0", "", "-", "6:30", "1_0", "None", "1,2,3", "?"])
def test_what_is_no_number_is_refused(text):
    with pytest.raises(UnreadableError, match="is not a number"):
        read_number(text)


@pytest.mark.parametrize(
    ("texts", "line", "mark"),
    [
        (["1,53"], "time 1,53 s", ","), (["7,282"], "2025-06-16 22:30:50,322 - loss: 6.1384 tps: 7,282", "."),
        (["7,282"], "2025-06-16 22:30:50,322 - tps: 7,282", None),
        (["7,282"], "v1.2.3 at 10.0.0.7 16:03:54.469 tps: 7,282", None),
        (["1.234,5"], "", ","), (["1,234.5"], "", "."),
    ],
)  # fmt: skip
def test_a_line_shows_what_stands_before_its_decimals(texts, line, mark):
    assert decimal_mark_in(texts, line) == mark


@pytest.mark.parametrize(
    ("line", "number", "unit"),
    [
        ("[00:03, 2.3it/s]", "2.3", "step/s"), ("[00:03,  1.05s/it]", "1.05", "s/step"),
        ("time 500.1 ms (step)", "500.1", "ms"),
        ("elapsed time per iteration (ms): 744.0 | lm loss", "744.0", "ms"),
        ("elapsed_time_per_iteration_ms: 4.71K", "4.71K", "ms"),
        ("12.3 samples per second", "12.3", "sample/s"), ("0.5 s per iteration", "0.5", "s/step"),
        ("12.5 tokens/sec/GPU", "12.5", "token/s/gpu"),
        ("CurrSamplesPerSec=12.4, MemAllocated=1.0GB", "12.4", "sample/s"),
        ("'train_steps_per_second': 0.7,", "0.7", "step/s"),
        ("iter/s: 3.5", "3.5", "step/s"), ("took 1.5 min", "1.5", "min"), ("0.41 min 0.40 max 0.43", "0.41", ""),
        ("step_timing in s: 51.9", "51.9", "s"),
        ("seconds: 3.123, TFLOP/s/device: 401.1", "3.123", "s"), ("TFLOP/s/device: 401.1, ", "401.1", "flop/s/gpu"),
        ("675.4MODEL_TFLOP/s/GPU", "675.4", "flop/s/gpu"), ("tps: 5,856  tflops: 339.16", "5,856", ""),
        ("took 0.5 min: 0.4", "0.5", ""), ("after 4 steps", "4", ""),
    ],
)  # fmt: skip
def test_the_unit_beside_a_number(line, number, unit):
    start = line.index(number)
    assert unit_beside(line, start, start + len(number)) == unit


@pytest.mark.parametrize(
    ("line", "number", "whole"),
    [
        ("time 1,53 s", "1", "1,53"), ("time 1.53 s", "1", "1.53"), ("time 1.53s/it", "53", "1.53"),
        ("time 9.5e-2 s", "9.5", "9.5e-2"),
        ("step 1,000 of 2,000", "1", "1,000"), ("took 0:01:30.5", "01", "0:01:30.5"), ("took 1:30 min", "30", "1:30"),
        ("tps 1_200", "1", "1_200"),
        ("time 12 s", "1", "12"), ("loss 2.0E-01 |", "2.0", "2.0E-01"),
        ("time 1,53 s", "1,53", None), ("time 0.41, 12 GB", "0.41", None), ("3,512,2.71", "512", None),
        ("3,0.41,2.71", "0.41", None),
        ("(5444.9,5445.0) ms", "5444.9", None), ("iter 10:0.41 s", "0.41", None),
        ("1/9 [00:01,0.41s/it]", "0.41", None), ("step 3/9", "3", None),
        ("loss nan", "nan", None), ("took 12s.", "12", None), ("iter 10:0.41 s", "10", None),
    ],
)  # fmt: skip
def test_a_part_of_a_number_is_not_the_number(line, number, whole):
    start = line.rindex(number) if number in ("53", "30") else line.index(number)
    assert uncut_number_text(line, start, start + len(number)) == whole
