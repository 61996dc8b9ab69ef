import errno
import json
import os
import subprocess
import sys

import pytest

from ultrabench.errors import may_pass
from ultrabench.store.claim import claim, owner_of

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
