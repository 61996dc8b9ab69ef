"""Programs that start the ranks of a node or of a job themselves, such as torchrun, and where a command starts one."""

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from ultrabench.errors import ConfigError
from ultrabench.rank_report import read_or_nothing
from ultrabench.sweep.config.sweep_config import SweepConfig


class Starter(NamedTuple):
    """A program that starts ranks."""

    name: str
    starts_job: bool = False
    """Whether one call starts the ranks of all nodes; otherwise each node needs a call of its own."""
    subcommand: str | None = None
    """The word behind the program, without which it starts no ranks; None if it always does."""
    modules: tuple[str, ...] = ()
    """Modules that are the same program: `python -m MODULE`."""

    @property
    def text(self) -> str:
        """The program as messages name it."""
        return f"{self.name} {self.subcommand}" if self.subcommand else self.name


STARTERS = (
    Starter("torchrun", modules=("torch.distributed.run", "torch.distributed.launch")),
    Starter(
        "accelerate",
        subcommand="launch",
        modules=("accelerate.commands.launch", "accelerate.commands.accelerate_cli"),
    ),
    Starter("deepspeed", modules=("deepspeed", "deepspeed.launcher.runner")),
    Starter("composer", modules=("composer.cli.launcher",)),
    Starter("fabric", subcommand="run", modules=("lightning.fabric.cli",)),
    *(
        Starter(name, starts_job=True)
        for name in ("srun", "mpirun", "mpiexec", "mpiexec.hydra", "prterun", "orterun", "jsrun", "aprun")
    ),
    Starter("horovodrun", starts_job=True, modules=("horovod.runner.launch",)),
    *(Starter(name, starts_job=True) for name in ("sbatch", "salloc")),
)
"""The programs whose use in a command is checked."""
_STARTER_BY_NAME = {starter.name: starter for starter in STARTERS}
_STARTER_BY_MODULE = {module: starter for starter in STARTERS for module in starter.modules}
_WRAPPERS = frozenset({
    "env", "nice", "nohup", "numactl", "taskset", "time", "timeout", "stdbuf", "setsid", "ionice", "chrt", "nsys",
    "ncu", "uv", "poetry", "pixi", "conda", "mamba", "micromamba", "singularity", "apptainer", "enroot",
})  # fmt: skip
"""Programs that only run the command behind their own options."""
_PACKAGE_OPTIONS = frozenset({"--with", "--extra", "--package", "--from"})
"""Options of wrappers behind which a package stands, which may have the name of a starter."""
_SHELLS = frozenset({"bash", "sh", "dash", "zsh", "ksh"})
_PYTHON = re.compile(r"python[\d.]*")
_PYTHON_OPTIONS_WITH_VALUE = frozenset({"-X", "-W", "--check-hash-based-pycs"})
"""Options of Python whose value is the next word."""
_MODULE_OPTION = re.compile(r"-[bBdEiIOPqsSuvx]*m(.*)")
"""Python's -m, also behind other options of one letter, and the module where it is in the same word."""
_SHELL_OPTION = re.compile(r"-\w*c")
_SHELL_OPTION_WITH_VALUE = re.compile(r"[-+]\w*[oO]|--(?:rcfile|init-file)")
"""Options of shells whose value is the next word."""
_SCRIPT_SUFFIXES = (".py", ".sh")
MAX_SCRIPT_BYTES = 2**20
"""Bytes of a shell script that are searched for a starter."""


def _in_script_pattern() -> re.Pattern[str]:
    programs = "|".join(
        re.escape(s.name) + (rf"(?:\s+-\S+)*\s+{s.subcommand}" * bool(s.subcommand)) for s in STARTERS
    )
    modules = "|".join(map(re.escape, _STARTER_BY_MODULE))
    return re.compile(
        rf"(?:^|[\s;&|(`\"'=])(?:(?:\S*/)?(?P<program>{programs})|-\w*m\s*(?P<module>{modules}))(?=\s|$)",
        re.M,
    )


_IN_SCRIPT = _in_script_pattern()


