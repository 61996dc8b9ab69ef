"""Turns Hydra overrides into plain values; the only module that imports Hydra."""

import contextlib
import os
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
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
from ultrabench.errors import ConfigError, require_once, unknown_name
from ultrabench.sweep.config.sweep_config import NAME, moved
from ultrabench.sweep.config.yaml_file import read_text, require_few_values

GROUPS = ("cluster", "hardware", "kernel", "launcher", "measure", "model", "retry", "sweep")
FOLDERS = {group: group for group in GROUPS} | {"profile": "profiles"}
"""What an override such as profile=NAME names -> the folder of its files."""
_SIZES = r"hidden_|(^|_)layers|(^|_)heads|ffn_|vocab_|intermediate_"
"""Pattern in the names of sizes of a model."""
_NO_SETTING = "${{{0}}} is no setting; for a variable of the shell on the nodes write \\${{{0}}}"
_PREFERRED = ("sweep", "kernel", "launcher", "measure", "retry", "cluster", "hardware")
"""The order in which a group is preferred where several have a key of the same name."""
_FOREIGN = {
    r"micro_?batch|local_?batch": "sweep.mbs", r"batch": "sweep.gbs", r"schedule": "sweep.pp_schedule",
    r"tensor|^tp_": "sweep.tp", r"pipeline|^pp_": "sweep.pp", r"context_p|^cp_": "sweep.cp",
    r"data_?parallel|world_size|^dp_": "sweep.dp", r"accum": "sweep.gas", r"zero|fsdp": "sweep.zero_stage",
    r"seq|context_len|block_size": "sweep.seq_len", r"recompute|activation_?checkpoint": "sweep.recompute",
    r"dtype": "kernel.precision", r"iters|steps": "measure.max_steps", r"nodes": "sweep.nodes",
}  # fmt: skip
"""Pattern in the name of a setting of Megatron-LM, torchtitan or DeepSpeed -> the same setting here."""


def unknown_option(group: str, name: str) -> str:
    """One line for a group that has no option of this name; it tells of a file with another ending."""
    file = f"{FOLDERS[group]}/{name}.yml"
    others = [path for folder in _user_folders() if (path := folder / file).is_file()]
    if others:
        return f"{group}={name}: {others[0]} is not read, since its name must end in .yaml; rename it"
    more = "; on a login node, `ultrabench doctor --write` writes the configuration for cluster=mine"
    return unknown_name(group, name, files(FOLDERS[group])) + (more if group == "cluster" else "")


def unknown_override(key: str, value: object = None) -> str:
    """One line for an override whose key does not exist; it names the setting that was probably meant.

    Args:
        value: the value that was given, which is repeated in the form that the setting needs.
    """
    group, _, last = key.partition(".")[0], *key.rpartition(".")[1:]
    if error := moved(key):
        return str(error)
    for prefix, what in (("launcher.sbatch", "options of sbatch"), ("kernel.env.", "variables")):
        if key.startswith(prefix):
            return f"{key}: {what} are added; write +{prefix.rstrip('.')}.NAME=VALUE"
    if group == "model" or (group not in GROUPS and re.search(_SIZES, key)):
        advice = "write ultrabench/model/NAME.yaml and give model=NAME, or give model=PATH of a config.json"
        return f"unknown override {key!r}; the sizes of a model stand in its file: {advice}"
    known = _known_keys()
    if key in known:
        return f"{key} is no setting of the {group} that is chosen; {_where_it_is(key, value, known)}"
    same = [name for name in known if name.rpartition(".")[2] == last]
    longer = [name for name in known if name.startswith(f"launcher.{last}_")]  # launcher.time is time_minutes
    if not same and key in (last, f"launcher.{last}") and len(longer) == 1:
        same = longer
    foreign = [name for pattern, name in _FOREIGN.items() if re.search(pattern, key.lower())]
    if not same and foreign and group not in GROUPS:
        advice = str(moved(foreign[0]) or "") or f"did you mean {_typed(foreign[0], value, known)}?"
        return f"unknown override {key!r}; {advice}"
    lasts = {name.rpartition(".")[2]: None for name in known}
    if not same and last == key and (near := get_close_matches(key, lasts, 1, 0.75)):
        same = [name for name in known if name.rpartition(".")[2] == near[0]]
    if same:
        meant = min(same, key=lambda name: (name.partition(".")[0] != group, name.count("."), _rank(name)))
        have = _options_with(meant) if meant.startswith(("kernel.", "launcher.")) else []
        also = f", with {have[0]}" if len(have) == 1 else ""
        return f"unknown override {key!r}; did you mean {_typed(meant, value, known)}{also}?"
    beside = {name for name in known if name.startswith(f"{group}.")}
    return unknown_name("override", key, beside or {name for name in known if "." not in name})


