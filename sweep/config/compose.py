"""Turns Hydra overrides into plain values; the only module that imports Hydra."""

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from hydra import compose, initialize_config_dir
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.plugins import Plugins
from hydra.errors import HydraException, OverrideParseException
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

import ultrabench
from ultrabench.errors import ConfigError, unknown_name
from ultrabench.sweep.config.launcher_config import moved_to_sbatch

GROUPS = ("cluster", "hardware", "kernel", "launcher", "measure", "model", "retry", "sweep")
WRITE_CLUSTER = "; on a login node, `ultrabench doctor --write` writes the configuration for cluster=mine"


def explain(error: Exception, overrides: Sequence[str]) -> str:
    """One line that explains `error`: what was given, which values are known, and what to do."""
    text = str(error)
    missing = re.search(r"Could not find '([^']+)/([^'/]+)'", text)
    if missing and missing[1] in GROUPS:
        known = unknown_name(missing[1], missing[2], known_names(missing[1]))
        return known + (WRITE_CLUSTER if missing[1] == "cluster" else "")
    unused = re.search(r"Could not override '([^']+)'", text)
    if unused and re.match(r"launcher\.sbatch(\.|$)", unused[1]):
        return f"{unused[1]}: options of sbatch are added; write +launcher.sbatch.NAME=VALUE"
    if unused and (moved := moved_to_sbatch(unused[1])):
        return str(moved)
    if unused:
        return unknown_override(unused[1])
    value = re.search(r"Missing mandatory value: (\S+)", text)
    if value:
        key = getattr(error, "full_key", None) or value[1]
        return f"{key} has no value; give it: {key}=..."
    for override in overrides:
        key, eq, _ = override.partition("=")
        if not eq or not key.strip():
            return f"{override!r} is no override; write KEY=VALUE, such as sweep.nodes=[1,2]"
    several = re.search(r"Ambiguous value for argument '([^'=]+)=([^']*)'", text)
    if several:
        return f"{several[1]}={several[2]}: several values are a list; write {several[1]}=[{several[2]}]"
    if unset := re.search(r"Interpolation key '([^']+)' not found", text):
        return (
            f"${{{unset[1]}}} is no setting; for a variable of the shell on the nodes write \\${{{unset[1]}}}"
        )
    if isinstance(error, yaml.YAMLError):
        return f"a configuration file is no YAML: {' '.join(text.split())}"
    line = " ".join(text.split("\n")[0].split()) or type(error).__name__
    return f"cannot use the overrides {' '.join(overrides)!r}: {line}"


def require_usable(overrides: Sequence[str]) -> None:
    """Raises for overrides that Hydra accepts but ultrabench cannot use.

    Raises:
        ConfigError: an override gives a group something else than a name, or is a setting of Hydra itself.
    """
    for override in overrides:
        key, _, value = override.partition("=")
        group = key.lstrip("+")
        if group in GROUPS and value.startswith(("[", "{")):
            raise ConfigError(
                f"{override}: {group} takes one name (known: see ultrabench configs {group}); values of your own go into "
                f"a file, ultrabench/{group}/NAME.yaml, or into overrides such as {group}.KEY=VALUE"
            )
        if group in GROUPS and ("/" in value or value.endswith((".yaml", ".yml"))):
            raise ConfigError(
                f"{override}: {group} takes a name, not a path; put the file into ./ultrabench/{group}/ and write "
                f"{group}={Path(value).stem}"
            )
        if key == "hardware.gpu":
            raise ConfigError(
                f"{override}: a GPU comes with its rates, in a file; name that with hardware=NAME"
            )
        if key.lstrip("+~").partition(".")[0] == "hydra":
            raise ConfigError(f"{override}: Hydra's own settings have no effect here; leave it out")


def unknown_override(key: str) -> str:
    """One line for an override whose key does not exist; it names the most similar key that does."""
    if key.startswith("model."):
        return (
            f"unknown override {key!r}; the sizes of a model stand in its file: write ultrabench/model/NAME.yaml and give "
            "model=NAME, or give model=PATH of a config.json"
        )
    keys = set(GROUPS)
    folder = Path(ultrabench.__file__).parent / "configs"
    for file in [folder / "config.yaml", *folder.glob("*/*.yaml")]:
        group = file.parent.name if file.parent != folder else ""
        values = yaml.safe_load(file.read_text()) or {}
        if group != "model":
            values = values.get(group) or values
            prefix = f"{group}." if group else ""
            keys |= {f"{prefix}{k}" for k in values if k not in ("defaults", "hydra")}
            inner = ((k, n) for k, v in values.items() if isinstance(v, dict) for n in v if prefix)
            keys |= {f"{prefix}{k}.{n}" for k, n in inner}
    if key in keys:
        group = key.partition(".")[0]
        return f"{key} is no setting of the {group} that is chosen; choose another with {group}=NAME"
    tail = key.rpartition(".")[2]
    same_word = sorted(k for k in keys if k.rpartition(".")[2] == tail)
    if same_word:
        return f"unknown override {key!r}; did you mean {same_word[0]}?"
    for parent in (key.rpartition(".")[0], key.partition(".")[0]):
        if beside := {k for k in keys if k.startswith(f"{parent}.")}:
            return unknown_name("override", key, beside)
    return unknown_name("override", key, {k for k in keys if "." not in k})


