"""Which sweep a folder holds: its id stays the same under every path and name, and a copy gets one of its own."""

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from tests.sweep_folder import make_folder, write
from tests.unit.allocations import CONFIG, PLAN, first_allocations, open_sweep
from ultrabench.launchers.open_sweep import sweep_json_of
from ultrabench.store.events import AllocationPlanned, AllocationStarted, LeadingAgent
from ultrabench.store.folder import SweepFolder
from ultrabench.store.identity import OLD_COPY, ensure_identity
from ultrabench.store.journal import read_journal
from ultrabench.store.lease import Lease, living_launchers
from ultrabench.store.state import fold
from ultrabench.store.sweep_json import location_of, read_sweep_json
from ultrabench.store.sweep_moves import rename_sweep

FIXTURE = Path(__file__).parents[2] / "fixtures/v0.2.0/results"


@pytest.fixture
def folder(tmp_path):
    """A new sweep that has planned an allocation, and whose agent has started."""
    sweep_folder = make_folder(tmp_path / "first", sweep_json_of(CONFIG, {}), PLAN.candidates[:2])
    ensure_identity(sweep_folder)
    planned = AllocationPlanned(allocation="n1-0000aaaa.0", nodes=1, limit_s=60.0, tasks=())
    started = AllocationStarted(allocation="n1-0000aaaa.0", agent=LeadingAgent(host="a", pid=1))
    write(sweep_folder, planned, started, by="launcher")
    return sweep_folder


def state_of(folder):
    return fold(read_journal(folder.journal))


def copy_of(folder, name="copy"):
    path = folder.path.parent / name
    shutil.copytree(folder.path, path)
    return SweepFolder(path)


def test_an_id_is_given_once_and_kept(folder):
    sweep_id = read_sweep_json(folder).id
    assert len(sweep_id) == 16
    assert int(sweep_id, 16) >= 0
    assert ensure_identity(folder).id == sweep_id


@pytest.mark.parametrize("kind", ["link", "relative", "inner link"])
def test_another_path_is_the_same_sweep(folder, tmp_path, monkeypatch, kind):
    sweep_id = read_sweep_json(folder).id
    (tmp_path / "link").symlink_to(tmp_path if kind == "inner link" else folder.path)
    monkeypatch.chdir(tmp_path)
    path = {"link": tmp_path / "link", "relative": Path("first"), "inner link": tmp_path / "link/first"}[kind]
    assert ensure_identity(SweepFolder(path), pytest.fail).id == sweep_id
    assert not state_of(folder).allocations["n1-0000aaaa.0"].is_copied


@pytest.mark.parametrize("parent", ["", "elsewhere"])
def test_a_copy_is_known_after_its_original_was_renamed(folder, tmp_path, parent):
    (tmp_path / parent).mkdir(exist_ok=True)
    copy = copy_of(folder, f"{parent}/copy" if parent else "copy")
    original = rename_sweep(folder, "renamed")
    assert ensure_identity(copy).copy_of == read_sweep_json(original).id


@pytest.mark.parametrize("move", ["rename", "mv", "cp and rm"])
def test_a_moved_folder_keeps_its_id(folder, tmp_path, move):
    sweep_id, new_path = read_sweep_json(folder).id, tmp_path / "second"
    if move == "rename":
        rename_sweep(folder, "second")
    elif move == "mv":
        folder.path.rename(new_path)
    else:
        shutil.copytree(folder.path, new_path)
        shutil.rmtree(folder.path)
    moved = SweepFolder(new_path)
    assert ensure_identity(moved, pytest.fail).id == sweep_id
    assert read_sweep_json(moved).place == location_of(moved)
    assert state_of(moved).allocations["n1-0000aaaa.0"].ended is None


