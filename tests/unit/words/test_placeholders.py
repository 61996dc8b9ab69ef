"""Words in braces in the files of a program: what is replaced, what stays, and what is refused."""

import pytest

from tests.configs import refused
from ultrabench.placeholders import names_in, replace_words

WORDS = {
    "tp": 2,
    "pp": 1,
    "mbs": 3,
    "gas": 4,
    "hidden_size": 64,
    "precision": "bf16",
    "rope_theta": 5e5,
    "lr": 0.5,
}


@pytest.mark.parametrize(
    ("text", "filled"),
    [
        ('{"a": {tp}, "b": {"c":{mbs}}}', '{"a": 2, "b": {"c":3}}'), ("{{tp}}", "{2}"), ("{ tp }{mbs}", "23"),
        ("{mbs*gas} {mbs * gas-tp} {tp+mbs*gas*2} {1-gas} {2*lr}", "12 10 26 -3 1"),
        ("{precision} {rope_theta} {lr}", "bf16 500000 0.5"),
        # Everything else stays.
        ("{} {3} {2*3} {other} {tp:d} {tp!r} {'tp'} {tp/2} {tp*other} ${tp} {tp\n,}", None),
        ("for (i=0;i<n;i++) { printf(\"%d\"); }", None),
    ],
)  # fmt: skip
def test_known_words_are_replaced_and_all_else_stays(text, filled):
    assert replace_words(text, WORDS, "kernel.files.a") == (text if filled is None else filled)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{tpp}", "kernel.files.a has {tpp}, and tpp is not a word of a run; did you mean {tp} or {pp}?"),
        ("{TP}", "kernel.files.a has {TP}, and TP is not a word of a run; did you mean {tp}?"),
        ("{mbs*gsa}", "{mbs*gsa}, and gsa is not a word of a run; did you mean {gas}?"),
        ("{mbs1}", "{mbs1}, and mbs1 is not a word of a run; did you mean {mbs}?"),
        ("{precision*2}", "kernel.files.a has {precision*2}, and precision=bf16 is not a number"),
    ],
)  # fmt: skip
def test_a_word_one_edit_from_a_known_one_is_refused(text, message):
    with refused(message):
        replace_words(text, WORDS, "kernel.files.a")


def test_the_names_in_a_text_are_those_of_its_words():
    assert [*names_in("{tp} {mbs*2} {} ${x} {a-b}")] == ["tp", "mbs", "a", "b"]
