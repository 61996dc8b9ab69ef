"""`ultrabench sweep plan --show-script`."""

import sys
import uuid
from collections.abc import Sequence

from ultrabench.cli.sweep.launch import folder_of
from ultrabench.errors import ConfigError
from ultrabench.launchers.allocate import allocations, shapes
from ultrabench.launchers.slurm.script import array_script
from ultrabench.store.state import SweepState
from ultrabench.sweep.config.load import load_config
from ultrabench.sweep.plan import make_plan, require_runs
from ultrabench.sweep.running.attempts import next_attempts
from ultrabench.sweep.running.price import planned_jobs


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
    left = next_attempts(plan, SweepState(), frozenset())
    jobs = planned_jobs(plan, left.todo, SweepState(), untried=left.untried)
    first = shapes(jobs[: config.launcher.max_jobs], sys.maxsize)[0]
    made = allocations(
        plan, folder_of(config), first, token=uuid.uuid4().hex, by={}, kernel_digest=config.kernel.digest()
    )
    sys.stdout.write(array_script(made, config.launcher, config.hardware).text)
