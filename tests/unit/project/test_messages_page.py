"""The page of messages has those that tests hold to the letter, and a heading for every test of a mistake."""

from tests.messages import PAGE, as_text, files_with_messages, golden, subject_of

TEXT = PAGE.read_text(encoding="utf-8")


def test_the_golden_messages_stand_on_the_page():
    stale = [message for message in golden() if f" {as_text(message)}\n" not in TEXT]
    assert not stale, "write the page anew: python -m tests.messages"


def test_every_file_that_expects_messages_has_a_heading():
    subjects = {subject_of(name) for name in files_with_messages()} - {None}
    assert {line for line in TEXT.splitlines() if line.startswith("## ")} == {f"## {s}" for s in subjects}


def test_the_page_can_be_read_in_one_sitting():
    assert len(TEXT.split()) < 9000
