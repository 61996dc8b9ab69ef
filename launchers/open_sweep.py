"""Opens a sweep for a launch: makes its folder, gathers facts about this machine, and writes the plan."""

import functools
import hashlib
import json
import math
import os
import platform
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import ultrabench
from ultrabench import checkout
from ultrabench.column import BYTES
from ultrabench.errors import ClusterError, ConfigError, SweepFolderError, counted
from ultrabench.kernel_config import JUDGED_ANEW, LOG_OPTIONS
from ultrabench.launchers.launcher import Say
from ultrabench.launchers.required_programs import PROBE_TIMEOUT_S, require_checkpoint_folder, require_local
from ultrabench.processes import run_python
from ultrabench.record import to_dict
from ultrabench.result import RunResult, Status
from ultrabench.run import AttemptKey, env_id
from ultrabench.store.claim import give_up, owner_of
from ultrabench.store.events import Launched, Reread
from ultrabench.store.folder import SweepFolder, write_whole
from ultrabench.store.identity import ensure_identity, new_sweep_id
from ultrabench.store.journal import JournalReader, JournalWriter, read_journal
from ultrabench.store.kernel_secrets import redact_arguments, write_secrets
from ultrabench.store.lease import Lease
from ultrabench.store.state import Fold, SweepState
from ultrabench.store.state import fold as fold_events
from ultrabench.store.sweep_json import (
    SweepJson,
    create_sweep_json,
    find_sweep_json,
    location_of,
    read_sweep_json,
)
from ultrabench.sweep.config.launcher_config import ON_CLUSTER
from ultrabench.sweep.config.load import profile_of
from ultrabench.sweep.config.options import read_flags, values_in
from ultrabench.sweep.config.sweep_config import WEAK, SweepConfig, scaled_gbs
from ultrabench.sweep.plan import Plan, make_plan
from ultrabench.sweep.plan_table import write_plan
from ultrabench.sweep.running.price import within_limit
from ultrabench.variant import FLAGS, JOB_OPTIONS, variables_of

Accepts = Callable[[RunResult], bool]
"""Says whether a result with the status ok counts for a launch."""


def sweep_json_of(config: SweepConfig, environment: dict[str, Any]) -> SweepJson:
    """The content of sweep.json for a new sweep.

    Args:
        environment: facts about this machine from the kernel's environment probe, and the measured rate
            of a core if the hardware names no rate.
    """
    return SweepJson(
        sweep=config.name, cluster=config.cluster, hardware=config.hardware, kernel=config.kernel,
        kernel_digest=config.kernel.digest(), models=config.models, workload=config.workload,
        core_flops_per_s=environment.get("core_flops_per_s"), cores=environment.get("cores"),
        environment=environment, provenance=provenance(config), config=config.resolved,
    )  # fmt: skip


def require_same(sweep_json: SweepJson, config: SweepConfig, path: Path) -> None:
    """Raises if `config` does not describe the sweep in the folder `path`.

    Axes and models may change, which makes the plan larger or smaller; hardware, kernel and workload may not. Options
    may get more values.

    Raises:
        ConfigError: they differ; the message shows the differences.
    """
    for section in ("hardware", "kernel", "workload"):
        old_values, new_values = to_dict(getattr(sweep_json, section)), to_dict(getattr(config, section))
        # An architecture decides what a plan refuses, rated_power_w no number alone; source is a text. The size of the
        # model decides MFU and predictions, which follow the latest launch.
        for name in ("architecture", "rated_power_w", "source", *LOG_OPTIONS, *JUDGED_ANEW):
            new_values.pop(name, None)
        allowed = {k: config.options.values.get(k, (new_values[k],)) for k in new_values}
        if section == "workload":  # see require_same_batches
            new_values.pop("gbs")
        changed_options = [k for k in sorted(new_values) if old_values[k] not in (new_values[k], *allowed[k])]
        changes = [f"{section}.{_change_text(k, old_values[k], new_values[k])}" for k in changed_options]
        if changes:
            problem = f"{path} is a sweep with a different {section} ({', '.join(changes)})"
            raise ConfigError(problem, "start a new one with name=NAME")
    require_same_batches(sweep_json.config, config, path)


