"""Cases: measured runs with everything that a prediction of their step time needs, and how they are read."""

import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from types import MappingProxyType
from typing import Any

import pyarrow as pa

from ultrabench.analysis.results.collect import open_results
from ultrabench.analysis.results.measured import MeasuredRun, measured_runs
from ultrabench.analysis.results.planned import is_predicted
from ultrabench.analysis.results.rows import Warn
from ultrabench.errors import ConfigError, counted, unknown_name
from ultrabench.hardware import Hardware, Peak
from ultrabench.result import SIZE_DOUBT_CODES, Status
from ultrabench.sweep.config.files import files
from ultrabench.sweep.config.knobs import with_texts
from ultrabench.sweep.config.load import kernel_settings, load_hardware, load_profile, usual_profile
from ultrabench.sweep.predict.memory import largest_stage, memory_constants, predict_memory
from ultrabench.sweep.predict.network import LINK_RATE_COLUMNS, Network, network
from ultrabench.sweep.predict.predict import reserved_share
from ultrabench.sweep.predict.profile import DividedRun, Profile, regime
from ultrabench.sweep.predict.stage_memory import LARGEST
from ultrabench.sweep.predict.step_time import predict_step_time
from ultrabench.sweep.predict.time_constants import FlagConstants, TimeConstants, with_factors, with_flags

MIN_NODE_BUSBW_BYTES_PER_S = 300e9
"""Bus bandwidth of an all-reduce in a node of H100 below which its NVLink counts as broken, in bytes per second."""
MIN_SHARE_OF_MEDIAN = 0.7
"""Share of the median bandwidth of the same number of nodes below which a job's links count as slow."""
MAX_REASONS = 5
"""Largest number of reasons that are printed for rows that cannot be predicted."""
Say = Callable[..., None]
"""Prints lines about the work."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A measured run that a prediction can be compared with."""

    run: MeasuredRun
    hardware: Hardware
    peak: Peak
    links: Network
    divided: DividedRun
    """The run as a profile divides its stages: `for_profile` says which one."""
    regime: str
    """Kind of layout and links for which the profile has its own interval, such as those of `Profile.interval`."""
    gpu_factors: tuple[tuple[str, float], ...] = ()
    """Constants of the step time and the factors that a profile has for the GPU of the run."""
    memory_share: float = 0.0
    """Predicted share of the GPU's memory that the allocator holds, for profiles whose step time depends on it."""

    def predict_s(self, constants: TimeConstants, flags: FlagConstants = MappingProxyType({})) -> float:
        """The predicted step time of the run in seconds; `flags` is that of a profile."""
        cluster = self.hardware, self.peak, self.links
        run_constants = with_factors(with_flags(constants, flags, self.run.spec), self.gpu_factors)
        return predict_step_time(self.divided, *cluster, run_constants, self.memory_share).total

    def interval_s(self, profile: Profile) -> tuple[float, float, float]:
        """The predicted step time in seconds, and the ends of the interval in which 80 % of such runs lie."""
        step_time_s = self.predict_s(profile.time, profile.flags)
        low_log, high_log = profile.interval_of(self.run.spec, self.hardware.gpu_at_limit, self.links)
        return step_time_s, step_time_s * math.exp(low_log), step_time_s * math.exp(high_log)

    def log_error(self, constants: TimeConstants, flags: FlagConstants = MappingProxyType({})) -> float:
        """log(measured / predicted) of the step time, for a run that has one."""
        assert self.run.step_time_s is not None
        return math.log(self.run.step_time_s / self.predict_s(constants, flags))


def cases(runs: Sequence[MeasuredRun]) -> tuple[list[Case], Counter[str]]:
    """The cases of the final runs that a prediction can be compared with: those that ended ok or out of memory.

    Suspect runs are among them. The second value counts the others by reason.

    Raises:
        ConfigError: the file of a run's hardware cannot be used.
    """
    comparable_cases, num_by_reason = list[Case](), Counter[str]()
    hardware_names = {run.hardware for run in runs} & files("hardware").keys()
    hardware_by_name = {name: load_hardware(str(name)) for name in hardware_names}
    newest_by_setting = _newest_releases(runs)
    for run in _with_knobs(runs):
        if run.kernel_version != newest_by_setting.get(_setting(run), run.kernel_version):
            num_by_reason["of an older release of the program"] += 1
        elif run.status not in (Status.OK, Status.OOM):
            num_by_reason[f"status {run.status}"] += 1
        elif not run.is_final:
            num_by_reason["not final"] += 1
        elif run.step_time_s is not None and not 0 < run.step_time_s < math.inf:
            num_by_reason["with a step time that is not above 0 s"] += 1
        elif run.hardware not in hardware_by_name:
            num_by_reason[unknown_name("hardware", run.hardware, files("hardware"))] += 1
        else:
            comparable_cases.append(_case(run, hardware_by_name[run.hardware]))
    return comparable_cases, num_by_reason