def starter_of(command: Sequence[str]) -> Starter | None:
    """The starter that a command runs, by itself, behind a wrapper such as env, or as a module;
    None if it runs none.
    """
    is_script_next = False
    for index, word in enumerate(command):
        name, following = Path(word).name, command[index + 1 :]
        if is_script_next and command[index - 1] in _PYTHON_OPTIONS_WITH_VALUE:
            continue
        starter = _STARTER_BY_NAME.get(name)
        if module := _MODULE_OPTION.fullmatch(word):
            starter = _STARTER_BY_MODULE.get(module[1] or (*following, "")[0])
            if starter or is_script_next:
                return starter
        subcommand = next((text for text in following if not text.startswith("-")), None)
        is_package = index > 0 and command[index - 1] in _PACKAGE_OPTIONS
        if starter and starter.subcommand in (None, subcommand) and not is_package:
            return starter
        if Path(word).suffix in _SCRIPT_SUFFIXES or name in _SHELLS:
            return None
        if _PYTHON.fullmatch(name):
            is_script_next = True
        elif (index == 0 and name not in _WRAPPERS) or (is_script_next and not word.startswith("-")):
            return None
    return None


def starter_in_script(command: Sequence[str]) -> Starter | None:
    """The starter that a shell of the command runs in its script; None if no shell runs one."""
    for index, word in enumerate(command):
        if Path(word).name not in _SHELLS:
            continue
        words = iter(command[index + 1 :])
        for option in words:
            if _SHELL_OPTION_WITH_VALUE.fullmatch(option):
                next(words, None)
                continue
            if _SHELL_OPTION.fullmatch(option):
                return _starter_in(next(words, ""))
            if not option.startswith(("-", "+")):
                return _starter_in(read_or_nothing(option, 0, MAX_SCRIPT_BYTES).decode(errors="replace"))
    if command and Path(command[0]).suffix == ".sh":
        return _starter_in(read_or_nothing(command[0], 0, MAX_SCRIPT_BYTES).decode(errors="replace"))
    return None


def _starter_in(script: str) -> Starter | None:
    lines = re.sub(r"^\s*#.*$", "", script, flags=re.M).replace("\\\n", " ")
    match = _IN_SCRIPT.search(lines)
    if match is None:
        return None
    return _STARTER_BY_MODULE.get(match["module"] or "") or _STARTER_BY_NAME[match["program"].split()[0]]


def require_right_starter(config: SweepConfig) -> None:
    """Raises if the command is a starter whose ranks the sweep would start too often.

    Raises:
        ConfigError: it starts all ranks of a node, but is started for each rank, or it starts all ranks of a job.
    """
    kernel, starter = config.kernel, starter_of(config.kernel.command)
    if starter is None:
        return
    fact = f"kernel.command is {starter.text}"
    if starter.starts_job:
        rule = (
            "it starts the processes of a whole job, while ultrabench starts the command on each node "
            "of its own jobs"
        )
        remedy = f"give the command without {starter.name}, or torchrun with kernel.launch_per=node"
        raise ConfigError(f"{fact}; {rule}", remedy, setting="kernel.command")
    if not kernel.starts_ranks:
        rule = "it starts all ranks of a node, while kernel.launch_per=rank starts it once for each rank"
        raise ConfigError(f"{fact}; {rule}", "set kernel.launch_per=node", setting="kernel.command")
    options = {word.partition("=")[0] for word in kernel.command}
    max_nodes, needs_one_node = (
        max(config.axes.nodes),
        starter.name == "deepspeed" and "--no_ssh" not in options,
    )
    if needs_one_node and (max_nodes > 1 or options & {"--hostfile", "-H"}):
        rule = "without --no_ssh it starts the ranks of a whole job by ssh, while ultrabench starts it on each node"
        remedy = "add --no_ssh, --node_rank={node_rank}, --master_addr={master_addr} and --master_port={master_port}"
        raise ConfigError(f"{fact}; {rule}", remedy, setting="kernel.command")


def starter_warnings(config: SweepConfig) -> Iterator[str]:
    """A line if a shell script of the command runs a starter, which may start ranks too often."""
    kernel, starter = config.kernel, starter_in_script(config.kernel.command)
    if starter and starter.starts_job:
        fact = f"the shell script in kernel.command runs {starter.text}, which starts the processes of a whole job"
        yield (
            f"{fact}; ultrabench runs the script "
            f"{'on each node' if kernel.starts_ranks else 'for each rank'}: leave it out"
        )
    elif starter and not kernel.starts_ranks:
        fact = f"the shell script in kernel.command runs {starter.text}, which starts all ranks of a node"
        rule = "kernel.launch_per=rank runs the script for each rank"
        yield f"{fact}; {rule}: set kernel.launch_per=node, unless the script runs it on one rank of each node only"