def _change_text(option: str, old_value: Any, new_value: Any) -> str:
    """Both values of an option; of texts of files, which may be long, only the names of those that differ."""
    if option != "files":
        return f"{option}: {old_value!r} -> {new_value!r}"
    names = sorted(old_value.keys() | new_value.keys())
    return f"files: {', '.join(name for name in names if old_value.get(name) != new_value.get(name))}"


def require_same_batches(resolved_config: Mapping[str, Any], config: SweepConfig, path: Path) -> None:
    """Raises ConfigError if a number of nodes had another global batch in an earlier launch.

    Args:
        resolved_config: the composed configuration of that launch.
    """
    sweep_settings = resolved_config.get("sweep", {})
    if not {"nodes", "gbs"} <= sweep_settings.keys() or not config.kernel.trains:
        return
    earlier_nodes, gbs = sorted(values_in(sweep_settings["nodes"])), values_in(sweep_settings["gbs"])[0]
    earlier_scaling, fewest_nodes = sweep_settings.get("scaling") or "strong", min(config.axes.nodes)

    def earlier_gbs(nodes: int) -> Fraction:
        return scaled_gbs(gbs, nodes, earlier_nodes[0], earlier_scaling)

    for nodes in earlier_nodes:
        gbs_choices = [config.gbs_on(nodes, value) for value in config.options.values["gbs"]]
        if earlier_gbs(nodes) not in gbs_choices:
            nodes_text = f" on {counted(nodes, 'node')}" if WEAK in (earlier_scaling, config.scaling) else ""
            problem = (
                f"{path} is a sweep with a different workload (workload.gbs{nodes_text}: "
                f"{earlier_gbs(nodes)} -> {gbs_choices[0]})"
            )
            next_gbs = earlier_gbs(fewest_nodes)
            is_series = earlier_scaling == config.scaling == WEAK and next_gbs.denominator == 1
            gbs_hint = f"use sweep.gbs={next_gbs}, that of {counted(fewest_nodes, 'node')}, or " * is_series
            raise ConfigError(problem, f"{gbs_hint}start a new one with name=NAME")


def require_same_launch(state: SweepState, config: SweepConfig, path: Path) -> None:
    """Raises ConfigError where the latest launch had other arguments of flags, or batches."""
    require_same_flags(state, config)
    require_same_batches(state.config, config, path)


def require_same_flags(state: SweepState, config: SweepConfig) -> None:
    """Raises ConfigError if a value of a flag now means other arguments than at the latest launch."""
    settings = state.config.get("sweep", {}).get(FLAGS) or {}
    flag_settings = settings.items() if isinstance(settings, dict) else ()
    mapped_flags = {name: flag for name, flag in flag_settings if isinstance(flag, dict)}
    old_flags = read_flags(mapped_flags)
    for name, value in ((name, value) for name, values in old_flags.items() for value in values):
        arguments = config.options.arguments.get(name, {}).get(value)
        if arguments is not None and arguments != old_flags[name][value]:
            problem = (
                f"sweep.flags.{name}.{value}: {[*old_flags[name][value]]} -> {[*arguments]} in a "
                "sweep that was launched before"
            )
            raise ConfigError(problem, "give these arguments another name")


def provenance(config: SweepConfig) -> dict[str, Any]:
    """The user, host, version and sources of a launch, for the record."""
    commit = checkout.commit_sha()
    return {
        "git_commit": commit,
        "git_dirty": bool(checkout.uncommitted_patch()) if commit else None,
        "version": ultrabench.__version__,
        "python": platform.python_version(),
        "argv": redact_arguments(sys.argv[1:], config.secrets),
        "user": os.environ.get("USER") or str(os.getuid()),
        "host": platform.node(),
        "created_at": time.time(),
    }


