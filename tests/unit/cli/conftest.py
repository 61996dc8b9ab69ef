import json
import re
import sys
from itertools import chain

import pytest

from tests.configs import expected
from tests.sweep_folder import attempted, ended, finished, make_folder, write
from ultrabench.cli import main as cli
from ultrabench.launchers.open_sweep import sweep_json_of
from ultrabench.result import Status
from ultrabench.run import AttemptKey
from ultrabench.store.events import Launched
from ultrabench.sweep.config.load import load_config
from ultrabench.sweep.plan import make_plan

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
        with pytest.raises(SystemExit) as exit_info:
            cli.main()
        captured = capsys.readouterr()
        return exit_info.value.code, captured.out, captured.err

    return run


@pytest.fixture
def sweep(tmp_path):
    """A sweep of which one run is ok, one crashed and the rest was never tried."""
    folder = make_folder(tmp_path / "results" / "quick-cpu", HEAD, QUICK.candidates)
    failure = {"status": Status.CRASH, "reason": "rank 1: ValueError: [bold]no[/bold]", "duration_s": 4.0}
    ends = ended(loss_final=3.0, duration_s=9.0), ended(**failure)
    attempts = [attempted(run.spec, end, allocation="n1") for run, end in zip(QUICK.runs, ends, strict=False)]
    write(folder, Launched(generation=1, config=QUICK.config.resolved), *chain(*attempts))
    return folder


def record(sweep, run, attempt=0, repeat=0, allocation=None, **values):
    """Journals the result of a run's attempt: ok in 0.1 s a step unless `values` say otherwise."""
    result = ended(**{"loss_final": 3.0} | values) if "status" not in values else ended(**values)
    write(sweep, finished(run.spec, AttemptKey(run.run_id, repeat, attempt), result, allocation=allocation))


def content(sweep):
    """The bytes of each file of a sweep."""
    return {path: path.read_bytes() for path in sweep.path.rglob("*") if path.is_file()}


def one_line(run, *words, code=2):
    """The one line on stderr of a command that the user got wrong."""
    exit_code, out, err = run(*words)
    assert (exit_code, out) == (code, ""), err
    assert re.fullmatch("ultrabench: .+\n", err)
    message = err.removeprefix("ultrabench: ").strip()
    expected(message, ("ultrabench", *words))
    return message


def as_json(run, *words):
    code, out, err = run(*words, "--json")
    assert code == 0, err
    return json.loads(out)