def _setting(run: MeasuredRun) -> tuple[object, ...]:
    """What the runs have in common that differ only in the release of a program, and in the knobs of its recipes."""
    spec = run.spec
    kernel = spec.kernel.name, spec.kernel.precision, spec.kernel.compile, spec.kernel.routing
    return run.hardware, run.source, spec.shape, spec.layout, spec.workload, spec.nodes, *kernel


def _newest_releases(runs: Sequence[MeasuredRun]) -> dict[tuple[object, ...], str]:
    """Setting -> the newest release of its program for which an imported table has a step time.

    A release is a version with a point, such as 26.04; versions of files of kernels are whole numbers.
    """
    newest = dict[tuple[object, ...], str]()
    for run in runs:
        version = run.kernel_version or ""
        if "." in version and run.step_time_s is not None:
            setting = _setting(run)
            newest[setting] = max(version, newest.get(setting, ""), key=_release_number)
    return newest


def _release_number(version: str) -> tuple[int, ...]:
    """The numbers of a release, by which releases are in order."""
    return tuple(int(part) for part in re.findall(r"\d+", version))


def _with_knobs(runs: Sequence[MeasuredRun]) -> Iterator[MeasuredRun]:
    """The runs with the knobs that the file of their program declares today, so that each has a value of each knob."""
    knobs_by_kernel = dict[str, dict[str, Any]]()
    for name in {run.spec.kernel.name for run in runs if not run.spec.kernel.forks} & files("kernel").keys():
        settings = with_texts(kernel_settings(name))
        knobs = settings.get("knobs") or {}
        if knobs:
            flags = {knob: settings["flags"][knob] for knob in knobs}
            knobs_by_kernel[name] = {
                "knobs": knobs,
                "flags": flags,
                "knob_values": settings.get("knob_values") or {},
            }
    for run in runs:
        settings = knobs_by_kernel.get(run.spec.kernel.name, {})
        if settings:
            kernel = replace(run.spec.kernel, **settings)
            run = replace(run, spec=replace(run.spec, kernel=kernel))
        yield run


def _case(run: MeasuredRun, hardware: Hardware) -> Case:
    spec = run.spec
    if flops_per_s := run.peak_flops_per_s:
        peak = Peak(flops_per_s=flops_per_s, source="row")
    else:
        peak = hardware.peak(spec.kernel.precision, spec.nodes, None, 1)
    links = network(hardware, spec.nodes, *(getattr(run, column) for column in LINK_RATE_COLUMNS))
    return Case(
        run=run,
        hardware=hardware,
        peak=peak,
        links=links,
        divided=DividedRun(spec),
        regime=regime(spec, links),
    )


def for_profile(cases: Sequence[Case], profile: Profile) -> list[Case]:
    """The cases with stages as a profile divides them, with its factors for their GPUs, and with the share of memory
    that it predicts where its step times depend on it.
    """
    cases = [
        replace(
            case,
            divided=profile.as_divided(case.run.spec),
            gpu_factors=tuple(profile.gpu_factors.get(case.hardware.gpu, {}).items()),
        )
        for case in cases
    ]
    if not profile.time.allocator_loss:
        return cases
    constants = memory_constants(profile.framework, profile.memory)
    largest_stages = (largest_stage(predict_memory(case.divided, constants, LARGEST)) for case in cases)
    return [
        replace(case, memory_share=reserved_share(largest.peak_bytes, case.hardware))
        for case, largest in zip(cases, largest_stages, strict=True)
    ]


