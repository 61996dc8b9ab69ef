"""`ultrabench sweep plan --show-script`."""

import sys
from collections.abc import Sequence

from ultrabench.cli.launch import folder_of
from ultrabench.errors import ConfigError
from ultrabench.journal import JournalReader, JournalWriter
from ultrabench.launchers.allocate import allocations, shapes
from ultrabench.launchers.open_sweep import OpenSweep
from ultrabench.launchers.slurm.script import array_script
from ultrabench.state import SweepState
from ultrabench.sweep.config import load_config
from ultrabench.sweep.decide import next_step
from ultrabench.sweep.plan import make_plan, require_runs
from ultrabench.sweep.price import drafts


def print_script(overrides: Sequence[str]) -> None:
    """Prints the script that a launch would submit first; writes nothing and asks Slurm nothing.

    Raises:
        ConfigError: the launcher has no scripts, or nothing can run.
    """
    config = load_config(overrides)
    if config.launcher.name != "slurm":
        raise ConfigError(f"launcher={config.launcher.name} submits no script; add launcher=slurm")
    plan = make_plan(config)
    require_runs(plan)
    folder = folder_of(config)
    sweep = OpenSweep(
        folder=folder,
        plan=plan,
        journal=JournalWriter(folder.journal, "plan"),
        reader=JournalReader(folder.journal),
        environment={},
        accepts=lambda result: True,
        kernel_digest=config.kernel.digest(),
        git_commit=None,
    )
    decision = next_step(plan, SweepState(), frozenset())
    made = drafts(plan, decision.todo, SweepState(), untried=decision.untried)
    first = shapes(made[: config.launcher.max_jobs], sys.maxsize)[0]
    script = array_script(allocations(sweep, first), config.launcher, config.hardware)
    sys.stdout.write(script.executor().text(script.command))