@dataclass(slots=True, kw_only=True)
class OpenSweep:
    """A sweep that this process launches."""

    folder: SweepFolder
    plan: Plan
    journal: JournalWriter
    reader: JournalReader
    environment: dict[str, Any]
    accepts: Accepts
    kernel_digest: str
    """Digest of the training program when the sweep was launched."""
    git_commit: str | None
    sweep_id: str = ""
    """Id of the sweep."""
    lease: Lease | None = None
    """Shows others that this launcher is alive; None in tests without a launcher."""
    max_gpu_hours: float | None = None
    """The budget of this launch; None means that it has no limit."""
    fold: Fold = field(default_factory=Fold)
    """The events that `reader` has read so far."""

    @property
    def config(self) -> SweepConfig:
        """The configuration of the sweep."""
        return self.plan.config

    def state(self) -> SweepState:
        """The state of the sweep now; every call returns the same object, which grows with the journal."""
        return self.fold.add(self.reader.poll())

    @property
    def has_lapsed(self) -> bool:
        """Whether others may take this launcher for dead, as after it was suspended, so that it must look again."""
        return self.lease is not None and self.lease.has_lapsed()

    def renew_lapsed_lease(self) -> bool:
        """Takes the lease again if it lapsed, as while this launcher was suspended; returns whether it had lapsed.

        Raises:
            ClusterError: the folder was deleted, or holds another sweep now.
            OSError: the folder cannot be written now.
        """
        if self.lease is None or not self.lease.has_lapsed():
            return False
        self.folder.require_present()
        if read_sweep_json(self.folder).id != self.sweep_id:
            failure = f"{self.folder.path} holds another sweep since this launcher was suspended"
            raise ClusterError(f"{failure}; find this one with: ultrabench sweep list")
        self.lease.renew_lapsed()
        return True

    def owner_of(self, name: str) -> str | None:
        """The allocation that claimed this attempt or allocation; None if nobody has claimed it."""
        return owner_of(self.folder.claims, name)

    def give_up(self, name: str) -> bool:
        """Claims an allocation so that it never runs; returns False if its agents already own it."""
        return give_up(self.folder.claims, name)


def folder_of(config: SweepConfig) -> SweepFolder:
    """The folder of the sweep of a configuration."""
    return SweepFolder(Path(config.results_dir).absolute() / config.name)


def in_force(config: SweepConfig, warn: Say) -> SweepConfig:
    """The configuration with the profile and the memory of GPUs that its sweep began with.

    A profile of another name that is given stays. The memory of a GPU decides predictions only, while on CPUs it is
    enforced, and a sweep with another one is another sweep.
    """
    sweep_json = find_sweep_json(folder_of(config))
    frozen_profile = sweep_json.config.get("profile") if sweep_json else None
    if sweep_json and sweep_json.hardware.name == config.hardware.name and not config.hardware.shares_host:
        hardware = replace(config.hardware, mem_bytes=sweep_json.hardware.mem_bytes)
        if hardware != config.hardware:
            old_text, new_text = (BYTES.exact_text(hw.mem_bytes) for hw in (hardware, config.hardware))
            problem = (
                f"sweep {config.name} was launched with {old_text} per GPU, "
                f"hardware={hardware.name} now has {new_text}"
            )
            warn(
                f"{problem}; its predictions keep using {old_text}: to use {new_text}, start a new sweep with name=NAME"
            )
            resolved = config.resolved | {"hardware": to_dict(hardware)}
            config = replace(config, hardware=hardware, resolved=resolved)
    if not isinstance(frozen_profile, dict) or frozen_profile.get("name") != config.profile.name:
        return config
    profile = profile_of({"profile": frozen_profile, "kernel": {}}, config.hardware.device)
    return replace(config, profile=profile, resolved=config.resolved | {"profile": to_dict(profile)})


def measured_cores(config: SweepConfig, say: Say) -> dict[str, Any]:
    """The rate and number of this machine's cores as arguments of `make_plan`;
    empty for hardware with a rate of its own.

    They are those of the sweep, if there is one, else they are measured now, so that a price is that of this machine.

    Raises:
        ClusterError: the cores cannot be measured.
    """
    if config.hardware.peak_flops_per_s:
        return {}
    if (sweep_json := find_sweep_json(folder_of(config))) is not None:
        return {"core_flops_per_s": sweep_json.core_flops_per_s, "cores": sweep_json.cores or 1}
    environment = _machine_facts(config, needs_peak=True, say=say)
    return {"core_flops_per_s": environment["core_flops_per_s"], "cores": environment["cores"]}


def require_reuse(reuse: str | None) -> None:
    """Raises ConfigError unless `reuse` says what happens to results of another environment, or nothing does."""
    if reuse not in (None, "same", "any"):
        choices = "same (measure again in the new environment) or any (keep the old results)"
        raise ConfigError(f"--reuse {reuse}; must be {choices}")


