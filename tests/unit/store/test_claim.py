"""Who owns an attempt or an allocation: one claim wins, and what cannot be read is somebody's."""

import errno
import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ultrabench.errors import may_pass
from ultrabench.store.claim import GIVEN_UP, claim, give_up, owner, owner_of

KEY = "aaaa.0.0"


def test_one_of_several_processes_wins_each_claim(tmp_path):
    code = (
        "import pathlib, sys\n"
        "from ultrabench.store.claim import claim\n"
        "claims, name = pathlib.Path(sys.argv[1]), sys.argv[2]\n"
        "sys.stdout.write('ready\\n'); sys.stdout.flush(); sys.stdin.readline()\n"
        "print([k for k in range(20) if claim(claims, f'k{k}', {'allocation': name})])"
    )
    racers = [
        subprocess.Popen(
            [sys.executable, "-c", code, str(tmp_path), f"n{n}"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )
        for n in range(8)
    ]  # fmt: skip
    for racer in racers:
        assert racer.stdout.readline() == "ready\n"
    for racer in racers:
        racer.stdin.write("go\n")
        racer.stdin.flush()
    won = [(k, f"n{n}") for n, r in enumerate(racers) for k in json.loads(r.communicate()[0])]
    assert sorted(k for k, _ in won) == list(range(20))
    assert all(owner_of(tmp_path, f"k{k}") == name for k, name in won)
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted(f"k{k}" for k in range(20))


def test_a_lost_answer_of_link_is_still_a_win(tmp_path, monkeypatch):
    real_link = os.link

    def link_and_fail(source, target):
        real_link(source, target)
        raise FileExistsError(target)

    monkeypatch.setattr(os, "link", link_and_fail)
    assert claim(tmp_path, KEY, {"allocation": "mine"})
    assert [p.name for p in tmp_path.iterdir()] == [KEY]


@pytest.mark.parametrize("number", [errno.EPERM, errno.EOPNOTSUPP, errno.EMLINK, errno.ENOSYS])
def test_a_file_system_without_links_is_not_taken_for_another_owner(tmp_path, monkeypatch, number):
    def refuse(source, target):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "link", refuse)
    with pytest.raises(OSError, match=os.strerror(number)) as raised:
        claim(tmp_path, KEY, {"allocation": "mine"})
    assert not may_pass(raised.value)
    assert list(tmp_path.iterdir()) == []


KEY = "aaaa.0.0"
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=5), inner, max_size=2),
    max_leaves=5,
)


@given(held=st.dictionaries(st.text(max_size=8), JSON, max_size=4))
def test_the_owner_is_read_as_it_was_written(tmp_path_factory, held):
    claims = tmp_path_factory.mktemp("claims")
    assert claim(claims, KEY, held)
    assert owner(claims, KEY) == held


def test_a_requeued_job_knows_its_earlier_start(tmp_path):
    first = {"allocation": "n1-x.3", "host": "gpu01", "job": {"job_id": "57_3", "restart": 0}}
    again = {**first, "host": "gpu02", "job": {"job_id": "57_3", "restart": 1}}
    assert claim(tmp_path, KEY, first)
    assert not claim(tmp_path, KEY, again)
    assert owner(tmp_path, KEY)["job"] == {"job_id": "57_3", "restart": 0}
    assert owner_of(tmp_path, KEY) == "n1-x.3"


@pytest.mark.parametrize("content", [b"", b"{}", b"{", b"[]", b"null", b"7", b'"x"', b"\xff\xfe", b'{"a": 1',
                                     b"[" * 100_000, b"\x00" * 40, b'{"a": 1}{"b": 2}'])  # fmt: skip
def test_what_cannot_be_read_is_empty(tmp_path, content):
    assert owner(tmp_path, KEY) is owner_of(tmp_path, KEY) is None, "nobody is told from somebody unreadable"
    (tmp_path / KEY).write_bytes(content)
    assert owner(tmp_path, KEY) == {}
    assert owner_of(tmp_path, KEY) == "unreadable"
    assert not claim(tmp_path, KEY, {"allocation": "mine"})


