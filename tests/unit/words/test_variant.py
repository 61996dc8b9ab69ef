"""Labels of variants: short texts on one line, whatever values a user lists."""

import pytest

from ultrabench.variant import MAX_LABEL_LENGTH, option_texts, value_text

ODD_TEXTS = (
    "a\nb",
    "a\rb",
    "a\tb",
    "\x1b[31mred",
    "a\u2028b",
    "\udcff",
    "x" * 100_000,
    "\n" * 1000,
    "\u202eabc",
)


@pytest.mark.parametrize("text", ODD_TEXTS)
def test_a_label_is_short_and_on_one_line(text):
    [label] = option_texts({"env.A": text})
    assert label.startswith("A=")
    assert len(label) <= len("A=") + MAX_LABEL_LENGTH
    assert label.isprintable()
    assert len(label.splitlines()) == 1


def test_values_that_are_cut_stay_different():
    texts = ["x" * 60 + middle + "y" * 60 for middle in "abc"]
    assert len({value_text(text) for text in texts}) == len(texts)
    assert value_text("x" * 60).startswith("xxx")
    assert value_text("\n") == r"\n"


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "unset"), (True, "true"), ("", "''"), (8, "8"), (0.5, "0.5"), ("Ring Tree", "Ring Tree"),
        ("\u00e9\u6587", "\u00e9\u6587"),
     ("x" * MAX_LABEL_LENGTH, "x" * MAX_LABEL_LENGTH)],
)  # fmt: skip
def test_usual_values_are_shown_whole(value, text):
    assert value_text(value) == text


def test_a_name_is_cut_too():
    [label] = option_texts({"words." + "n" * 500: 1})
    assert len(label) <= MAX_LABEL_LENGTH + len("=1")
