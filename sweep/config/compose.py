"""Turns Hydra overrides into plain values; the only module that imports Hydra."""

import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import yaml
from hydra import compose, initialize_config_dir
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.global_hydra import GlobalHydra
from hydra.core.plugins import Plugins
from hydra.errors import HydraException, OverrideParseException
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

import ultrabench
from ultrabench.errors import ConfigError, unknown_name
from ultrabench.sweep.config.sweep_config import moved

GROUPS = ("cluster", "hardware", "kernel", "launcher", "measure", "model", "retry", "sweep")
_NO_OVERRIDE = "{!r} is no override; write KEY=VALUE, such as sweep.nodes=[1,2]"
_NO_SETTING = "${{{0}}} is no setting; for a variable of the shell on the nodes write \\${{{0}}}"
_SEVERAL_VALUES = "{0}={1}: several values are a list; write {0}=[{1}]"


def _unknown_option(group: str, name: str) -> str:
    more = "; on a login node, `ultrabench doctor --write` writes the configuration for cluster=mine"
    return unknown_name(group, name, files(group)) + (more if group == "cluster" else "")


def unknown_override(key: str) -> str:
    """One line for an override whose key does not exist; it names the most similar key that does."""
    group = key.partition(".")[0]
    if error := moved(key):
        return str(error)
    if key.startswith("launcher.sbatch"):
        return f"{key}: options of sbatch are added; write +launcher.sbatch.NAME=VALUE"
    if group == "model":
        advice = "write ultrabench/model/NAME.yaml and give model=NAME, or give model=PATH of a config.json"
        return f"unknown override {key!r}; the sizes of a model stand in its file: {advice}"
    known = _known_keys()
    if key in known:
        return f"{key} is no setting of the {group} that is chosen; choose another with {group}=NAME"
    for name in sorted(known):
        if name.rpartition(".")[2] == key.rpartition(".")[2]:
            return f"unknown override {key!r}; did you mean {name}?"
    beside = {name for name in known if name.startswith(f"{group}.")}
    return unknown_name("override", key, beside or {name for name in known if "." not in name})


def _known_keys() -> set[str]:
    """The keys in the files of the package, such as `sweep.nodes` and `retry.attempts.hang`."""
    folder = search_path()[-1]
    known = _paths(yaml.safe_load((folder / "config.yaml").read_text())) | {*GROUPS}
    for group in {*GROUPS} - {"model"}:
        for path in (folder / group).glob("*.yaml"):
            values = yaml.safe_load(path.read_text())
            known |= _paths({group: values.get(group, values)})  # a sweep may set other groups, too
    return known - {"defaults"}


def _paths(values: dict[str, Any], above: str = "") -> set[str]:
    """The dotted keys of a mapping and of those inside it."""
    inner = ((key, value) for key, value in values.items() if isinstance(value, dict))
    return {above + key for key in values}.union(*(_paths(value, f"{above}{key}.") for key, value in inner))


def _unusable(override: str) -> str | None:
    """One line for an override that Hydra would accept or not explain, but ultrabench cannot use; else None."""
    key, _, value = override.partition("=")
    group = key.lstrip("+")
    if not key.strip():
        return _NO_OVERRIDE.format(override)
    if group in GROUPS and value.startswith(("[", "{")):
        advice = f"values go into {group}.KEY=VALUE or into a file, ultrabench/{group}/NAME.yaml"
        return f"{override}: {group} takes one name (known: see ultrabench configs {group}); {advice}"
    if group in GROUPS and ("/" in value or value.endswith((".yaml", ".yml"))):
        name = f"put the file into ./ultrabench/{group}/ and write {group}={Path(value).stem}"
        return f"{override}: {group} takes a name, not a path; {name}"
    if key == "hardware.gpu":
        return f"{override}: a GPU comes with its rates, in a file; name that with hardware=NAME"
    if re.match(r"[+~]*hydra\b", key):
        return f"{override}: Hydra's own settings have no effect here; leave it out"
    if group.startswith("launcher.sbatch.-"):
        return f"{key}; write an option's name without dashes in front"
    return None


_SENTENCES: tuple[tuple[str, Callable[..., str]], ...] = (
    (rf"Could not find '({'|'.join(GROUPS)})/([^'/]+)'", _unknown_option),
    (r"Could not override '([^']+)'", unknown_override),
    (r"Missing mandatory value: .*\s+full_key: (\S+)", "{0} has no value; give it: {0}=...".format),
    (r"Ambiguous value for argument '([^'=]+)=([^']*)'", _SEVERAL_VALUES.format),
    (r"Interpolation key '([^']+)' not found", _NO_SETTING.format),
)
"""Pattern in a message of Hydra -> function that makes one line of its groups."""