def search_path() -> list[Path]:
    """Folders that hold configuration files; a file in an earlier folder hides its namesakes in later ones.

    They are `./ultrabench`, then $ULTRABENCH_CONFIG_DIR (by default ~/.config/ultrabench), then the package.
    """
    user = os.environ.get("ULTRABENCH_CONFIG_DIR", "~/.config/ultrabench")
    folders = [Path.cwd() / "ultrabench", Path(user).expanduser().absolute()]
    package = Path(ultrabench.__file__).parent / "configs"
    return [f for f in folders if _is_config_folder(f)] + [package.resolve()]


def _is_config_folder(folder: Path) -> bool:
    return any(next((folder / group).glob("*.yaml"), None) for group in GROUPS)


class UserFolders(SearchPathPlugin):
    """Makes Hydra search the user's folders before the folder of the package."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        """Puts the user's folders in front, in the order of `search_path`."""
        for folder in reversed(_user_folders()):
            search_path.prepend("user", f"file://{folder}")


def _user_folders() -> list[Path]:
    """The search path without the package; Hydra's plugin above has a parameter named `search_path`."""
    return search_path()[:-1]


def files(group: str) -> dict[str, Path]:
    """Name -> file of each option of a group such as `hardware`; the first folder of `search_path` wins."""
    found = [path for folder in reversed(search_path()) for path in (folder / group).glob("*.yaml")]
    return dict(sorted({path.stem: path for path in found if path.is_file()}.items()))


def known_names(group: str) -> list[str]:
    """The names of the options of a group."""
    return list(files(group))


def describe(group: str) -> dict[str, str]:
    """Name of each option of a group -> the first comment line of its file."""
    found = {}
    for name, path in files(group).items():
        lines = read_text(path).splitlines()
        comments = [s for s in lines if s.startswith("#") and "@package" not in s]
        found[name] = comments[0].lstrip("# ").strip() if comments else ""
    return found


def read_text(path: Path) -> str:
    """The text of a configuration file.

    Raises:
        ConfigError: the file cannot be read.
    """
    try:
        return path.read_text()
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from error


def _require_global(name: str) -> None:
    """Raises ConfigError when the file of sweep=`name` sets whole groups but lacks `# @package _global_`."""
    path = files("sweep").get(name)
    if path is None or "# @package _global_" in read_text(path):
        return
    values = read_yaml(path)
    if isinstance(values, dict) and (nested := sorted({*GROUPS, "name", "repeats"} & values.keys())):
        raise ConfigError(
            f"{path} sets {nested[0]}: and so needs a first line of its own: # @package _global_"
        )


def read_yaml(path: Path) -> Any:
    """The content of one YAML file, with its interpolations resolved.

    Raises:
        ConfigError: the file cannot be read or is not YAML.
    """
    try:
        return OmegaConf.to_container(OmegaConf.load(path), resolve=True)
    except (OmegaConfBaseException, YAMLError, ValueError, OSError) as error:
        raise ConfigError(f"cannot read {path}: {' '.join(str(error).split())}") from error


def compose_tree(overrides: Sequence[str]) -> dict[str, Any]:
    """The composed configuration as plain values; `names` holds the chosen option of each group.

    Raises:
        ConfigError: an override cannot be used.
    """
    require_usable(overrides)
    for override in overrides:
        if override.startswith("sweep="):
            _require_global(override.removeprefix("sweep="))
    GlobalHydra.instance().clear()
    Plugins.instance().register(UserFolders)
    try:
        with initialize_config_dir(config_dir=str(search_path()[-1]), version_base="1.3"):
            composed = compose("config", overrides=list(overrides), return_hydra_config=True)
            choices = dict(composed.hydra.runtime.choices)
            OmegaConf.set_struct(composed, False)
            composed.pop("hydra")
            tree = OmegaConf.to_container(composed, resolve=True, throw_on_missing=True)
    except (HydraException, OmegaConfBaseException, YAMLError, ValueError) as error:
        if isinstance(error, OverrideParseException):
            raise ConfigError(_unreadable(overrides)) from error
        raise ConfigError(explain(error, overrides)) from error
    assert isinstance(tree, dict)
    values: dict[str, Any] = {str(k): v for k, v in tree.items()}
    values["names"] = {str(k): v for k, v in choices.items() if k in GROUPS}
    return values


def _unreadable(overrides: Sequence[str]) -> str:
    """One line that explains the first override that Hydra cannot parse."""
    parser = OverridesParser.create()
    for override in overrides:
        try:
            parser.parse_overrides([override])
        except OverrideParseException:
            key, eq, value = override.partition("=")
            if not eq or not key.strip():
                return f"{override!r} is no override; write KEY=VALUE, such as sweep.nodes=[1,2]"
            if value.count("[") > value.count("]"):
                whole = "".join(overrides[overrides.index(override) :]).partition("]")[0]
                return f"{override} has no end: the shell cuts words at spaces; write a list without them: {whole}]"
            if "launcher.sbatch.-" in key:
                return f"{key}; write an option's name without dashes in front"
            return (
                f"{override}: a value with brackets, commas, colons, spaces or quotes in it needs quotes of its own, "
                f"""such as '{key}="{value.replace(chr(34), "")}"'; a list is [A,B]"""
            )
    return f"cannot use the overrides {' '.join(overrides)!r}"