def _rank(name: str) -> int:
    group = name.partition(".")[0]
    return _PREFERRED.index(group) if group in _PREFERRED else -1


def _where_it_is(key: str, value: object, known: Mapping[str, bool]) -> str:
    """The remedy for a known key that the chosen option of its group does not have."""
    if key.startswith("sweep."):
        return f"add it: {_typed(f'+{key}', value, known)}"
    return f"add {' or '.join(_options_with(key))}"


def _options_with(key: str) -> list[str]:
    """The options of the package that have this key of their group, such as launcher=slurm."""
    group = key.partition(".")[0]
    paths = sorted((search_path()[-1] / group).glob("*.yaml"))
    return [f"{group}={path.stem}" for path in paths if key in _keys_of(group, path)]


def _typed(name: str, value: object, known: Mapping[str, bool]) -> str:
    """The override that gives `name` this value, as a user can type it; only the name for a mapping or no value."""
    if value is None or isinstance(value, dict):
        return name
    text = str(value)
    override = f"{name}={as_list(text) if known[name.lstrip('+')] else text}"
    return override if re.fullmatch(r"[\w.,=\[\]/:+@%-]*", override) else shlex.quote(override)


def as_list(value: str) -> str:
    """The values as one list that Hydra reads: `1 2`, `1,2` and `[1 2]` become `[1,2]`."""
    return f"[{','.join(value.strip('[]').replace(',', ' ').split())}]"


def _known_keys() -> dict[str, bool]:
    """The keys in the files of the package, such as `sweep.nodes`, each with whether some file gives it a list."""
    folder = search_path()[-1]
    known = dict.fromkeys(GROUPS, False) | _paths(yaml.safe_load((folder / "config.yaml").read_text()))
    for group in {*GROUPS} - {"model"}:
        for path in (folder / group).glob("*.yaml"):
            for key, is_list in _keys_of(group, path).items():
                known[key] = known.get(key, False) or is_list
    return {key: is_list for key, is_list in sorted(known.items()) if key != "defaults"}


def _keys_of(group: str, path: Path) -> dict[str, bool]:
    """The keys that a file of a group sets; the file of a sweep may set other groups, too."""
    values = yaml.safe_load(path.read_text()) or {}
    return _paths({group: values.get(group, values)})


def _paths(values: dict[str, Any], above: str = "") -> dict[str, bool]:
    """The dotted keys of a mapping and of those inside it, each with whether its value is a list."""
    keys = {above + key: isinstance(value, list) for key, value in values.items()}
    for key, value in values.items():
        keys |= _paths(value, f"{above}{key}.") if isinstance(value, dict) else {}
    return keys


def _no_override(word: str) -> str:
    """One line for a word that is no override; it names the group that has a file of this name."""
    group = next((group for group in ("sweep", *GROUPS) if word in files(group)), None)
    advice = f"{group}={word}" if group else "KEY=VALUE without spaces, such as sweep.nodes=[1,2]"
    return f"{word!r} is no override; write {advice}"


