"""The profile from which a calibration starts, and rows of imported tables to which it is fitted first."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from statistics import median
from typing import NamedTuple

from ultrabench.analysis.results.cases import Case, default_profile, for_profile
from ultrabench.errors import ConfigError, counted, known_text, nearest_name
from ultrabench.result import Status
from ultrabench.sweep.config.files import files
from ultrabench.sweep.config.load import kernel_settings, load_hardware, load_profile
from ultrabench.sweep.predict.profile import Profile


class Program(NamedTuple):
    """A program on an accelerator, whose constants of the step time a profile has."""

    kernel: str
    """The name of its kernel."""
    gpu: str
    """The accelerator, with a lower power limit where it has one."""

    def __str__(self) -> str:
        return f"{self.kernel} on {self.gpu}"


def program_of(case: Case) -> Program:
    """The program of a measured run, and its accelerator."""
    return Program(case.run.spec.kernel.name, case.hardware.gpu_at_limit)


def imported_cases(cases: Sequence[Case], own_cases: Sequence[Case], parts: Mapping[str, str]) -> list[Case]:
    """The imported rows of one program on one accelerator.

    These are those of the user's runs, or of kernel= and hardware=; without either, those that all rows have.

    Args:
        cases: all imported rows that can be predicted.
        own_cases: the user's runs; empty where there are none.
        parts: key of each override -> its value.

    Raises:
        ConfigError: no row is of this program and accelerator, or rows are of several.
    """
    own_programs = {program_of(case) for case in own_cases}
    kernels = {parts["kernel"]} if "kernel" in parts else {program.kernel for program in own_programs}
    gpus = {program.gpu for program in own_programs}
    if "hardware" in parts:
        gpus = {load_hardware(parts["hardware"]).gpu_at_limit}
    wanted = Program(min(kernels, default="any program"), min(gpus, default="any GPU"))
    profiles = {kernel_settings(name).get("profile") for name in kernels & files("kernel").keys()}
    chosen = [case for case in cases if not kernels or program_of(case).kernel in kernels | profiles]
    chosen = [case for case in chosen if not gpus or case.hardware.gpu_at_limit in gpus]
    num_by_program = Counter(map(program_of, chosen or cases))
    if not chosen:
        names = [*map(str, num_by_program)]
        similar = nearest_name(str(wanted), names)
        fact = f"--from: no row of {wanted}" + f"; did you mean {similar}?" * bool(similar)
        raise ConfigError(
            f"{fact} {known_text(str(wanted), names)}", "name one of them with kernel= and hardware="
        )
    num_kernels, num_gpus = (len({*names}) for names in zip(*num_by_program, strict=True))
    if (num_kernels > 1 and not kernels) or (num_gpus > 1 and not gpus):
        rows_text = ", ".join(f"{name} ({counted(num, 'row')})" for name, num in num_by_program.most_common())
        raise ConfigError(f"--from: rows of {rows_text}", "choose one with kernel=NAME and hardware=NAME")
    return chosen


def start_of(cases: Sequence[Case], profile_name: str | None, say: Callable[..., None]) -> Profile:
    """The profile with this name, that of the program of these runs, or the one that predicts them best; `say` gets a
    line about the last."""
    if profile_name:
        return load_profile(profile_name)
    try:
        return load_profile(default_profile(cases))
    except ConfigError:
        error_by_name = dict(_median_errors(cases))
        if not error_by_name:
            raise
        nearest = min(error_by_name, key=lambda name: error_by_name[name])
        programs = ", ".join(sorted({case.run.spec.kernel.name for case in cases}))
        fact = f"no profile of {programs}: the fit starts from {nearest}, whose median error is smallest"
        say(f"{fact} ({100 * error_by_name[nearest]:.0f} %); --profile NAME chooses another")
        return load_profile(nearest)


def _median_errors(cases: Sequence[Case]) -> Iterator[tuple[str, float]]:
    """Each profile with fitted constants for such devices and the median of |log(measured / predicted)| of the runs."""
    timed = [case for case in cases if case.run.step_time_s and case.run.status == Status.OK]
    has_gpus = any(case.hardware.has_gpus for case in timed)
    for name in files("profiles") if timed else ():
        if name.endswith("-cpu") == has_gpus:
            continue
        profile = load_profile(name)
        usable_cases = for_profile(timed, profile)
        yield name, median(abs(case.log_error(profile.time, profile.flags)) for case in usable_cases)
