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
from ultrabench.sweep.config_errors import explain, require_usable

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


def known_names(group: str) -> list[str]:
    """What can be named in a group such as `hardware`."""
    return sorted({p.stem for folder in search_path() for p in (folder / group).glob("*.yaml")})


def describe(group: str) -> dict[str, str]:
    """Names of a group with the first comment line of their files; the strongest folder wins."""
    found: dict[str, str] = {}
    for folder in search_path():
        for path in sorted((folder / group).glob("*.yaml")):
            lines = path.read_text().splitlines()
            comments = [s for s in lines if s.startswith("#") and "@package" not in s]
            found.setdefault(path.stem, comments[0].lstrip("# ").strip() if comments else "")
    return dict(sorted(found.items()))


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
            if "launcher.sbatch.-" in key:
                return f"{key}; write an option's name without dashes in front"
            return (
                f"{override}: a value with brackets, commas, colons, spaces or quotes in it needs quotes of its own, "
                f"""such as '{key}="{value.replace(chr(34), "")}"'; a list is [A,B]"""
            )
    return f"cannot use the overrides {' '.join(overrides)!r}"
