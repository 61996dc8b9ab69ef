"""The YAML files of a configuration: the folders that hold them, their names and their content."""

import contextlib
import functools
import itertools
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

import ultrabench
from ultrabench.errors import ConfigError, unknown_name

CONFIG_GROUPS = ("sweep", "kernel", "launcher", "measure", "retry", "cluster", "hardware", "model")
"""The groups of a configuration. Where several have a key of the same name, the first of them is probably meant."""
FOLDER_BY_OVERRIDE = {group: group for group in sorted(CONFIG_GROUPS)} | {"profile": "profiles"}
"""What an override such as profile=NAME names -> the folder of its files."""
FOLDER_BY_NAME = FOLDER_BY_OVERRIDE | {"framework": "framework"}
"""What users can name -> the folder of its files; a framework is named by `sweep show --as`."""
MAX_YAML_VALUES = 100_000
"""Largest number of values that a YAML file may stand for; a few aliases of aliases stand for billions."""


def search_path() -> list[Path]:
    """Folders that hold configuration files; a file in an earlier folder hides its namesakes in later ones.

    They are `./ultrabench`, then $ULTRABENCH_CONFIG_DIR (by default ~/.config/ultrabench), then the package.
    """
    groups = (*FOLDER_BY_NAME.values(), "published")
    folders = [path for path in _user_folders() if any(any((path / g).glob("*.yaml")) for g in groups)]
    return [*folders, _package_folder()]


@functools.cache
def _package_folder() -> Path:
    return (Path(ultrabench.__file__).parent / "configs").resolve()


def _user_folders() -> tuple[Path, Path]:
    return _user_folders_in(os.getcwd(), os.environ.get("ULTRABENCH_CONFIG_DIR", "~/.config/ultrabench"))


@functools.lru_cache(maxsize=8)  # a search for the best runs asks for each candidate
def _user_folders_in(working_folder: str, user_folder: str) -> tuple[Path, Path]:
    return Path(working_folder) / "ultrabench", (working_folder / Path(user_folder).expanduser()).absolute()


def user_file(group: str, name: str) -> Path:
    """The path in ./ultrabench of the file of an option, which need not exist."""
    return _user_folders()[0] / group / f"{name}.yaml"


def file_of_user(group: str, name: str) -> Path | None:
    """The file of an option; None if there is none, or if it is one of the package."""
    path = files(group).get(name)
    return None if path is None or path.parent.parent == search_path()[-1] else path


def is_command_of_package(kernel: str, command: Sequence[str]) -> bool:
    """Whether a command is that of a kernel of the package which starts a program of others;
    it says all that it reads.
    """
    if _command_in_package(kernel) != [*command]:
        return False
    # A plan asks this for each candidate, so no folder is listed.
    return not any(os.path.isfile(f"{folder}/kernel/{kernel}.yaml") for folder in _user_folders())


@functools.cache
def _command_in_package(kernel: str) -> list[str] | None:
    """The command in the package's file of a kernel, if it has one."""
    path = _package_folder() / "kernel" / f"{kernel}.yaml"
    command = read_yaml(path).get("command") if path.is_file() else None
    return [*map(str, command)] if isinstance(command, list) else None


def files(group: str) -> dict[str, Path]:
    """Name -> file of each option of a group such as `hardware`; the first folder of `search_path` wins."""
    paths = [path for folder in reversed(search_path()) for path in (folder / group).glob("*.yaml")]
    return dict(sorted({path.stem: path for path in paths if path.is_file()}.items()))


def unknown_option(group: str, name: str) -> str:
    """One line for a group that has no option of this name; it tells of a file with another ending."""
    for folder in _user_folders():
        if (path := folder / FOLDER_BY_NAME[group] / f"{name}.yml").is_file():
            return f"{group}={name}: {path} is not read, because its name does not end in .yaml; rename it"
    advice = "; on a login node, `ultrabench doctor --write` writes the configuration for cluster=mine"
    return unknown_name(group, name, files(FOLDER_BY_NAME[group])) + (advice if group == "cluster" else "")


def describe(group: str) -> dict[str, str]:
    """Name of each option of a group -> the first comment line of its file, or why that cannot be used."""
    return {name: _first_comment(path) for name, path in files(group).items()}


def _first_comment(path: Path) -> str:
    try:
        values = yaml.safe_load(text := read_text(path))
    except (ConfigError, yaml.YAMLError) as error:
        return f"unusable: {' '.join(str(error).split())}"
    if not isinstance(values, dict | None):
        return "unusable: it holds no settings, such as gpus_per_node: 8"
    comment = re.search(r"^#(?! @package)\s*(.*)", text, re.MULTILINE)
    return comment[1].strip() if comment else ""


def usable(group: str) -> dict[Path, dict[str, Any]]:
    """File -> its settings, without the files of a group that cannot be read or hold no settings."""
    settings: dict[Path, dict[str, Any]] = {}
    for path in files(group).values():
        with contextlib.suppress(ConfigError):
            if isinstance(file_settings := read_yaml(path), dict):
                settings[path] = file_settings
    return settings


def read_yaml(path: Path) -> Any:
    """The content of one YAML file, with its interpolations resolved.

    Raises:
        ConfigError: the file cannot be read or is not YAML.
    """
    from omegaconf import OmegaConf  # slow, and most commands read no such file
    from omegaconf.errors import OmegaConfBaseException

    require_few_values(path)
    try:
        return OmegaConf.to_container(OmegaConf.load(path), resolve=True)
    except yaml.YAMLError as error:
        fault = " ".join(str(error).split())
        raise ConfigError(f"{path} is not valid YAML: {fault}; fix it there") from error
    except (OmegaConfBaseException, ValueError, OSError) as error:
        raise ConfigError(f"cannot read {path}: {' '.join(str(error).split())}") from error


def settings_tree(settings: Sequence[str]) -> Any:
    """Settings such as `a.b=1` as nested values, each read as YAML."""
    from omegaconf import OmegaConf

    return OmegaConf.to_container(OmegaConf.from_dotlist([*settings]))


def read_text(path: Path) -> str:
    """The text of a configuration file.

    Raises:
        ConfigError: the file cannot be read.
    """
    try:
        return path.read_text()
    except UnicodeDecodeError as error:
        fault = f"byte {error.start + 1} is not UTF-8"
        raise ConfigError(f"cannot read {path}: {fault}; save the file as UTF-8 text") from error
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from error


def require_few_values(path: Path) -> None:
    """Raises ConfigError if the aliases of a YAML file stand for more than MAX_YAML_VALUES values."""
    values_by_node: dict[int, int] = {}

    def num_values_of(node: yaml.Node | None) -> int:
        """How many values a node stands for, each alias counted as what it repeats."""
        if not isinstance(node, yaml.CollectionNode):
            return 1
        if id(node) not in values_by_node:
            values_by_node[id(node)] = MAX_YAML_VALUES  # until it is counted: a node may contain itself
            is_mapping = isinstance(node, yaml.MappingNode)
            child_nodes = itertools.chain.from_iterable(node.value) if is_mapping else node.value
            values_by_node[id(node)] = 1 + sum(map(num_values_of, child_nodes))
        return values_by_node[id(node)]

    try:
        num_values = num_values_of(yaml.compose(read_text(path), yaml.SafeLoader))
    except (yaml.YAMLError, RecursionError):
        return  # whoever reads it says what is wrong
    if num_values > MAX_YAML_VALUES:
        rule = f"a file may have at most {MAX_YAML_VALUES:,}"
        raise ConfigError(f"{path}: its aliases expand to {num_values:,} values; {rule}: use fewer aliases")