def _unusable(override: str) -> str | None:
    """One line for an override that Hydra would accept or not explain, but ultrabench cannot use; else None."""
    key, _, value = override.partition("=")
    group = key.lstrip("+")
    if not key.strip():
        return _no_override(override)
    if key[0] in "+~" and group.lstrip("~") in GROUPS:
        group = group.lstrip("~")
        return f"{override}: a sweep always has a {group}; choose another with {group}={value or 'NAME'}"
    if override == f"{key}=" and group in GROUPS:
        return f"{override} has no value; give a name (see ultrabench configs {group})"
    if key.startswith("sweep.") and (ends := re.fullmatch(r"\[?(\d+)(?:-|:|\.\.)(\d+)\]?", value)):
        low, high = int(ends[1]), int(ends[2])
        within = [low << n for n in range((high // low).bit_length())] if low else range(min(high, 3) + 1)
        return f"{override}: a range is written as a list, such as {key}=[{','.join(map(str, within))}]"
    if group in GROUPS and re.fullmatch(r"\[[\w.,\s-]+\]", value):
        return _several(group, value)
    blanks = re.fullmatch(r"\[[^\"'\\]*[^[,\s]\s+[^],\s].*\]", value)  # a list with blanks between its values
    if blanks and (key.startswith("sweep.") or group == "model"):
        return f"{override}: a list has commas; write {key}={as_list(value)}"
    if group in GROUPS and value.startswith(("[", "{")):
        advice = f"values go into {group}.KEY=VALUE or into a file, ultrabench/{group}/NAME.yaml"
        return f"{override}: {group} takes one name (known: see ultrabench configs {group}); {advice}"
    if group in GROUPS and ("/" in value or value.endswith((".yaml", ".yml"))):
        stem, first = Path(value).stem, f"put the file into ./ultrabench/{group}/ and "
        advice = f"{'' if stem in files(group) else first}write {group}={stem}"
        return f"{override}: {group} takes a name, not a path; {advice}"
    if key == "hardware.gpu":
        return f"{override}: a GPU comes with its rates, in a file; name that with hardware=NAME"
    if re.match(r"[+~]*hydra\b", key):
        return f"{override}: Hydra's own settings have no effect here; leave it out"
    if group.startswith("launcher.sbatch.-"):
        return f"{key}; write an option's name without dashes in front"
    return None


def _several(key: str, value: str) -> str:
    """One line for an override with several values, such as hardware=a,b or sweep.tp=1,2."""
    known, group = _known_keys(), key.partition(".")[0]
    if key not in known and group != "model" and key[0] != "+":
        return unknown_override(key, value)
    if known.get(key):
        return f"{key}={value}: several values are a list; write {_typed(key, value, known)}"
    if group in ("launcher", "kernel", "+launcher", "+kernel"):  # such as two partitions, or a list of nodes
        return f"{key}={value}: a value with a comma needs quotes: '{key}=\"{value}\"'"
    each = [f"{key}={one}" for one in as_list(value)[1:-1].split(",")]
    return f"{key}={value}: one sweep has one {key}; run the command once with each: {', '.join(each)}"


def in_defaults(group: str) -> str:
    """How the file of a sweep chooses an option of a group."""
    return f"in a sweep file another {group} is chosen under defaults: '- override /{group}: NAME', with the slash"


_SENTENCES: tuple[tuple[str, Callable[..., str]], ...] = (
    (rf"(?:Could not (?:find|override) 'sweep/|Multiple values for )({'|'.join(GROUPS)})\b", in_defaults),
    (r"Could not load 'sweep/override /?(\w+)", in_defaults),
    (r"Could not load 'sweep/([^']+)'", lambda name: f"defaults: {unknown_option('sweep', name)}"),
    (rf"Could not find '({'|'.join(GROUPS)})/([^'/]+)'", unknown_option),
    (r"Missing mandatory value: .*\s+full_key: (\S+)", "{0} has no value; give it: {0}=...".format),
    (r"Ambiguous value for argument '([^'=]+)=([^']*)'", _several),
    (r"Interpolation key '([^']+)' not found", _NO_SETTING.format),
    (r"Sweep parameters '([^'=]+)=([^']*)' requires", "{0}={1} is no list of values; write {0}=[A,B]".format),
)
"""Pattern in a message of Hydra -> function that makes one line of its groups."""


def explain(error: Exception, overrides: Sequence[str]) -> str:
    """One line that explains `error`: what was given, which values are known, and what to do."""
    for pattern, sentence in _SENTENCES:
        if found := re.search(pattern, str(error)):
            names = [o.removeprefix("sweep=") for o in overrides if o.startswith("sweep=")]
            return of_sweep_file("".join(names[-1:]), found[1], overrides) + sentence(*found.groups())
    if found := re.search(r"Could not override '([^']+)'", str(error)):
        given = (o.lstrip("+~").partition("=") for o in overrides)
        return unknown_override(found[1], next((v for k, _, v in given if k == found[1]), None))
    if isinstance(error, OverrideParseException):
        return _unreadable(error.override, overrides)
    if isinstance(error, yaml.YAMLError):
        return f"a configuration file is no YAML: {' '.join(str(error).split())}; mend it there"
    line = " ".join(str(error).partition("\n")[0].split()) or type(error).__name__
    return f"cannot use the overrides {' '.join(overrides)!r}: {line}"


def of_sweep_file(sweep: str, word: str, overrides: Sequence[str]) -> str:
    """The prefix `FILE: ` for a message about a word of the user's file of a sweep; empty if an override has it."""
    path = files("sweep").get(sweep)
    if path is None or path.parent.parent == search_path()[-1] or any(word in o for o in overrides):
        return ""
    return f"{path}: " if re.search(rf"\b{re.escape(word)}\b", read_text(path)) else ""


def _unreadable(override: str, overrides: Sequence[str]) -> str:
    """One line that explains an override that Hydra cannot parse."""
    key, equals, value = override.partition("=")
    if not equals:
        return _no_override(override)
    if value.count("[") > value.count("]"):
        whole = " ".join(overrides[overrides.index(override) :]).partition("]")[0]
        advice = f"write a list without them: {key}={as_list(whole.partition('=')[2])}"
        return f"{override} has no end: the shell cuts words at spaces; {advice}"
    if re.fullmatch(r"[({\[]?[\w.;,\s-]+[)}\]]?", value) and _known_keys().get(key):
        items = as_list(re.sub(r"[(){};]", " ", value))
        return f"{override}: a list has brackets and commas; write {key}={items}"
    rule = "a value with brackets, commas, colons, spaces or quotes in it needs quotes of its own"
    if not value.isascii() and key == "name":
        return f"{override}: must be {NAME.text}"
    return f"{override}: {rule}; write {shlex.quote(f'{key}={_quoted(value)}')}"


def _quoted(value: str) -> str:
    """The value in a form that Hydra reads: a list with quotes around its items that need them, else one text."""
    plain = value.replace('"', "")
    items = plain.removeprefix("[").removesuffix("]").split(",")
    quoted = [item if re.fullmatch(r"[\w./=+-]+", item, re.ASCII) else f'"{item.strip()}"' for item in items]
    is_list = plain.startswith("[") and plain.endswith("]") and "[" not in plain[1:]
    return f"[{','.join(quoted)}]" if is_list else f'"{plain}"'


def search_path() -> list[Path]:
    """Folders that hold configuration files; a file in an earlier folder hides its namesakes in later ones.

    They are `./ultrabench`, then $ULTRABENCH_CONFIG_DIR (by default ~/.config/ultrabench), then the package.
    """

    def holds_files(folder: Path) -> bool:
        return any(
            path for group in (*FOLDERS.values(), "published") for path in (folder / group).glob("*.yaml")
        )

    used = filter(holds_files, _user_folders())
    return [*used, (Path(ultrabench.__file__).parent / "configs").resolve()]


def _user_folders() -> list[Path]:
    user = os.environ.get("ULTRABENCH_CONFIG_DIR", "~/.config/ultrabench")
    return [Path.cwd() / "ultrabench", Path(user).expanduser().absolute()]


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
    """Name of each option of a group -> the first comment line of its file, or why that cannot be used."""
    return {name: _about(path) for name, path in files(group).items()}


def _about(path: Path) -> str:
    """The first comment line of a configuration file, or what is wrong with the file."""
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
    found: dict[Path, dict[str, Any]] = {}
    for path in files(group).values():
        with contextlib.suppress(ConfigError):
            if isinstance(values := read_yaml(path), dict):
                found[path] = values
    return found


def read_yaml(path: Path) -> Any:
    """The content of one YAML file, with its interpolations resolved.

    Raises:
        ConfigError: the file cannot be read or is not YAML.
    """
    require_few_values(path)
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


def _usual_sweep(overrides: Sequence[str]) -> list[str]:
    """The override that chooses `sweep=layouts` where the given hardware is no CPU and no sweep is given."""
    given = {key.lstrip("+"): value for key, _, value in (o.partition("=") for o in overrides)}
    path = files("hardware").get(given.get("hardware", ""))
    if path is None or "sweep" in given or not isinstance(values := read_yaml(path), dict):
        return []
    return [] if values.get("device") == "cpu" else ["sweep=layouts"]


def compose_tree(overrides: Sequence[str]) -> dict[str, Any]:
    """The composed configuration as plain values; `names` holds the chosen option of each group.

    Without an override `sweep=NAME`, hardware that is no CPU gets `layouts` instead of the sweep of config.yaml.

    Raises:
        ConfigError: an override cannot be used.
    """
    require_once(overrides)
    for override in overrides:
        if unusable := _unusable(override):
            raise ConfigError(unusable)
        if override.startswith("sweep=") and (path := files("sweep").get(override.removeprefix("sweep="))):
            _require_global(path)
    for folder in search_path()[:-1]:
        for path in filter(Path.is_file, folder.rglob("*.yaml")):
            require_few_values(path)
    GlobalHydra.instance().clear()
    Plugins.instance().register(UserFolders)
    try:
        with initialize_config_dir(config_dir=str(search_path()[-1]), version_base="1.3"):
            chosen = [*_usual_sweep(overrides), *overrides]
            composed = compose("config", overrides=chosen, return_hydra_config=True)
            choices = dict(composed.hydra.runtime.choices)
            OmegaConf.set_struct(composed, False)
            composed.pop("hydra")
            tree = OmegaConf.to_container(composed, resolve=True, throw_on_missing=True)
    except (HydraException, OmegaConfBaseException, yaml.YAMLError, ValueError) as error:
        raise ConfigError(explain(error, overrides)) from error
    assert isinstance(tree, dict)
    return {**tree, "names": {group: choices[group] for group in GROUPS if group in choices}}
