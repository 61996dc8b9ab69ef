"""What Hydra and OmegaConf complain about, said in one line of our own."""

import re
from collections.abc import Callable, Sequence
from pathlib import Path

import yaml

import ultrabench
from ultrabench.errors import ConfigError, unknown_name
from ultrabench.sweep.config.launcher_config import moved_to_sbatch

WRITE_CLUSTER = "; on a login node, `ultrabench doctor --write` writes the configuration for cluster=mine"


def explain(
    error: Exception, overrides: Sequence[str], known_names: Callable[[str], list[str]], groups: Sequence[str]
) -> str:
    """One line for `error`: what was given, what is known, what to do."""
    text = str(error)
    missing = re.search(r"Could not find '([^']+)/([^'/]+)'", text)
    if missing and missing[1] in groups:
        known = unknown_name(missing[1], missing[2], known_names(missing[1]))
        return known + (WRITE_CLUSTER if missing[1] == "cluster" else "")
    unused = re.search(r"Could not override '([^']+)'", text)
    if unused and re.match(r"launcher\.sbatch(\.|$)", unused[1]):
        return f"{unused[1]}: options of sbatch are added; write +launcher.sbatch.NAME=VALUE"
    if unused and (moved := moved_to_sbatch(unused[1])):
        return str(moved)
    if unused:
        return unknown_override(unused[1], groups)
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


def require_usable(overrides: Sequence[str], groups: Sequence[str]) -> None:
    """Raises for overrides that Hydra would take and we could not use.

    Raises:
        ConfigError: a list, values or a path in place of the name of a group, or a setting of Hydra itself.
    """
    for override in overrides:
        key, _, value = override.partition("=")
        group = key.lstrip("+")
        if group in groups and value.startswith(("[", "{")):
            raise ConfigError(
                f"{override}: {group} takes one name (known: see ultrabench configs {group}); values of your own go into "
                f"a file, ultrabench/{group}/NAME.yaml, or into overrides such as {group}.KEY=VALUE"
            )
        if group in groups and ("/" in value or value.endswith((".yaml", ".yml"))):
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


def unknown_override(key: str, groups: Sequence[str]) -> str:
    """One line for an override whose key does not exist, naming the nearest that does."""
    if key.startswith("model."):
        return (
            f"unknown override {key!r}; the sizes of a model stand in its file: write ultrabench/model/NAME.yaml and give "
            "model=NAME, or give model=PATH of a config.json"
        )
    keys = set(groups)
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
