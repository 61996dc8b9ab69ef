import json
import re
import sys

import pytest

from ultrabench.cli import main as cli
from ultrabench.launchers.open_sweep import sweep_json_of
from ultrabench.record import to_dict
from ultrabench.result import RunResult, Status
from ultrabench.store.events import Claimed, Failed, Launched, Result
from ultrabench.store.folder import SweepFolder
from ultrabench.store.journal import JournalWriter
from ultrabench.store.sweep_json import write_sweep_json
from ultrabench.sweep.config.load import load_config
from ultrabench.sweep.plan import make_plan
from ultrabench.sweep.plan_table import write_plan

QUICK = make_plan(load_config(["model=tiny"]))


HEAD = sweep_json_of(QUICK.config, {"core_flops_per_s": 1e10, "cores": 2})


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ULTRABENCH_CONFIG_DIR", str(tmp_path / "nobody"))
    # Other tests that run now would add a warning to each launch.
    monkeypatch.setattr("ultrabench.cli.sweep.consent.busy_share", lambda seconds: 0.0)


@pytest.fixture
def ultrabench(monkeypatch, capsys):
    """Runs a command line in this process: exit code, stdout, stderr."""

    def run(*words):
        monkeypatch.setattr(sys, "argv", ["ultrabench", *words])
        capsys.readouterr()
        with pytest.raises(SystemExit) as left:
            cli.main()
        said = capsys.readouterr()
        return left.value.code, said.out, said.err

    return run


@pytest.fixture
def sweep(tmp_path):
    """A sweep of which one run is ok, one crashed and the rest was never tried."""
    folder = SweepFolder(tmp_path / "results" / "quick-cpu")
    folder.create()
    write_sweep_json(folder, HEAD)
    write_plan(QUICK.candidates, folder.plan)
    writer = JournalWriter(folder.journal, "agent")
    writer.write(Launched(generation=1, config=QUICK.config.resolved))
    crash = {"status": Status.CRASH, "reason": "rank 1: ValueError: [bold]no[/bold]", "duration_s": 4.0}
    for run, end in zip(QUICK.runs, ({"duration_s": 9.0}, crash), strict=False):
        name = {"run_id": run.run_id, "repeat": 0, "attempt": 0, "spec": to_dict(run.spec)}
        writer.write(Claimed(**name, allocation="n1"))
        record(folder, run, writer=writer, **end)
    return folder


def record(sweep, run, attempt=0, writer=None, **values):
    """Journals the result of a run's attempt: ok in 0.1 s a step unless `values` say otherwise."""
    status, usual = values.get("status", Status.OK), {"step_times_s": (0.1,) * 6, "loss_final": 3.0}
    result = RunResult(**{"status": status} | (usual if status == Status.OK else {}) | values)
    kind = Result if status == Status.OK else Failed
    name = {"run_id": run.run_id, "repeat": 0, "attempt": attempt, "spec": to_dict(run.spec)}
    writer = writer or JournalWriter(sweep.journal, "agent")
    writer.write(kind(**name, source="agent", result=result))


def content(sweep):
    """The bytes of each file of a sweep."""
    return {path: path.read_bytes() for path in sweep.path.rglob("*") if path.is_file()}


def one_line(run, *words, code=2):
    """The one line on stderr of a command that the user got wrong."""
    got, out, err = run(*words)
    assert (got, out) == (code, ""), err
    assert re.fullmatch("ultrabench: .+\n", err)
    return err.removeprefix("ultrabench: ").strip()


def as_json(run, *words):
    code, out, err = run(*words, "--json")
    assert code == 0, err
    return json.loads(out)