def open_sweep(
    plan: Plan,
    *,
    reuse: str | None,
    warn: Say,
    say: Say,
    retry: Sequence[AttemptKey] = (),
    max_gpu_hours: float | None = None,
    max_limit_s: float = math.inf,
    rereads: Sequence[Reread] = (),
    asked: tuple[float, float, float] | None = None,
) -> OpenSweep:
    """Creates or continues the sweep of a plan, which it makes again if cores have another rate than in the plan.

    Args:
        reuse: what to do with ok results of another environment: `any` counts them, `same` measures
            again, None raises if there are any.
        max_gpu_hours: the budget of this launch; None means no limit.
        max_limit_s: the longest time limit of a job that the site allows; longer runs are left out.
        retry: failed attempts to repeat even if the retry policy would not repeat them.
        rereads: results that other patterns of this launch have read in kept logs.
        asked: GPU hours of the whole sweep that the user was asked about, with the ends of their interval; None if the
            user was not.

    Raises:
        ConfigError, SweepFolderError: the sweep cannot be launched with these values; nothing was written.
        ClusterError: the facts about this machine could not be gathered.
    """
    plan, config = within_limit(plan, max_limit_s), plan.config
    require_local(config)
    require_checkpoint_folder(config)
    require_reuse(reuse)
    folder = folder_of(config)
    existing_json = find_sweep_json(folder)
    journal, lease = JournalWriter(folder.journal, "launcher"), None
    has_known_peak = bool(config.hardware.peak_flops_per_s)
    if existing_json is not None:
        require_same(existing_json, config, folder.path)
        existing_json = ensure_identity(folder, say)
        lease = _take_lease(folder, journal)  # others see it also while this machine is measured
    needs_peak = not has_known_peak and existing_json is None
    # Where the plan has the measured rate, the user knows of the measurement, whose result is kept.
    say_facts = (lambda message: None) if needs_peak and plan.core_flops_per_s else say
    environment = _machine_facts(config, needs_peak=needs_peak, say=say_facts)
    folder.create()
    lease = lease or _take_lease(folder, journal)
    sweep_json = existing_json or _new_sweep_json(folder, sweep_json_of(config, environment))
    if existing_json is None:
        require_same(sweep_json, config, folder.path)  # another launch may have created it meanwhile
    write_secrets(config.kernel.env, folder.secrets, config.secrets)
    if not has_known_peak:
        core_flops_per_s, cores = sweep_json.core_flops_per_s, sweep_json.cores or 1
        if (plan.core_flops_per_s, plan.cores) != (core_flops_per_s, cores):
            plan = within_limit(
                make_plan(config, core_flops_per_s=core_flops_per_s, cores=cores), max_limit_s
            )
        peak = sweep_json.peak(1, config.kernel.precision)
        if peak and peak.mfu_problem:
            candidates = (replace(c, mfu_problem=peak.mfu_problem) for c in plan.candidates)
            plan = replace(plan, candidates=tuple(candidates))
            warn(f"no MFU: {peak.mfu_problem}")
    reader, fold = JournalReader(folder.journal, warn), Fold()
    state = fold.add(reader.poll())
    require_same_launch(state, config, folder.path)
    accepts = acceptance(config, environment, state, reuse)
    digest, launch_provenance = config.kernel.digest(), provenance(config)
    launch_event = Launched(
        generation=state.generation + 1, config=config.resolved, provenance=launch_provenance, kernel_digest=digest,
        reuse=reuse, retry=tuple(retry), max_gpu_hours=max_gpu_hours, work_dir=str(Path.cwd()),
        sweep_id=sweep_json.id, asked_gpu_hours=asked,
    )  # fmt: skip
    journal.write(launch_event)
    for event in rereads:
        journal.write(replace(event, generation=launch_event.generation))
    _keep_difference(folder)
    write_plan(plan.candidates, folder.plan)
    return OpenSweep(
        folder=folder, plan=plan, journal=journal, reader=reader, fold=fold, environment=environment,
        accepts=accepts, kernel_digest=digest, git_commit=launch_provenance["git_commit"], max_gpu_hours=max_gpu_hours,
        sweep_id=sweep_json.id, lease=lease,
    )  # fmt: skip


def _take_lease(folder: SweepFolder, journal: JournalWriter) -> Lease:
    """The lease of this launcher on a sweep; from now on others see that a launcher follows it.

    Raises:
        SweepFolderError: the folder cannot be written.
    """
    try:
        return Lease(folder, journal.name)
    except OSError as error:
        failure = f"cannot write {folder.leases}: {error.strerror}; free space or make it writable"
        raise SweepFolderError(failure) from error