def test_a_copy_gets_a_new_id_and_no_jobs(folder):
    lease = Lease(folder, "launcher-a")
    sweep_id, copy, messages = read_sweep_json(folder).id, copy_of(folder), []
    (copy.allocations / "n1-0000bbbb.0").mkdir(parents=True)  # its lines of the journal are lost
    content = ensure_identity(copy, messages.append)
    assert content.id != sweep_id
    assert (content.sweep, content.copy_of, content.place) == ("copy", sweep_id, location_of(copy))
    assert living_launchers(copy) == []
    assert len(living_launchers(folder)) == 1
    lease.release()
    (message,) = messages
    assert f"{copy.path} is a copy of {folder.path}" in message
    allocation = state_of(copy).allocations["n1-0000aaaa.0"]
    assert allocation.is_copied
    assert state_of(copy).allocations["n1-0000bbbb.0"].is_copied
    assert "belongs to the original" in allocation.ended
    assert allocation.held_s == 0.0
    assert ensure_identity(copy, pytest.fail).id == content.id
    assert ensure_identity(folder, pytest.fail).id == sweep_id
    assert state_of(folder).allocations["n1-0000aaaa.0"].ended is None
    copied_copy = ensure_identity(copy_of(copy, "third"))
    assert len({sweep_id, content.id, copied_copy.id}) == 3


def test_a_copy_at_the_old_path_of_a_moved_folder_is_the_copy(folder):
    """As after `mv a b; cp -r b a`."""
    sweep_id, original = read_sweep_json(folder).id, SweepFolder(folder.path.with_name("moved"))
    folder.path.rename(original.path)
    shutil.copytree(original.path, folder.path)
    assert ensure_identity(folder).id != sweep_id
    assert ensure_identity(original, pytest.fail).id == sweep_id


def test_another_sweep_at_the_old_path_makes_no_copy(folder):
    sweep_id, moved = read_sweep_json(folder).id, SweepFolder(folder.path.with_name("moved"))
    folder.path.rename(moved.path)
    ensure_identity(make_folder(folder.path, sweep_json_of(CONFIG, {}), PLAN.candidates[:2]))
    assert ensure_identity(moved, pytest.fail).id == sweep_id


def test_another_device_number_of_the_same_folder_makes_no_copy(folder):
    """A file server has another device number on each host."""
    content = json.loads(folder.sweep_json.read_text())
    content["place"]["device"] += 1
    folder.sweep_json.write_text(json.dumps(content))
    assert ensure_identity(folder, pytest.fail).id == content["id"]


@pytest.mark.parametrize("name", ["local", "slurm"])
def test_an_old_folder_gets_an_id_and_keeps_what_it_holds(tmp_path, name):
    shutil.copytree(FIXTURE / name, tmp_path / "t")
    old = SweepFolder(tmp_path / "t")
    content, before = json.loads(old.sweep_json.read_text()), state_of(old)
    assert read_sweep_json(old).id == ""
    sweep_id = ensure_identity(old, pytest.fail).id
    new_content = json.loads(old.sweep_json.read_text())
    assert {key: new_content[key] for key in content} == content
    assert (len(sweep_id), state_of(old)) == (16, before)


def test_commands_that_write_at_the_same_time_agree_on_the_id(tmp_path):
    shutil.copytree(FIXTURE / "local", tmp_path / "t")
    old = SweepFolder(tmp_path / "t")
    text = old.sweep_json.read_text()
    first_id = ensure_identity(old).id
    old.sweep_json.write_text(text)  # as the other command had read it
    assert ensure_identity(old).id == first_id


def test_a_copy_of_an_old_folder_has_no_jobs(tmp_path):
    """The allocations say which folder they belong to."""
    original = make_folder(tmp_path / "old", replace(sweep_json_of(CONFIG, {}), id=""), PLAN.candidates[:2])
    (allocation,) = first_allocations(open_sweep(original.path))
    allocation.write()
    write(original, AllocationPlanned(allocation=allocation.name, nodes=1, limit_s=60.0, tasks=()))
    copy = copy_of(original)
    assert ensure_identity(copy).copy_of == OLD_COPY
    assert state_of(copy).allocations[allocation.name].is_copied
    assert ensure_identity(original, pytest.fail).copy_of == ""


@pytest.mark.skipif(os.getuid() == 0, reason="root may write everywhere")
def test_a_folder_that_cannot_be_written_is_told(folder):
    copy = copy_of(folder)
    copy.path.chmod(0o555)
    with pytest.raises(Exception, match="make it writable"):
        ensure_identity(copy)
