"""Turns Hydra overrides into plain values; the only module that imports Hydra, and only when it composes.

A mistake is found at one of three places, each with its table of patterns and sentences:
in the override itself (_OVERRIDE_MISTAKES), in a message of Hydra (_HYDRA_MESSAGES), or in a key that does not exist
(_MOVED_SETTINGS, _FILE_ONLY_SETTINGS, _FOREIGN_NAMES).
"""

import functools
import re
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, get_origin

import yaml

from ultrabench.errors import SETTING, ConfigError, nearest_name, require_once, unknown_name
from ultrabench.hardware import DEVICE_KINDS, Hardware
from ultrabench.kernel_config import EMBEDDED, KernelConfig, kind_by_name
from ultrabench.layout import AXES
from ultrabench.record import field_types
from ultrabench.sweep.config.files import (
    CONFIG_GROUPS,
    files,
    read_text,
    read_yaml,
    require_few_values,
    search_path,
    unknown_option,
)
from ultrabench.sweep.config.launcher_config import CLUSTER_KEYS
from ultrabench.sweep.config.options import EXAMPLES, SWEEP_KEYS
from ultrabench.sweep.config.references import wrong_reference
from ultrabench.sweep.config.sweep_config import LAYOUTS_SETTING, LIST_LAYOUTS_REMEDY
from ultrabench.variant import CELL_OPTIONS, FLAGS, KERNEL_OPTIONS

Sentence = Callable[..., str]
"""Makes one line from the named parts of a mistake."""
_GROUP_NAMES = "|".join(CONFIG_GROUPS)
_GROUP_PATTERN = rf"(?P<group>{_GROUP_NAMES})"
_LIST_KEY = rf"\+?(?:kernel\.command|sweep\.(?:nodes|models|{'|'.join(AXES[1:])}))"
"""Pattern of the keys whose values are lists."""
_LIST_OR_VALUE = (
    rf"(?:{_LIST_KEY}|\+?sweep\.(?:{'|'.join(CELL_OPTIONS[:2])})"
    rf"|kernel\.(?:precision|{'|'.join(KERNEL_OPTIONS)})|measure\.partial_steps)"
)
"""Pattern of the keys whose values are lists or single values."""


def parts_of(overrides: Iterable[str]) -> dict[str, str]:
    """Key of each override, without the + or ~ in front -> its value."""
    return {key: value for key, _, value in (o.lstrip("+~").partition("=") for o in overrides)}


def with_overrides(overrides: Iterable[str], changes: Sequence[str]) -> list[str]:
    """The overrides with `changes`, which replace those of the same keys."""
    changed_keys = parts_of(changes).keys()
    return [*(o for o in overrides if not parts_of([o]).keys() & changed_keys), *changes]


def as_hydra_list(value: str) -> str:
    """The values as one list that Hydra reads: `1 2`, `(1,2)` and `[1;2]` become `[1,2]`."""
    return f"[{','.join(re.sub(r'[][(){},;]', ' ', value).split())}]"


def _advice_for_word(override: str, **_: str) -> str:
    """One line for an argument that is not KEY=VALUE; it names the group that has a file of this name."""
    group = next((group for group in CONFIG_GROUPS if override in files(group)), None)
    advice = f"{group}={override}" if group else "KEY=VALUE without spaces, such as sweep.nodes=[1,2]"
    return f"{override!r} is not an override; write {advice}"


