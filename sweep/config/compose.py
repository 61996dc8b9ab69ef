"""Hydra overrides to plain values: the only module that knows Hydra."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

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
from ultrabench.errors import ConfigError
from ultrabench.sweep.config.errors import explain, require_usable

GROUPS = ("cluster", "hardware", "kernel", "launcher", "measure", "model", "retry", "sweep")


def search_path() -> list[Path]:
    """Folders that hold configuration, the strongest first.

    `./ultrabench`, then $ULTRABENCH_CONFIG_DIR (by default ~/.config/ultrabench), then the package.
    """
    user = os.environ.get("ULTRABENCH_CONFIG_DIR", "~/.config/ultrabench")
    folders = [Path.cwd() / "ultrabench", Path(user).expanduser().absolute()]
    package = Path(ultrabench.__file__).parent / "configs"
    return [f for f in folders if _is_config_folder(f)] + [package.resolve()]


def _is_config_folder(folder: Path) -> bool:
    return any(next((folder / group).glob("*.yaml"), None) for group in GROUPS)


class UserFolders(SearchPathPlugin):
    """Lets the user's folders win over the package's, which stays the main one."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        """Puts them in front, the strongest first."""
        for folder in reversed(_user_folders()):
            search_path.prepend("user", f"file://{folder}")


def _user_folders() -> list[Path]:
    return search_path()[:-1]


def files(group: str) -> dict[str, Path]:
    """Name -> file of everything that can be named in a group such as `hardware`; the strongest folder wins."""
    found = [path for folder in reversed(search_path()) for path in (folder / group).glob("*.yaml")]
    return dict(sorted({path.stem: path for path in found if path.is_file()}.items()))


def known_names(group: str) -> list[str]:
    """What can be named in a group."""
    return list(files(group))


def describe(group: str) -> dict[str, str]:
    """Names of a group with the first comment line of their files."""
    found = {}
    for name, path in files(group).items():
        lines = read_text(path).splitlines()
        comments = [s for s in lines if s.startswith("#") and "@package" not in s]
        found[name] = comments[0].lstrip("# ").strip() if comments else ""
    return found


def read_text(path: Path) -> str:
    """The text of a configuration file.

    Raises:
        ConfigError: it cannot be read.
    """
    try:
        return path.read_text()
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from error


def _require_global(name: str) -> None:
    """Raises ConfigError when the file of sweep=`name` sets other groups, or `sweep:`, inside of the group sweep."""
    path = files("sweep").get(name)
    if path is None or "# @package _global_" in read_text(path):
        return
    values = read_yaml(path)
    if isinstance(values, dict) and (nested := sorted({*GROUPS, "name", "repeats"} & values.keys())):
        raise ConfigError(
            f"{path} sets {nested[0]}: and so needs a first line of its own: # @package _global_"
        )


def read_yaml(path: Path) -> Any:
    """The resolved content of one file.

    Raises:
        ConfigError: it is no YAML.
    """
    try:
        return OmegaConf.to_container(OmegaConf.load(path), resolve=True)
    except (OmegaConfBaseException, YAMLError, ValueError, OSError) as error:
        raise ConfigError(f"cannot read {path}: {' '.join(str(error).split())}") from error


def compose_tree(overrides: Sequence[str]) -> dict[str, Any]:
    """The composed tree as plain values, with the chosen option of each group under `names`.

    Raises:
        ConfigError: an override that cannot be used.
    """
    require_usable(overrides, GROUPS)
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
        raise ConfigError(explain(error, overrides, known_names, GROUPS)) from error
    assert isinstance(tree, dict)
    values: dict[str, Any] = {str(k): v for k, v in tree.items()}
    values["names"] = {str(k): v for k, v in choices.items() if k in GROUPS}
    return values


def _unreadable(overrides: Sequence[str]) -> str:
    """One line on the first override that Hydra's grammar does not take."""
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
