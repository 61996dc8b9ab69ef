"""Opens a sweep for launching: its folder, its plan, and what this machine is."""

import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ultrabench.errors import ClusterError, ConfigError
from ultrabench.folder import SweepFolder
from ultrabench.journal import JournalReader, JournalWriter
from ultrabench.result import RunResult, Status
from ultrabench.run import env_id
from ultrabench.state import AttemptKey, SweepState, fold
from ultrabench.sweep.config import SweepConfig
from ultrabench.sweep.head import make_head, provenance, require_same
from ultrabench.sweep.plan import Plan, make_plan, require_runs
from ultrabench.sweep.plan_table import write_plan

PROBE_TIMEOUT_S = 120.0


@dataclass(slots=True, kw_only=True)
class OpenSweep:
    """A sweep that this process launches."""

    folder: SweepFolder
    plan: Plan
    journal: JournalWriter
    reader: JournalReader
    environment: dict[str, Any]
    accepts: Callable[[RunResult], bool]
    """Whether an ok result counts here."""
    _folded: tuple[int, SweepState] | None = None

    @property
    def config(self) -> SweepConfig:
        """Its configuration."""
        return self.plan.config

    def state(self) -> SweepState:
        """The state now; folded anew only when the journal has grown."""
        events = self.reader.poll()
        if self._folded is None or self._folded[0] != len(events):
            self._folded = (len(events), fold(events))
        return self._folded[1]


def open_sweep(
    config: SweepConfig,
    *,
    reuse: str | None,
    warn: Callable[[str], None],
    say: Callable[[str], None],
    retry: Sequence[AttemptKey] = (),
) -> OpenSweep:
    """Creates or continues the sweep of `config`.

    Args:
        reuse: what to do with ok results of another environment: `any` counts them, `same` measures
            again, None asks.
        retry: failed attempts to try again, whatever the policy had settled.

    Raises:
        ConfigError, SweepFolderError: it cannot be launched like this; nothing was written.
        ClusterError: this machine could not be looked at.
    """
    require_local(config)
    if reuse not in (None, "same", "any"):
        raise ConfigError(f"--reuse {reuse}; must be same (measure again) or any (count them)")
    plan = make_plan(config)
    require_runs(plan)
    folder = SweepFolder(Path(config.results_dir).absolute() / config.name)
    head = folder.read_head()
    if head is not None:
        require_same(head, config, folder.path)
    measured = head["peak"] if head else {}
    in_table = bool(config.hardware.accelerator.peak_flops_per_s)
    needs_peak = not in_table and not measured
    say("looking at this machine" + (" and measuring its cores" if needs_peak else ""))
    environment = look_at_machine(needs_peak)
    _require_gpus(config, int(environment.get("gpus") or 0))
    folder.create()
    peak = measured or {k: environment.get(k) for k in ("core_flops_per_s", "cores")}
    if not in_table:
        plan = make_plan(config, core_flops_per_s=peak.get("core_flops_per_s"), cores=peak.get("cores") or 1)
    reader = JournalReader(folder.journal, warn)
    state = fold(reader.poll())
    accepts = _reuse(config, environment, state, reuse)
    if head is None:
        folder.write_head(make_head(config, environment))
    journal = JournalWriter(folder.journal, "launcher")
    journal.write(
        "config", generation=state.generation + 1, config=config.resolved, provenance=provenance(),
        kernel_digest=config.kernel.digest(), reuse=reuse, retry=[list(key) for key in retry],
    )  # fmt: skip
    write_plan(plan, folder.plan)
    return OpenSweep(
        folder=folder, plan=plan, journal=journal, reader=reader, environment=environment,
        accepts=accepts,
    )  # fmt: skip


def require_local(config: SweepConfig) -> None:
    """Raises when the local launcher cannot stand for this hardware.

    Raises:
        ConfigError: real nodes, and more than one.
    """
    most = max(config.axes.nodes)
    if config.launcher.name == "local" and most > 1 and not config.hardware.simulated:
        raise ConfigError(
            f"sweep.nodes up to {most} of hardware={config.hardware.name} with launcher=local, which has this "
            "machine only; use sweep.nodes=[1], or hardware=cpu for simulated nodes"
        )


def _require_gpus(config: SweepConfig, gpus: int) -> None:
    hardware = config.hardware
    if hardware.device == "cuda" and gpus < hardware.gpus_per_node:
        raise ConfigError(
            f"hardware={hardware.name} has {hardware.gpus_per_node} GPUs a node; this machine has {gpus}: "
            "use hardware=cpu, or hardware.gpus_per_node"
        )


def look_at_machine(peak: bool) -> dict[str, Any]:
    """What the kernel's environment probe reports, run in a process of its own (it needs torch).

    Raises:
        ClusterError: it failed.
    """
    command = [sys.executable, "-P", "-m", "ultrabench.kernel.environment", *(["--peak"] if peak else [])]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=PROBE_TIMEOUT_S, check=True)
        found: dict[str, Any] = json.loads(done.stdout)
    except subprocess.CalledProcessError as error:
        last = (error.stderr.strip().splitlines() or ["no message"])[-1]
        raise ClusterError(f"the kernel does not start here: {last}") from error
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        raise ClusterError(f"the kernel does not start here: {error}") from error
    return found


def _reuse(
    config: SweepConfig, environment: dict[str, Any], state: SweepState, reuse: str | None
) -> Callable[[RunResult], bool]:
    """Which ok results count, given where they were measured."""
    facts = environment if config.kernel.kind == "embedded" else {}
    here = env_id(facts, config.kernel, config.kernel.digest())
    oks = [a.result for a in state.attempts.values() if a.result and a.result.status == Status.OK]
    others = [r for r in oks if r.env_id != here]
    if others and reuse is None:
        what = sorted({r.kernel_digest or "?" for r in others})
        raise ConfigError(
            f"{len(others)} of {len(oks)} results were measured in another environment (kernel sources, "
            f"torch or machine; theirs: kernel_digest {', '.join(what)}, torch {others[0].torch_version}; "
            f"here: {config.kernel.digest()}, torch {facts.get('torch_version')}); "
            "--reuse any counts them, --reuse same measures those runs again"
        )
    if reuse == "any":
        return lambda result: True
    return lambda result: result.env_id == here


def rank_threads(config: SweepConfig, nodes: int, cores: int) -> int:
    """OMP_NUM_THREADS of a rank: the host's cores shared by the ranks on it."""
    hosts_nodes = nodes if config.hardware.simulated else 1
    return max(1, cores // (config.hardware.gpus_per_node * hosts_nodes))