@pytest.mark.parametrize("name", [None, 7, "", ["a"]])
def test_an_odd_name_is_no_allocation_of_ours(tmp_path, name):
    claim(tmp_path, KEY, {"allocation": name})
    assert owner_of(tmp_path, KEY) == str(name)


PASSING = ["EIO", "ESTALE", "EACCES", "ETIMEDOUT", "EROFS"]


@pytest.fixture
def refuse(monkeypatch):
    """Has reading a claim fail in this way until it is told None."""
    read, number = Path.read_bytes, [None]

    def read_bytes(path):
        if number[0] is not None:
            raise OSError(number[0], os.strerror(number[0]), str(path))
        return read(path)

    monkeypatch.setattr(Path, "read_bytes", read_bytes)
    return lambda name: number.__setitem__(0, name and getattr(errno, name))


@pytest.mark.parametrize("name", PASSING)
def test_what_cannot_be_read_now_is_not_taken_for_garbage(tmp_path, refuse, name):
    """A claim that a stale file server hides is that of somebody who may be alive."""
    claim(tmp_path, KEY, {"allocation": "n1-x.3"})
    refuse(name)
    for ask in (owner, owner_of, give_up):
        with pytest.raises(OSError, match=os.strerror(getattr(errno, name))):
            ask(tmp_path, KEY)
    refuse(None)
    assert owner_of(tmp_path, KEY) == "n1-x.3"
    assert not give_up(tmp_path, KEY)


@pytest.mark.parametrize("name", ["ENXIO", "EPERM"])
def test_what_will_never_be_read_is_somebody(tmp_path, refuse, name):
    claim(tmp_path, KEY, {"allocation": "n1-x.3"})
    refuse(name)
    assert owner(tmp_path, KEY) == {}
    assert owner_of(tmp_path, KEY) == "unreadable"


@pytest.mark.parametrize("make", [lambda path: path.symlink_to(path), Path.mkdir], ids=["loop", "folder"])
def test_odd_files_in_the_place_of_a_claim_are_somebody(tmp_path, make):
    make(tmp_path / KEY)
    assert owner(tmp_path, KEY) == {}
    assert not claim(tmp_path, KEY, {"allocation": "mine"})


# whole allocations

NAME = "n1-0000aaaa.0"


def test_an_allocation_that_was_given_up_belongs_to_no_agent(tmp_path, monkeypatch):
    """It may be given up again, and by another launcher."""
    assert give_up(tmp_path, NAME)
    assert give_up(tmp_path, NAME)
    monkeypatch.setattr("ultrabench.store.claim._PROCESS", "another")
    assert give_up(tmp_path, NAME)
    assert [p.name for p in tmp_path.iterdir()] == [NAME]
    assert owner(tmp_path, NAME) == {"allocation": GIVEN_UP}
    assert not claim(tmp_path, NAME, {"allocation": NAME, "job": {"job_id": "57_0", "restart": 0}})
    assert owner_of(tmp_path, NAME) == GIVEN_UP


@pytest.mark.parametrize("content", [b'{"allocation": "n1-0000aaaa.0"}', b"{", b"", b"{}"])
def test_what_an_agent_owns_is_not_given_up(tmp_path, content):
    """Nor what only may be an agent's."""
    (tmp_path / NAME).write_bytes(content)
    assert not give_up(tmp_path, NAME)
    assert (tmp_path / NAME).read_bytes() == content


def test_of_agents_and_a_launcher_that_race_for_an_allocation_one_wins(tmp_path):
    start, given, owned = threading.Barrier(20), [], []

    def race(n):
        start.wait()
        if n == 0:
            given.append(give_up(tmp_path, NAME))
        elif claim(tmp_path, NAME, {"allocation": NAME, "host": f"gpu{n}"}):
            owned.append(n)

    threads = [threading.Thread(target=race, args=(n,)) for n in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert given == [not owned]
    assert len(owned) <= 1
