import json
import stat
from dataclasses import replace

import pytest

from tests.unit.allocations import first_allocations, open_sweep
from ultrabench.errors import SweepFolderError, UltrabenchError
from ultrabench.store.allocation import PROBE_LIMIT_S, read_allocation


@pytest.fixture
def allocation(tmp_path):
    return first_allocations(open_sweep(tmp_path / "a sweep"))[0]


def test_what_is_written_is_what_agents_read(allocation):
    allocation.write()
    assert read_allocation(allocation.folder) == allocation
    # A requeue or a second submission writes the same again.
    allocation.write()
    assert read_allocation(allocation.folder) == allocation


def test_the_secret_is_for_one_user_and_one_allocation(allocation):
    allocation.write()
    secret = allocation.folder / "secret"
    assert stat.S_IMODE(secret.stat().st_mode) == 0o600
    first = secret.read_text()
    assert len(first) == 32
    other = replace(allocation, name="n1-other.0")
    other.write()
    assert (other.folder / "secret").read_text() != first
    assert first not in (allocation.folder / "allocation.json").read_text()


def test_the_probe_is_a_task_under_minus_one(allocation):
    probe = allocation.task(-1)
    assert probe == allocation.probe
    assert (probe.probe, probe.forked, probe.limit_s) == (True, True, PROBE_LIMIT_S)
    assert probe.spec.layout.world_size == allocation.nodes * allocation.gpus_per_node
    assert probe.key not in {task.key for task in allocation.tasks}
    assert allocation.name in probe.run_id
    assert [allocation.task(n) for n in range(len(allocation.tasks))] == list(allocation.tasks)
    assert not any(task.probe for task in allocation.tasks)


def test_the_probe_of_a_users_program_is_forked_from_ours(allocation):
    first = allocation.tasks[0]
    kernel = replace(first.spec.kernel, name="mine", kind="command", command=("python", "train.py"))
    theirs = replace(first, spec=replace(first.spec, kernel=kernel))
    mixed = replace(allocation, tasks=(theirs,))
    assert not theirs.forked
    assert mixed.probe.forked
    assert not mixed.tasks[0].forked


def test_fields_added_later_may_be_missing(allocation):
    allocation.write()
    path = allocation.folder / "allocation.json"
    told = json.loads(path.read_text())
    for name in ("git_commit", "preflight", "control", "window"):
        del told[name]
    path.write_text(json.dumps(told))
    assert read_allocation(allocation.folder) == replace(allocation, preflight=False, control=None)


@pytest.mark.parametrize(
    "text", [None, "", "{", "[]", "7", "null", '"x"', "{}", '{"name": 7}', '{"nme": "x"}']
)
def test_what_cannot_be_read_is_told_in_one_line(tmp_path, text):
    if text is not None:
        (tmp_path / "allocation.json").write_text(text)
    with pytest.raises(UltrabenchError) as caught:
        read_allocation(tmp_path)
    assert isinstance(caught.value, SweepFolderError)
    assert "\n" not in str(caught.value)
    assert "allocation.json" in str(caught.value)
