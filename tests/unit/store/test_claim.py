"""Who owns an attempt or an allocation: one claim wins, and what cannot be read is somebody's."""

import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ultrabench.errors import may_pass
from ultrabench.store.claim import GIVEN_UP, claim, claim_content, give_up, owner_of

KEY = "aaaa.0.0"
MINE = {"allocation": "n1-x.3", "host": "gpu01", "job": {"job_id": "57_3", "restart": 0}}

RACER = """
import pathlib, sys
from ultrabench.store.claim import claim, give_up
claims, name = pathlib.Path(sys.argv[1]), sys.argv[2]
print("ready", flush=True)
sys.stdin.readline()
take = give_up if name == "given up" else lambda claims, key: claim(claims, key, {"allocation": name})
print([k for k in range(20) if take(claims, f"k{k}")])
"""


def test_one_of_several_processes_wins_each_claim(tmp_path):
    """Agents, and a launcher that gives allocations up."""
    names = ["given up", *(f"n{n}" for n in range(7))]
    racers = [
        subprocess.Popen(
            [sys.executable, "-c", RACER, str(tmp_path), name],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )
        for name in names
    ]  # fmt: skip
    for racer in racers:
        assert racer.stdout.readline() == "ready\n"
    for racer in racers:
        racer.stdin.write("go\n")
        racer.stdin.flush()
    won = [(k, name) for name, r in zip(names, racers, strict=True) for k in json.loads(r.communicate()[0])]
    assert sorted(k for k, _ in won) == list(range(20))
    assert all(owner_of(tmp_path, f"k{k}") == name for k, name in won)
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted(f"k{k}" for k in range(20))


def test_a_requeued_job_knows_its_earlier_start(tmp_path):
    assert claim(tmp_path, KEY, MINE)
    assert not claim(tmp_path, KEY, MINE | {"job": {"job_id": "57_3", "restart": 1}})
    assert claim_content(tmp_path, KEY) == MINE
    assert owner_of(tmp_path, KEY) == "n1-x.3"


def test_a_lost_answer_of_link_is_still_a_win(tmp_path, monkeypatch):
    real_link = os.link

    def link_and_fail(source, target):
        real_link(source, target)
        raise FileExistsError(target)

    monkeypatch.setattr(os, "link", link_and_fail)
    assert claim(tmp_path, KEY, MINE)
    assert [p.name for p in tmp_path.iterdir()] == [KEY]


@pytest.mark.parametrize("number", [errno.EOPNOTSUPP, errno.EMLINK, errno.ENOSYS])
def test_a_file_system_without_links_is_not_taken_for_another_owner(tmp_path, monkeypatch, number):
    def refuse(source, target):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "link", refuse)
    with pytest.raises(OSError, match=os.strerror(number)) as raised:
        claim(tmp_path, KEY, MINE)
    assert not may_pass(raised.value)
    assert list(tmp_path.iterdir()) == []


def holding(content):
    return lambda path: path.write_bytes(content)


UNREADABLE = [
    b"",
    b"{}",
    b"{",
    b"[]",
    b"null",
    b"7",
    b'"x"',
    b"\xff\xfe",
    b"[" * 100_000,
    b'{"a": 1}{"b": 2}',
]


@pytest.mark.parametrize(
    ("make", "stored", "name"),
    [
        *((holding(content), {}, "unreadable") for content in UNREADABLE),
        (lambda path: path.symlink_to(path), {}, "unreadable"),
        (Path.mkdir, {}, "unreadable"),
        (holding(b'{"allocation": null}'), {"allocation": None}, "unreadable"),
        (holding(b'{"allocation": ["a"]}'), {"allocation": ["a"]}, "unreadable"),
        (holding(b'{"allocation": "../../x"}'), {"allocation": "../../x"}, "unreadable"),
    ],
)
def test_an_odd_claim_is_somebodys(tmp_path, make, stored, name):
    assert claim_content(tmp_path, KEY) is owner_of(tmp_path, KEY) is None
    make(tmp_path / KEY)
    assert (claim_content(tmp_path, KEY), owner_of(tmp_path, KEY)) == (stored, name)
    assert not claim(tmp_path, KEY, MINE)
    assert not give_up(tmp_path, KEY)


def reading_fails(patched, name):
    def refuse(path):
        raise OSError(getattr(errno, name), os.strerror(getattr(errno, name)), str(path))

    patched.setattr(Path, "read_bytes", refuse)


@pytest.mark.parametrize("name", ["EIO", "ESTALE", "EACCES", "ETIMEDOUT", "EROFS"])
def test_what_cannot_be_read_now_is_not_taken_for_garbage(tmp_path, monkeypatch, name):
    """A claim that a stale file server hides is that of somebody who may be alive."""
    claim(tmp_path, KEY, MINE)
    reading_fails(monkeypatch, name)
    for ask in (claim_content, owner_of, give_up):
        with pytest.raises(OSError, match=os.strerror(getattr(errno, name))):
            ask(tmp_path, KEY)
    monkeypatch.undo()
    assert owner_of(tmp_path, KEY) == "n1-x.3"


@pytest.mark.parametrize("name", ["ENXIO", "ELOOP"])
def test_what_will_never_be_read_is_somebody(tmp_path, monkeypatch, name):
    claim(tmp_path, KEY, MINE)
    reading_fails(monkeypatch, name)
    assert (claim_content(tmp_path, KEY), owner_of(tmp_path, KEY)) == ({}, "unreadable")


def test_an_allocation_that_was_given_up_belongs_to_no_agent(tmp_path, monkeypatch):
    """It may be given up again, and by another launcher."""
    assert give_up(tmp_path, KEY)
    assert give_up(tmp_path, KEY)
    monkeypatch.setattr("ultrabench.store.claim._PROCESS_TOKEN", "another")
    assert give_up(tmp_path, KEY)
    assert [p.name for p in tmp_path.iterdir()] == [KEY]
    assert claim_content(tmp_path, KEY) == {"allocation": GIVEN_UP}
    assert not claim(tmp_path, KEY, MINE)