def explain(error: Exception, overrides: Sequence[str]) -> str:
    """One line that explains `error`: what was given, which values are known, and what to do."""
    for pattern, sentence in _SENTENCES:
        if found := re.search(pattern, str(error)):
            return sentence(*found.groups())
    if isinstance(error, OverrideParseException):
        return _unreadable(error.override, overrides)
    if isinstance(error, yaml.YAMLError):
        return f"a configuration file is no YAML: {' '.join(str(error).split())}"
    line = " ".join(str(error).partition("\n")[0].split()) or type(error).__name__
    return f"cannot use the overrides {' '.join(overrides)!r}: {line}"


def _unreadable(override: str, overrides: Sequence[str]) -> str:
    """One line that explains an override that Hydra cannot parse."""
    key, equals, value = override.partition("=")
    if not equals:
        return _NO_OVERRIDE.format(override)
    if value.count("[") > value.count("]"):
        whole = "".join(overrides[overrides.index(override) :]).partition("]")[0]
        return f"{override} has no end: the shell cuts words at spaces; write a list without them: {whole}]"
    plain = value.replace('"', "")
    rule = "a value with brackets, commas, colons, spaces or quotes in it needs quotes of its own"
    return f"""{override}: {rule}, such as '{key}="{plain}"'; a list is [A,B]"""


def search_path() -> list[Path]:
    """Folders that hold configuration files; a file in an earlier folder hides its namesakes in later ones.

    They are `./ultrabench`, then $ULTRABENCH_CONFIG_DIR (by default ~/.config/ultrabench), then the package.
    """
    user = os.environ.get("ULTRABENCH_CONFIG_DIR", "~/.config/ultrabench")
    folders = [Path.cwd() / "ultrabench", Path(user).expanduser().absolute()]
    used = [folder for folder in folders if any(next((folder / g).glob("*.yaml"), None) for g in GROUPS)]
    return [*used, (Path(ultrabench.__file__).parent / "configs").resolve()]


class UserFolders(SearchPathPlugin):
    """Makes Hydra search the user's folders before the folder of the package."""

    def manipulate_search_path(self, hydras: ConfigSearchPath) -> None:
        """Puts the user's folders in front, in the order of `search_path`."""
        for folder in search_path()[-2::-1]:
            hydras.prepend("user", f"file://{folder}")


def files(group: str) -> dict[str, Path]:
    """Name -> file of each option of a group such as `hardware`; the first folder of `search_path` wins."""
    found = [path for folder in reversed(search_path()) for path in (folder / group).glob("*.yaml")]
    return dict(sorted({path.stem: path for path in found if path.is_file()}.items()))


def describe(group: str) -> dict[str, str]:
    """Name of each option of a group -> the first comment line of its file."""
    comment = re.compile(r"^#(?! @package)\s*(.*)", re.MULTILINE)
    found = {name: comment.search(read_text(path)) for name, path in files(group).items()}
    return {name: match[1].strip() if match else "" for name, match in found.items()}


def read_text(path: Path) -> str:
    """The text of a configuration file.

    Raises:
        ConfigError: the file cannot be read.
    """
    try:
        return path.read_text()
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from error


def read_yaml(path: Path) -> Any:
    """The content of one YAML file, with its interpolations resolved.

    Raises:
        ConfigError: the file cannot be read or is not YAML.
    """
    try:
        return OmegaConf.to_container(OmegaConf.load(path), resolve=True)
    except (OmegaConfBaseException, yaml.YAMLError, ValueError, OSError) as error:
        raise ConfigError(f"cannot read {path}: {' '.join(str(error).split())}") from error


def _require_global(path: Path) -> None:
    """Raises ConfigError when the file of a sweep sets whole groups but lacks `# @package _global_`."""
    values = {} if "# @package _global_" in read_text(path) else read_yaml(path)
    nested = sorted({*GROUPS, "name", "repeats"}.intersection(values))
    if isinstance(values, dict) and nested:
        raise ConfigError(f"{path} sets {nested[0]}: and so needs a first line: # @package _global_")


def compose_tree(overrides: Sequence[str]) -> dict[str, Any]:
    """The composed configuration as plain values; `names` holds the chosen option of each group.

    Raises:
        ConfigError: an override cannot be used.
    """
    for override in overrides:
        if unusable := _unusable(override):
            raise ConfigError(unusable)
        if override.startswith("sweep=") and (path := files("sweep").get(override.removeprefix("sweep="))):
            _require_global(path)
    GlobalHydra.instance().clear()
    Plugins.instance().register(UserFolders)
    try:
        with initialize_config_dir(config_dir=str(search_path()[-1]), version_base="1.3"):
            composed = compose("config", overrides=list(overrides), return_hydra_config=True)
            choices = dict(composed.hydra.runtime.choices)
            OmegaConf.set_struct(composed, False)
            composed.pop("hydra")
            tree = OmegaConf.to_container(composed, resolve=True, throw_on_missing=True)
    except (HydraException, OmegaConfBaseException, yaml.YAMLError, ValueError) as error:
        raise ConfigError(explain(error, overrides)) from error
    assert isinstance(tree, dict)
    return {**tree, "names": {group: choices[group] for group in GROUPS if group in choices}}