def _range_override(override: str, key: str, low: str, high: str, **_: str) -> str:
    low_value, high_value = int(low), int(high)
    num_values = (high_value // low_value).bit_length() if low_value else min(high_value, 3) + 1
    values = ",".join(str(low_value << n if low_value else n) for n in range(num_values))
    return f"{override}: ranges are not supported; write a list, such as {key}=[{values}]"


def _path_of_option(override: str, group: str, value: str, **_: str) -> str:
    name = Path(value).stem
    first_advice = "" if name in files(group) else f"put the file into ./ultrabench/{group}/ and "
    return f"{override}: {group} takes a name, not a path; {first_advice}write {group}={name}"


def _several_values(key: str, value: str, **_: str) -> str:
    """One line for an override with several values, such as hardware=a,b, of a setting that is no list."""
    if key not in _options_by_setting() and key[0] != "+":
        return unknown_override(key, value)
    if re.match(r"\+?(launcher|kernel)\b", key):  # such as two partitions, or a list of nodes
        return f"{SETTING}={value}: a value with a comma needs quotes: '{SETTING}=\"{value}\"'"
    overrides = [f"{key}={single_value}" for single_value in as_hydra_list(value)[1:-1].split(",")]
    return f"{key}={value}: a sweep has one {key}; run the command once for each: {', '.join(overrides)}"


_OVERRIDE_MISTAKES: tuple[tuple[str, Sentence], ...] = (
    (rf"[+~]+(?P<group>{_GROUP_NAMES})(=.*)?",
     "{override}: a sweep always has a {group}; choose another with {group}=NAME".format),
    (r"[^=]+=[^]\"']*\[[^]\"']*",
     "{override} has no closing bracket: the shell splits at spaces; write the list without spaces: "
     "{key}={items}".format),
    (r"[^=~]*|=.*", _advice_for_word),
    (r"model=(\[.*|[^/'\"]*,[^/'\"]*)", "{override}: model takes one name; "
    "for several use sweep.models={items}".format),
    (r"sweep\..*=\[?(?P<low>\d+)(-|:|\.\.)(?P<high>\d+)\]?", _range_override),
    (r"sweep\.(?!layouts=).*?=\[[^\"'\\]*[^[,\s]\s+[^],\s].*\]",
        "{override}: a list needs commas; write {key}={items}".format),
    (rf"{_LIST_OR_VALUE}=(?!\[[^];]*\]$|[\w.-]*$)[({{\[]?[\w.;,\s-]+[)}}\]]?",
     "{override}: a list needs brackets and commas; write {key}={items}".format),
    (rf"(?!model=\[){_GROUP_PATTERN}=(?:[\[{{].*|(?i:null|true|false|nan|[+-]?(inf|\.?\d[\d.]*(e[+-]?\d+)?))|)",
     "{override}: a sweep has one {group}; choose it by its name, {group}=NAME "
     "(see ultrabench configs {group})".format),
    (rf"(?!model){_GROUP_PATTERN}=(.*/.*|.*\.ya?ml)", _path_of_option),
    (r"[+~]*kernel\.files\.(?P<name>[^=]+)=.*",
     "{override}: the name of a file has a dot; write kernel.files as a whole: "
     "'kernel.files={{{name}: \"TEXT\"}}'".format),
    (r"hardware\.gpu=.*", "{override}: a file holds the GPU and its rates; choose the file with hardware=NAME".format),
    (r"[+~]*hydra\b.*", "{override}: Hydra's own settings have no effect here; leave it out".format),
)  # fmt: skip
"""Pattern of an override that Hydra would accept or not explain, but ultrabench cannot use -> function that makes one
line of its parts: the override, its key, its value, this as a list (items), and the groups of the pattern."""


def _require_usable(overrides: Sequence[str]) -> None:
    for index, override in enumerate(overrides):
        key, _, value = override.partition("=")
        list_text = " ".join((value, *overrides[index + 1 :])).partition("]")[0] if "[" in value else value
        for pattern, make_line in _OVERRIDE_MISTAKES:
            if match := re.fullmatch(pattern, override):
                parts = {"override": override, "key": key, "value": value, "items": as_hydra_list(list_text)}
                raise ConfigError(make_line(**parts | match.groupdict()))


def in_defaults(group: str, **_: str) -> str:
    """How the file of a sweep chooses an option of a group."""
    return (
        f"to choose another {group} in a sweep file, write under defaults: '- override /{group}: "
        "NAME', with the slash"
    )


_HYDRA_MESSAGES: tuple[tuple[str, Sentence], ...] = (
    (rf"(?:Could not (?:find|override) 'sweep/|Multiple values for )(?P<group>{_GROUP_NAMES})\b", in_defaults),
    (r"Could not load 'sweep/override /?(?P<group>\w+)", in_defaults),
    (r"Could not load 'sweep/(?P<name>[^']+)'", lambda name, **_: f"defaults: {unknown_option('sweep', name)}"),
    (rf"Could not find '(?P<group>{_GROUP_NAMES})/(?P<name>[^'/]+)'", lambda group, name,
        **_: unknown_option(group, name)),
    (r"Could not override '(?P<key>[^']+)'",
     lambda key, values, **_: _axis_beside_layouts(key, values) or _absent_setting(key, values)
        or unknown_override(key, values.get(key))),
    (r"An item is already at '(?P<key>[^']+)'",
     lambda key, values, **_: f"{key} has a value already; write it without the +: "
        f"{_override_text(key, values.get(key))}"),
    (r"Missing mandatory value: .*\s+full_key: (?P<key>\S+)", "{key} has no value; set {key}=...".format),
    (r"Ambiguous value for argument '(?P<key>[^'=]+)=(?P<value>[^']*)'", _several_values),
    (r"In '(?P<file>[^']+)': ConfigTypeError",
     "{file}.yaml has a list or a text instead of settings; write KEY: VALUE lines, "
     "as in the files that ultrabench configs lists".format),
    (r"Sweep parameters '(?P<key>[^'=]+)=(?P<value>[^']*)' requires",
     f"{SETTING}={{value}} is not a list of values; write {SETTING}=[A,B]".format),
)  # fmt: skip
"""Pattern in a message of Hydra -> function that makes one line of its groups and of the values of the overrides."""


def _error_of_hydra(error: Exception, overrides: Sequence[str]) -> ConfigError:
    """What was given, which values are known, and what to do, as far as the message of Hydra tells it."""
    if reference_text := wrong_reference(error, overrides):
        return ConfigError(reference_text)
    for pattern, make_line in _HYDRA_MESSAGES:
        if match := re.search(pattern, str(error)):
            text = make_line(**match.groupdict(), values=parts_of(overrides))
            return ConfigError(text, setting=match[1] if match.re.groups else None)
    if (override := getattr(error, "override", None)) is not None:  # of an OverrideParseException
        return ConfigError(_advice_for_unreadable(override))
    if isinstance(error, yaml.YAMLError):
        fault = " ".join(str(error).split())
        return ConfigError(f"a configuration file is not valid YAML: {fault}; fix it there")
    text = " ".join(str(error).partition("\n")[0].split()).rstrip(".") or type(error).__name__
    remedy = "see ultrabench configs for names, and docs/reference/configuration.md for settings"
    return ConfigError(f"cannot use the overrides {' '.join(overrides)!r}: {text}", remedy)


def _advice_for_unreadable(override: str) -> str:
    """One line for an override that Hydra cannot parse, with a form that it can."""
    key, _, value = " ".join(override.split()).partition("=")
    if not _is_readable(f"{key}=1"):
        names_text = "a name consists of letters, digits and '_' and does not start with a digit"
        return f"{override!r}: a key consists of names joined by dots; {names_text}; see ultrabench configs"
    rule_text = "a value that contains brackets, commas, colons, spaces or quotes needs its own quotes"
    if re.fullmatch(_LIST_KEY, key):
        rule_text = "a part of a list that is more than letters, digits and ./+- needs its own quotes"
        value = value if value.startswith("[") else f"[{','.join(value.split())}]"
    if (plain_value := re.sub(r"""(["'])([\w./-]+)\1(?=\s*:)""", r"\2", value)) != value:
        rule_text = "on the command line, a name before a colon takes no quotes"
    mapping = re.sub(r"\[[^][]*\]", lambda bracketed: _quoted(bracketed[0]), plain_value)
    corrected = f"{key}={mapping if value.startswith('{') else _quoted(value)}"
    if corrected == override or not _is_readable(corrected):
        example = "TEXT" if key.lstrip("+") in ("kernel.files", "kernel.env") else "[VALUE, VALUE]"
        corrected = f"{key}={{NAME: {example}}}" if value.startswith("{") else ""
    override_text = repr(override) if "\n" in override else override
    remedy = shlex.quote(corrected) if corrected else f"it in a file, {_file_for(key)}"
    return f"{override_text}: {rule_text}; write {remedy}"


def _file_for(key: str) -> str:
    """Where a file of the user can have the setting of an override."""
    group = key.lstrip("+~").partition(".")[0]
    return f"./ultrabench/{group if group in CONFIG_GROUPS else 'sweep'}/NAME.yaml"


def _is_readable(override: str) -> bool:
    """Whether Hydra can parse an override."""
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    try:
        OverridesParser.create().parse_override(override)
    except HydraException:  # also if the key has a character that no key has
        return False
    return True


def _quoted(value: str) -> str:
    """The value in a form that Hydra reads: a list with quotes around its items that need them, else one text."""
    if not re.fullmatch(r"\[.*\]", value):
        return f'"{value.replace(chr(34), "")}"'
    return f"[{','.join(map(_quoted_element, _elements(value[1:-1])))}]"


def _quoted_element(element: str) -> str:
    is_quoted = re.fullmatch(r"""'[^']*'|"[^"]*"|\[.*\]|\{\w+:.*\}""", element)
    if is_quoted or re.fullmatch(r"[\w./+-]+", element, re.ASCII):
        return element
    return '"' + element.replace('"', '\\"') + '"'


def _elements(list_text: str) -> Iterator[str]:
    """The parts of a list between its commas, except those in brackets or quotes; empty ones are left out."""
    parts, depth, quote = [""], 0, ""
    for character in list_text:
        if quote or character in "\"'":
            quote = "" if quote == character else quote or character
        depth += (character in "[{(") - (character in "]})") if not quote else 0
        if character == "," and not quote and depth <= 0:
            parts.append("")
        else:
            parts[-1] += character
    return filter(None, map(str.strip, parts))


def _options_by_setting() -> dict[str, list[str]]:
    """Dotted key in the files of the package -> the options of its group that have it, such as launcher=slurm.

    Keys of the whole sweep come first, then those of the groups in their order; the sizes of models are left out.
    """
    package = search_path()[-1]
    sweep_keys = yaml.safe_load((package / "config.yaml").read_text()).keys() - {"defaults"}
    options: dict[str, list[str]] = {key: [] for key in (*sorted(sweep_keys), *CONFIG_GROUPS)}
    for group in CONFIG_GROUPS[:-1]:
        for path in sorted((package / group).glob("*.yaml")):
            values = yaml.safe_load(path.read_text()) or {}
            # The file of a sweep may set other groups, too; these do not count.
            for key in _dotted_keys({group: values.get(group, values)}):
                options.setdefault(key, []).append(f"{group}={path.stem}")
    return options | {f"sweep.{key}": [] for key in (*SWEEP_KEYS, "layouts") if f"sweep.{key}" not in options}


def _dotted_keys(values: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for key, value in values.items():
        yield prefix + key
        if isinstance(value, dict):
            yield from _dotted_keys(value, f"{prefix}{key}.")


_MOVED_SETTINGS: tuple[tuple[str, str], ...] = (
    (r"kernel\.recompute", "{key} is an axis of layouts; write sweep.recompute=[full]"),
    (r"(?:sweep\.)?dp", "{key} is not an axis; dp follows from the GPUs, dp = GPUs/(tp*pp*cp): change sweep.nodes, "
     "sweep.tp, sweep.pp or sweep.cp"),
    (r"(?:.*\.)?(?:gpus|num_gpus|ngpus|nproc_per_node)",
     "{key} is not a setting; GPUs = nodes * hardware.gpus_per_node: give sweep.nodes=[1,2]"),
    (r"(?:launcher\.|cluster\.)?(?P<option>reservation|constraint)",
     "{key} is an option of sbatch; write +launcher.sbatch.{option}=VALUE, or "
     "sbatch: {{NAME: VALUE}} in the file of a cluster"),
)  # fmt: skip
"""Pattern of a key that is a setting elsewhere -> what it is and what to write."""
_FILE_ONLY_SETTINGS: tuple[tuple[str, str], ...] = (
    (r"launcher\.sbatch\b.*", "{key}: a new entry needs a leading +; write +launcher.sbatch.NAME=VALUE"),
    (rf"model\b.*|(?!(?:{_GROUP_NAMES})\b).*(?:hidden_|(?:\b|_)layers|(?:\b|_)heads|ffn_|vocab_|intermediate_).*",
     "unknown override '{key}'; the sizes of a model are in its file: write ultrabench/model/NAME.yaml and give "
     "model=NAME, or give model=PATH of a config.json"),
)  # fmt: skip
"""Pattern of a key that only files or added overrides set -> what to write."""
_FOREIGN_NAMES = {
    r"micro_?batch|local_?batch": "sweep.mbs", r"batch": "sweep.gbs", r"schedule": "sweep.pp_schedule",
    r"tensor|^tp_": "sweep.tp", r"pipeline|^pp_": "sweep.pp", r"context_p|^cp_": "sweep.cp",
    r"data_?parallel|world_size|^dp_": "sweep.dp", r"accum": "sweep.gas", r"zero|fsdp": "sweep.zero_stage",
    r"seq|context_len|block_size": "sweep.seq_len", r"recompute|activation_?checkpoint": "sweep.recompute",
    r"dtype": "kernel.precision", r"iters|steps": "measure.max_steps", r"nodes": "sweep.nodes",
}  # fmt: skip
"""Pattern in the name of a setting of Megatron-LM, torchtitan or DeepSpeed -> the same setting here."""


def moved_advice(key: str, patterns_and_advice: Sequence[tuple[str, str]] = _MOVED_SETTINGS) -> str | None:
    """One line for a `key` that is a setting elsewhere: an option of sbatch or an axis; None for others."""
    matches = ((re.fullmatch(pattern, str(key)), sentence) for pattern, sentence in patterns_and_advice)
    return next((sentence.format(key=key, **match.groupdict()) for match, sentence in matches if match), None)


def _absent_setting(key: str, values: Mapping[str, str]) -> str | None:
    """One line for a setting that the chosen option of a group may have, but that its file does not give; None for
    others. The line has the override with the + that Hydra needs to add it.

    Args:
        values: key -> value of all overrides.
    """
    group, _, name = key.partition(".")
    name, _, entry = name.partition(".")
    types: Mapping[str, Any] = {
        "kernel": field_types(KernelConfig),
        "hardware": field_types(Hardware),
        "cluster": dict.fromkeys(CLUSTER_KEYS),
    }.get(group, {})
    if name not in types or name == "name" or (entry and get_origin(types[name]) is not dict):
        return None
    is_command = group != "kernel" or not kind_by_name(values.get("kernel", EMBEDDED)).forks
    if not is_command and name != "env":
        return None
    return f"{key} is not set by the chosen {group}; add it: {_override_text(f'+{key}', values.get(key))}"


_KNOBS = "kernel.knobs."
"""How the settings begin that say what a knob is."""


def unknown_override(key: str, value: object = None) -> str:
    """One line for an override whose key does not exist; it names the setting that was probably meant.

    Args:
        value: the value that was given, which is repeated in the form that the setting needs.
    """
    if advice := moved_advice(key, (*_MOVED_SETTINGS, *_FILE_ONLY_SETTINGS)):
        return advice
    settings, group = _options_by_setting(), key.partition(".")[0]
    key_parts = key.split(".", 2)
    if len(key_parts) == 3 and group == "sweep" and (nearest := nearest_name(key_parts[1], EXAMPLES, 0.6)):
        probable_override = _override_text(f"+sweep.{nearest}.{key_parts[2]}", value)
        return f"unknown override {key!r}; did you mean {probable_override}?"
    if key == LAYOUTS_SETTING:
        return f"{key} is not a setting of the chosen sweep, which combines values of axes; {LIST_LAYOUTS_REMEDY}"
    if key in settings:
        remedy = f"it: {_override_text(f'+{key}', value)}" if group == "sweep" else " or ".join(settings[key])
        return f"{key} is not a setting of the chosen {group}; add {remedy}"
    if (probable_key := _probable_setting(key, settings)) is None:
        group_settings = [name for name in settings if name.startswith(f"{group}.")]
        return unknown_name("override", key, group_settings or [name for name in settings if "." not in name])
    options = settings.get(probable_key, []) if probable_key.startswith(("kernel.", "launcher.")) else []
    if group != "kernel" and probable_key.startswith(_KNOBS):  # a sweep lists the values of a knob
        probable_key = f"+sweep.{FLAGS}.{probable_key.removeprefix(_KNOBS)}"
    hint = f", with {options[0]}" if len(options) == 1 else ""
    return (
        f"unknown override {key!r}; "
        f"{moved_advice(probable_key) or f'did you mean {_override_text(probable_key, value)}{hint}?'}"
    )


def _axis_beside_layouts(key: str, values: Mapping[str, str]) -> str | None:
    """One line for an axis of a sweep that lists layouts in place of axes; None for other settings and sweeps.

    Args:
        values: key -> value of all overrides.
    """
    axis, path = key.removeprefix("sweep."), files("sweep").get(values.get("sweep", ""))
    if axis not in AXES[1:] or path is None or "layouts" not in (read_yaml(path).get("sweep") or {}):
        return None
    listed_values = _elements(as_hydra_list(values[key])[1:-1])
    layouts_text = ", ".join(f"{{{axis}: {value}}}" for value in listed_values)
    problem = f"{key}: sweep={values['sweep']} lists layouts in place of axes"
    return f"{problem}; to run others, write 'sweep.layouts=[{layouts_text or f'{{{axis}: VALUE}}'}]'"


def _probable_setting(key: str, settings: Mapping[str, Any]) -> str | None:
    """The setting that an unknown key probably means; None where no setting is similar."""
    group, last_part = key.partition(".")[0], key.rpartition(".")[2]
    last_parts = {name: name.rpartition(".")[2] for name in settings}
    # A unit may be missing, such as that of launcher.time_minutes.
    with_unit = [name for name in settings if name.startswith(f"launcher.{last_part}_")]
    foreign_names = [name for pattern, name in _FOREIGN_NAMES.items() if re.search(pattern, key.lower())]
    nearest = nearest_name(key, last_parts.values(), 0.75)
    candidates = (
        [name for name in settings if last_parts[name] == last_part],
        [name for name in settings if name.startswith(f"{key}_")],
        with_unit if len(with_unit) == 1 and key in (last_part, f"launcher.{last_part}") else [],
        foreign_names[:1] if group not in CONFIG_GROUPS else [],
        [name for name in settings if last_parts[name] == nearest],
    )
    names = next(filter(None, candidates), [])
    return min(names, key=lambda name: (name.partition(".")[0] != group, name.count(".")), default=None)


def _override_text(name: str, value: object) -> str:
    """The override that gives `name` this value, as a user can type it; only the name for a mapping or no value."""
    if value is None or isinstance(value, dict):
        return name
    override = f"{name}={as_hydra_list(str(value)) if re.fullmatch(_LIST_KEY, name) else value}"
    return override if re.fullmatch(r"[\w.,=\[\]/:+@%-]*", override) else shlex.quote(override)


def _require_global(path: Path) -> None:
    """Raises ConfigError when the file of a sweep sets whole groups but lacks `# @package _global_`."""
    values = {} if "# @package _global_" in read_text(path) else read_yaml(path)
    nested = sorted({*CONFIG_GROUPS, "name", "repeats"}.intersection(values))
    if isinstance(values, dict) and nested:
        raise ConfigError(f"{path} sets {nested[0]}: and needs this first line: # @package _global_")


def _require_readable(overrides: Sequence[str], sweep: Path | None) -> None:
    """Raises ConfigError for a file of the user that cannot be read, if an override or the file of
    the sweep names it.
    """
    words = " ".join((*overrides, read_text(sweep) if sweep else ""))
    for folder in search_path()[:-1]:
        for path in filter(Path.is_file, folder.rglob("*.yaml")):
            if re.search(rf"\b{re.escape(path.stem)}\b", words):
                require_few_values(path)


def _usual_sweep(options: Mapping[str, str]) -> list[str]:
    """The override that chooses `sweep=layouts` for hardware whose ranks share no host, where no sweep is given."""
    path = files("hardware").get(options.get("hardware", ""))
    if path is None or "sweep" in options or not isinstance(values := read_yaml(path), dict):
        return []
    device_kind = DEVICE_KINDS.get(str(values.get("device")))
    return [] if device_kind and device_kind.shares_host else ["sweep=layouts"]


def _as_models(override: str) -> str:
    """The override `sweep.models=[NAME]` for `model=NAME`; other overrides as they are."""
    key, _, value = override.partition("=")
    if key.lstrip("+") != "model":
        return override
    return f"sweep.models=[{value}]" if '"' in value or "'" in value else f'sweep.models=["{value}"]'


def compose_tree(overrides: Sequence[str]) -> dict[str, Any]:
    """The composed configuration as plain values; `names` holds the chosen option of each group.

    `model=NAME` means `sweep.models=[NAME]`. Without `sweep=NAME`, hardware that is no CPU gets `layouts` instead of
    the sweep of config.yaml.

    Raises:
        ConfigError: an override cannot be used.
    """
    require_once(overrides)
    _require_usable(overrides)
    options = parts_of(overrides)
    if path := files("sweep").get(options.get("sweep", "")):
        _require_global(path)
    _require_readable(overrides, path)
    hydra_overrides = [*_usual_sweep(options), *map(_as_models, overrides)]
    return _composed(hydra_overrides)


def _composed(overrides: Sequence[str]) -> dict[str, Any]:
    """What `compose_tree` returns, of overrides that Hydra understands."""
    # Importing Hydra takes longer than answering most commands, which only read what was composed.
    from hydra import compose, initialize_config_dir
    from hydra.core.global_hydra import GlobalHydra
    from hydra.errors import HydraException
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    GlobalHydra.instance().clear()
    _register_user_folders()
    try:
        with initialize_config_dir(config_dir=str(search_path()[-1]), version_base="1.3"):
            composed = compose("config", overrides=[*overrides], return_hydra_config=True)
            choices = dict(composed.hydra.runtime.choices)
            OmegaConf.set_struct(composed, False)
            composed.pop("hydra")
            tree = OmegaConf.to_container(composed, resolve=True, throw_on_missing=True)
    except (HydraException, OmegaConfBaseException, yaml.YAMLError, ValueError) as error:
        raise _error_of_hydra(error, overrides) from error
    assert isinstance(tree, dict)
    return {**tree, "names": {group: choices[group] for group in CONFIG_GROUPS if group in choices}}


@functools.cache
def _register_user_folders() -> None:
    """Makes Hydra search the user's folders before the folder of the package."""
    from hydra.core.config_search_path import ConfigSearchPath
    from hydra.core.plugins import Plugins
    from hydra.plugins.search_path_plugin import SearchPathPlugin

    class UserFolders(SearchPathPlugin):
        """Puts the user's folders in front, in the order of `search_path`."""

        def manipulate_search_path(self, hydras: ConfigSearchPath) -> None:
            for folder in search_path()[-2::-1]:
                hydras.prepend("user", f"file://{folder}")

    Plugins.instance().register(UserFolders)