def exclusions(cases: Sequence[Case]) -> list[str]:
    """For each case why its step time does not count, such as `with slow links in the node`; empty if it does.

    The job's own probe decides: an all-reduce in a node of GPUs must exceed 300 GB/s, or 2/3 of slower links,
    and that of all ranks 0.7 of the median of its number of nodes and kind of links (slow or fast). A job
    that measured nothing counts as healthy. A suspect run does not, unless it only has other sizes or
    another batch than others of its name: it is predicted with its own.
    """
    busbws_by_kind: dict[tuple[str, int, bool], list[float]] = {}
    for case in cases:
        if busbw_bytes_per_s := case.run.allreduce_busbw_bytes_per_s:
            busbws_by_kind.setdefault(_job_kind(case), []).append(busbw_bytes_per_s)
    median_by_kind = {kind: median(busbws) for kind, busbws in busbws_by_kind.items()}
    return [_exclusion(case, median_by_kind.get(_job_kind(case), 0.0)) for case in cases]


def healthy_timed(cases: Sequence[Case]) -> tuple[list[Case], Counter[str]]:
    """The healthy cases of runs that ended ok with a step time, which predictions of the step time are fitted to.

    The second value counts the others by reason.
    """
    timed_cases, num_by_reason = list[Case](), Counter[str]()
    for case, reason in zip(cases, exclusions(cases), strict=True):
        if not reason and case.run.status == Status.OK and case.run.step_time_s:
            timed_cases.append(case)
        else:
            num_by_reason[reason or f"with status {case.run.status} and no step time"] += 1
    return timed_cases, num_by_reason


def _exclusion(case: Case, median_busbw: float) -> str:
    """Why the step time of a case does not count; bandwidths are in bytes/s, `median_busbw` is that of similar jobs."""
    run = case.run
    if doubt_codes := [code for code in run.suspect_codes or () if code not in SIZE_DOUBT_CODES]:
        return f"in doubt: {doubt_codes[0]}"
    node_busbw, global_busbw = run.allreduce_intra_node_busbw_bytes_per_s, run.allreduce_busbw_bytes_per_s
    has_gpus = case.hardware.has_gpus
    min_busbw = min(MIN_NODE_BUSBW_BYTES_PER_S, 2 / 3 * case.hardware.link_bytes_per_s) if has_gpus else 0.0
    if node_busbw is not None and node_busbw <= min_busbw:
        return "with slow links in the node"
    is_slower = global_busbw is not None and not global_busbw > MIN_SHARE_OF_MEDIAN * median_busbw
    return "with slower links than other jobs" if is_slower else ""


def _job_kind(case: Case) -> tuple[str, int, bool]:
    """Hardware, number of nodes and whether the links are slow: jobs of equal kind should have equal bandwidths."""
    return case.hardware.name, case.run.spec.nodes, case.links.slow


def default_profile(cases: Sequence[Case]) -> str:
    """The name of the profile for the kernel of these runs: the one that the kernel's file names, or one of its name.

    Raises:
        ConfigError: there is none, or the runs used several kernels.
    """
    kernels_and_devices = sorted({(case.run.spec.kernel.name, case.hardware.device) for case in cases})
    kernel_files = files("kernel")
    for name, device in kernels_and_devices if len(kernels_and_devices) == 1 else ():
        profile_base = kernel_settings(name).get("profile") if name in kernel_files else name
        if (profile_name := usual_profile(str(profile_base), device)) in files("profiles"):
            return profile_name
    kernels_text = ", ".join(f"{name} on {device}" for name, device in kernels_and_devices)
    rule = f"no profile covers all of them: give --profile, one of {', '.join(files('profiles'))}"
    raise ConfigError(f"the runs used {kernels_text}; {rule}")


def usual_profiles(cases: Sequence[Case]) -> dict[str, str]:
    """Name of each kernel of these runs -> the name of the profile for it.

    Raises:
        ConfigError: a kernel has none.
    """
    cases_by_kernel: dict[str, list[Case]] = {}
    for case in cases:
        cases_by_kernel.setdefault(case.run.spec.kernel.name, []).append(case)
    return {kernel: default_profile(kernel_cases) for kernel, kernel_cases in cases_by_kernel.items()}


def profile_and_hardware(run: MeasuredRun) -> tuple[Profile, Hardware]:
    """The profile of the program of a run that ended ok or out of memory, and the hardware that it used.

    Raises:
        ConfigError: no profile or no hardware has their names.
    """
    comparable, num_by_reason = cases([run])
    if not comparable:
        raise ConfigError(*num_by_reason)
    (case,) = comparable
    return load_profile(default_profile([case])), case.hardware


