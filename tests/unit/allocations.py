"""Open sweeps, allocations and attempts made by hand, for tests of what is submitted."""

import uuid
from dataclasses import replace
from pathlib import Path

from tests.configs import left
from tests.sweep_folder import ended
from ultrabench.launchers.allocate import make_allocations
from ultrabench.launchers.open_sweep import OpenSweep
from ultrabench.record import field_types, raw_json
from ultrabench.run import AttemptKey
from ultrabench.store.folder import SweepFolder
from ultrabench.store.journal import JournalReader, JournalWriter
from ultrabench.store.state import AttemptState, SweepState
from ultrabench.sweep.config.launcher_config import SlurmSettings
from ultrabench.sweep.config.load import load_config
from ultrabench.sweep.plan import make_plan
from ultrabench.sweep.running.attempts import PlannedAttempt
from ultrabench.sweep.running.price import planned_jobs

CONFIG = load_config(["launcher=slurm", "model=tiny"])
PLAN = make_plan(CONFIG)


def with_launcher(config=CONFIG, **words):
    """The configuration with other settings of its launcher, also of those that only Slurm has."""
    slurm_words = {key: words.pop(key) for key in [*words] if key in field_types(SlurmSettings)}
    slurm = replace(config.launcher.slurm, **slurm_words)
    return replace(config, launcher=replace(config.launcher, slurm=slurm, **words))


def predicted(run, **words):
    """The run with other values in its prediction."""
    return replace(run, predicted=replace(run.prediction, **words))


def open_sweep(path, plan=PLAN, **launcher):
    """A sweep as `sweep launch` opens it; nothing is written."""
    folder = SweepFolder(Path(path))
    return OpenSweep(
        folder=folder, plan=replace(plan, config=with_launcher(plan.config, **launcher)),
        journal=JournalWriter(folder.journal, "test"), reader=JournalReader(folder.journal), environment={},
        accepts=lambda result: True, kernel_digest="digest", git_commit=None,
    )  # fmt: skip


def jobs_of(sweep, state=None, alive=frozenset(), max_limit_s=float("inf")):
    """What a launch would submit next."""
    state = state or SweepState()
    config = sweep.config
    decision = left(
        sweep.plan.runs, state, alive, repeats=config.repeats, accepts=sweep.accepts,
        canary=config.launcher.control,
    )  # fmt: skip
    return [*planned_jobs(sweep.plan, decision, state, max_limit_s)]


def made_of(sweep, jobs, by=None):
    """What the agents of a submission read."""
    return make_allocations(
        sweep.plan, sweep.folder, jobs, token=uuid.uuid4().hex, origin=by or {}, kernel_digest=sweep.kernel_digest,
        git_commit=sweep.git_commit, num_cores=sweep.environment.get("cores"),
    )  # fmt: skip


def first_allocations(sweep, count=1):
    """The allocations of the first jobs, which are alike enough for an array."""
    return made_of(sweep, jobs_of(sweep)[:count])


def key_of(run, repeat=0, attempt=0):
    return AttemptKey(run.run_id, repeat, attempt)


def todo_of(run, repeat=0, patience=1.0):
    """An attempt of a run that is due."""
    return PlannedAttempt(candidate=run, key=key_of(run, repeat), limit_factor=patience)


def told(state, run, status, repeat=0, attempt=0, *, allocation=None, claimed=True, **result):
    """Adds an attempt of a run to a state; it has ended if there is a status."""
    key, spec = key_of(run, repeat, attempt), raw_json(run.spec if claimed else None)
    end = None if status is None else ended(status, **result)
    state.attempts[key] = AttemptState(key=key, allocation=allocation, spec_json=spec, result=end)
    return state
