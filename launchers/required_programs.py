"""Refuses a sweep whose launcher, program, interpreter or folder cannot serve it, as far as this machine can tell."""

import functools
import shutil
from pathlib import Path

from ultrabench.errors import ClusterError, ConfigError
from ultrabench.launchers.starters import require_right_starter
from ultrabench.processes import run_python
from ultrabench.store.folder import try_to_write
from ultrabench.sweep.config.launcher_config import ON_CLUSTER
from ultrabench.sweep.config.sweep_config import SweepConfig

PROBE_TIMEOUT_S = 600.0
"""Seconds after which the probe of this machine is ended; beside 20 processes on 2 cores it takes over 120 s."""


def require_local(config: SweepConfig) -> None:
    """Raises if the local launcher cannot run a sweep on this hardware.

    Raises:
        ConfigError: the sweep needs more than one real node.
    """
    max_nodes = max(config.axes.nodes)
    if not config.launcher.holds_nodes and max_nodes > 1 and not config.hardware.simulated:
        names_text = f"hardware={config.hardware.name} with launcher={config.launcher.name}"
        problem = f"sweep.nodes up to {max_nodes} of {names_text}"
        remedy = f"add {ON_CLUSTER}, or use sweep.nodes=[1], or hardware=cpu for simulated nodes"
        raise ConfigError(f"{problem}, which uses this machine only", remedy)


def require_checkpoint_folder(config: SweepConfig) -> None:
    """Raises ConfigError if the folder in which runs save their state does not exist,
    or cannot be written from here.
    """
    folder = config.measure.checkpoint_folder
    if not config.measure.checkpoint or folder is None:
        return
    fact, remedy = f"measure.checkpoint_folder={folder}", "give a folder that all nodes share and can write"
    if not Path(folder).is_dir():
        raise ConfigError(f"{fact} is not a folder on this machine", f"create it first, or {remedy}")
    try:
        try_to_write(Path(folder))
    except OSError as error:
        raise ConfigError(f"{fact} cannot be written from this machine ({error.strerror})", remedy) from error


def require_program(config: SweepConfig) -> None:
    """Raises ConfigError if a command or an interpreter that the sweep names cannot run,
    as far as this machine can tell.

    So does a command that starts its ranks too often.

    The path of a program must also exist here if nodes of a cluster run the program, since they share the folder of the
    launch. A bare name is searched only if the program runs here, since launcher.setup may provide it there.
    """
    for python in map(str, config.options.values.get("python", ())):
        _require_interpreter(python, config)
    if config.kernel.forks:
        return
    require_right_starter(config)
    _require_folder(config)
    program, *arguments = config.kernel.command[:2]
    program_files = [program] if "/" in program else []
    program_files += [path for path in arguments if Path(path).suffix in (".py", ".sh")]
    missing_files = [
        path for path in program_files if "{" not in path and not config.kernel.path_of(path).is_file()
    ]
    is_bare_name = not config.launcher.holds_nodes and program != "python" and not {"/", "{"} & {*program}
    if is_bare_name and shutil.which(program) is None:
        missing_files.append(program)
    if missing_files:
        remedy = "fix the path, or begin with env if only nodes have it: kernel.command='[env,PROGRAM,...]'"
        raise ConfigError(
            f"kernel.command: {missing_files[0]} does not exist here ({config.kernel.path_of('').absolute()}); {remedy}"
        )


def _require_folder(config: SweepConfig) -> None:
    """Raises ConfigError if the working folder of a command does not exist here, unless only nodes have the program."""
    folder = config.kernel.folder
    is_only_on_nodes = config.launcher.holds_nodes and config.kernel.command[0] == "env"
    if folder and not is_only_on_nodes and not Path(folder).is_dir():
        remedy = "fix the path, or begin the command with env if only nodes of a cluster have it"
        raise ConfigError(f"kernel.folder={folder} is not a folder here ({Path.cwd()})", remedy)


def _require_interpreter(python: str, config: SweepConfig) -> None:
    """Raises ConfigError if an interpreter of `sweep.python` is absent where the jobs run, or has no ultrabench.

    On the nodes of a cluster an interpreter may exist that is not here. What exists here is asked, unless its path is
    one inside a container, or launcher.setup sets the PYTHONPATH that it imports from.
    """
    setting, launcher_config = f"sweep.python={python}", config.launcher
    python_path = None if launcher_config.holds_nodes and "/" not in python else shutil.which(python)
    if python_path is None and not launcher_config.holds_nodes:
        raise ConfigError(f"{setting} is not a program here", "give the path of a Python that has ultrabench")
    is_set_by_job = "container" in config.options.values or launcher_config.prepares_python
    if python_path is not None and not is_set_by_job and (problem := _why_no_agent(python_path)):
        remedy = f"install it there (in a clone: {python} -m pip install -e .), or give another interpreter"
        raise ConfigError(f"{setting} cannot start the agents of ultrabench: {problem}", remedy)


@functools.cache  # a launch and its plan ask the same
def _why_no_agent(python: str) -> str | None:
    """Why this interpreter cannot import the agent; None where it can."""
    try:
        run_python("-c", "import ultrabench.agent.__main__", timeout_s=PROBE_TIMEOUT_S, python=python)
    except ClusterError as error:
        return str(error)
    return None