def open_cases(
    sources: Sequence[str | None], profile_name: str | None, results_dir: Path, say: Say, warn: Warn
) -> tuple[list[Case], Profile]:
    """The runs of sweeps and files that predictions can be compared with, and the profile of these predictions.

    `say` gets lines that count the other runs, and `warn` what is wrong with the files.

    Args:
        profile_name: its name; None means that of the program which the runs used.
    """
    usable_cases = cases_in(sources, results_dir, say, warn)
    used_profile = load_profile(profile_name or default_profile(usable_cases))
    return for_profile(usable_cases, used_profile), used_profile


def open_cases_by_profile(
    source: str | None, profile_name: str | None, results_dir: Path, say: Say, warn: Warn
) -> list[tuple[list[Case], Profile]]:
    """The runs of a sweep or file that predictions can be compared with, by the profile of these predictions.

    Args:
        profile_name: its name; None means for each run that of the program which it used.
    """
    usable_cases = cases_in([source], results_dir, say, warn)
    name_by_program = {} if profile_name else usual_profiles(usable_cases)
    cases_by_profile: dict[str, list[Case]] = {}
    for case in usable_cases:
        name = profile_name or name_by_program[case.run.spec.kernel.name]
        cases_by_profile.setdefault(name, []).append(case)
    profiles = ((load_profile(name), profile_cases) for name, profile_cases in cases_by_profile.items())
    return [(for_profile(profile_cases, profile), profile) for profile, profile_cases in profiles]


def unusable_lines(table: pa.Table) -> list[str]:
    """Lines that say which rows of a table `ultrabench predict validate` cannot use, and why."""
    runs, names_by_reason = measured_runs(table)
    usable_cases, excluded_by_reason = cases(runs)
    timed_runs = [case.run for case in usable_cases if case.run.status == Status.OK]
    if num_untimed := sum(run.step_time_s is None for run in timed_runs):
        excluded_by_reason["with status ok and no step time"] = num_untimed
    lines = _unusable_lines(names_by_reason)
    if excluded_by_reason:
        lines.append(f"excluded: {_exclusions_text(excluded_by_reason)}")
    try:
        usual_profiles(usable_cases)
    except ConfigError as error:
        lines.append(str(error))
    return [f"predict validate: {line}" for line in lines]


def _unusable_lines(names_by_reason: Mapping[str, Sequence[str]]) -> list[str]:
    """A line for each of the most frequent reasons why rows cannot be predicted, and one for the others."""
    sorted_reasons = sorted(names_by_reason.items(), key=lambda pair: -len(pair[1]))
    lines = []
    for reason, row_names in sorted_reasons[:MAX_REASONS]:
        example_text = f"such as {row_names[0]}" if len(row_names) > 1 else row_names[0]
        lines.append(f"{counted(len(row_names), 'row')} cannot be predicted, {example_text}: {reason}")
    if num_others := sum(len(row_names) for _, row_names in sorted_reasons[MAX_REASONS:]):
        lines.append(f"{counted(num_others, 'row')} cannot be predicted for other reasons")
    return lines


def _exclusions_text(num_by_reason: Counter[str]) -> str:
    return "; ".join(f"{n:,} {reason}" for reason, n in num_by_reason.most_common())


def cases_in(sources: Sequence[str | None], results_dir: Path, say: Say, warn: Warn) -> list[Case]:
    """The runs that predictions can be compared with; the others are counted by `say`."""
    runs, names_by_reason = list[MeasuredRun](), dict[str, list[str]]()
    for source in sources:
        name, _, result_table = open_results(source, results_dir, warn)
        if is_predicted(result_table):
            raise ConfigError(
                f"{name}: nothing was measured", "give a sweep that ran, or a file of ultrabench collect"
            )
        runs_of_source, unusable_names = measured_runs(result_table)
        runs += runs_of_source
        for reason, row_names in unusable_names.items():
            names_by_reason.setdefault(reason, []).extend(row_names)
    say(*_unusable_lines(names_by_reason))
    usable_cases, excluded_by_reason = cases(runs)
    say(f"{counted(len(usable_cases), 'run')}; excluded: {_exclusions_text(excluded_by_reason) or 'none'}")
    if not usable_cases:
        rows_text = counted(len(runs) + sum(map(len, names_by_reason.values())), "row")
        fact = f"none of {rows_text} is a run that can be predicted and ended ok or oom"
        raise ConfigError(fact, "give other results")
    return usable_cases
