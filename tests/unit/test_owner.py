import errno
import os
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ultrabench.store.claim import GIVEN_UP, claim, give_up, owner, owner_of

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
    for ask in (owner, owner_of):
        with pytest.raises(OSError, match=os.strerror(getattr(errno, name))):
            ask(tmp_path, KEY)
    refuse(None)
    assert owner_of(tmp_path, KEY) == "n1-x.3"


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


def test_an_allocation_that_was_given_up_belongs_to_no_agent(tmp_path):
    assert give_up(tmp_path, NAME)
    assert owner(tmp_path, NAME) == {"allocation": GIVEN_UP}
    assert not claim(tmp_path, NAME, {"allocation": NAME, "job": {"job_id": "57_0", "restart": 0}})
    assert owner_of(tmp_path, NAME) == GIVEN_UP


def test_it_may_be_given_up_again_and_by_another_launcher(tmp_path, monkeypatch):
    assert give_up(tmp_path, NAME)
    assert give_up(tmp_path, NAME)
    monkeypatch.setattr("ultrabench.store.claim._PROCESS", "another")
    assert give_up(tmp_path, NAME)
    assert [p.name for p in tmp_path.iterdir()] == [NAME]


@pytest.mark.parametrize("content", [b'{"allocation": "n1-0000aaaa.0"}', b"{", b"", b"{}"])
def test_what_an_agent_owns_is_not_given_up(tmp_path, content):
    """Nor what only may be an agent's."""
    (tmp_path / NAME).write_bytes(content)
    assert not give_up(tmp_path, NAME)
    assert (tmp_path / NAME).read_bytes() == content


@pytest.mark.parametrize("name", PASSING)
def test_nobody_is_said_to_own_it_while_the_disk_does_not_tell(tmp_path, refuse, name):
    claim(tmp_path, NAME, {"allocation": NAME})
    refuse(name)
    with pytest.raises(OSError, match=os.strerror(getattr(errno, name))):
        give_up(tmp_path, NAME)
    refuse(None)
    assert not give_up(tmp_path, NAME)


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