def _new_sweep_json(folder: SweepFolder, content: SweepJson) -> SweepJson:
    """Creates sweep.json with a new id, or with that of the journal if the file was deleted."""
    launched = fold_events(read_journal(folder.journal)).launched
    sweep_id = (launched.sweep_id if launched else "") or new_sweep_id()
    return create_sweep_json(folder, replace(content, id=sweep_id, place=location_of(folder)))


def _machine_facts(config: SweepConfig, needs_peak: bool, say: Say) -> dict[str, Any]:
    """The facts about this machine; only its number of cores if torch (slow to import) is not needed.

    Torch is needed to measure the peak rate, to find GPUs, and when runs of our own kernel on this machine
    record its version.

    Raises:
        ConfigError: the sweep runs on this machine, which has fewer GPUs than its hardware.
    """
    is_local, hardware = not config.launcher.holds_nodes, config.hardware
    num_needed_gpus = hardware.gpus_per_node if is_local and hardware.has_gpus else 0
    if not needs_peak and not num_needed_gpus and not (is_local and config.kernel.forks):
        return {"cores": len(os.sched_getaffinity(0))}
    say("checking this machine" + (" and measuring its cores" if needs_peak else ""))
    environment = probe_machine(needs_peak)
    num_gpus = int(environment.get("gpus") or 0)
    if num_gpus < num_needed_gpus:
        alternative = f"hardware.gpus_per_node={num_gpus}" if num_gpus else "hardware=cpu, without GPUs"
        problem = (
            f"hardware={hardware.name} has {counted(num_needed_gpus, 'GPU')} a node; "
            f"torch sees {num_gpus or 'none'}"
        )
        advice = f"add {ON_CLUSTER} to run on a cluster, or use {alternative}"
        raise ConfigError(f"{problem} on this machine: {advice}")
    return environment


def _keep_difference(folder: SweepFolder) -> None:
    """Saves the uncommitted changes of the sources as a patch, named by the hash of its content."""
    patch = checkout.uncommitted_patch()
    if patch:
        patch_hash = hashlib.sha256(patch).hexdigest()[:16]
        write_whole(folder.path / f"changes-{patch_hash}.patch", patch)


@functools.cache  # an acceptance run opens several sweeps
def probe_machine(measures_peak: bool) -> dict[str, Any]:
    """The report of the kernel's environment probe, which runs in its own process because it needs torch.

    Raises:
        ClusterError: the probe failed.
    """
    arguments = ["ultrabench.kernel.rank.environment", *(["--peak"] if measures_peak else [])]
    try:
        return dict(json.loads(run_python("-m", *arguments, timeout_s=PROBE_TIMEOUT_S)))
    except (ClusterError, ValueError) as error:
        raise ClusterError(f"the kernel does not start here: {error}") from error


def acceptance(
    config: SweepConfig, environment: dict[str, Any], state: SweepState, reuse: str | None
) -> Accepts:
    """A function that says whether an ok result counts, judged by the environment it was measured in."""
    probe_facts = environment if config.kernel.forks else {}
    digest = config.kernel.digest()
    env_id_here = env_id(probe_facts, config.kernel, digest, variables_of(config.options.first_variant))
    # This host does not know the libraries on the nodes of a cluster, nor those of other interpreters and containers,
    # so there only the sources are compared.
    only_sources_count = config.launcher.holds_nodes or any(
        name in config.options.values for name in JOB_OPTIONS
    )

    def is_same_environment(result: RunResult) -> bool:
        return result.kernel_digest == digest if only_sources_count else result.env_id == env_id_here

    ok_results = [a.result for a in state.attempts.values() if a.result and a.result.status == Status.OK]
    other_results = [r for r in ok_results if not is_same_environment(r)]
    if other_results and reuse is None:
        digests = ", ".join(sorted({r.kernel_digest or "?" for r in other_results}))
        their_text = f"theirs: kernel_digest {digests}, torch {other_results[0].torch_version}"
        our_text = f"here: {digest}, torch {probe_facts.get('torch_version')}"
        difference = f"other sources, torch or machine; {their_text}; {our_text}"
        conflict = f"{len(other_results)} of {len(ok_results)} results come from a different environment ({difference})"
        raise ConfigError(f"{conflict}; --reuse any counts them, --reuse same measures those runs again")
    if reuse == "any":
        return lambda result: True
    return is_same_environment
