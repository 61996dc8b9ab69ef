"""Reads the knobs that the file of a training program declares, and the values of them that a sweep lists."""

from collections.abc import Mapping
from typing import Any

from ultrabench.errors import SETTING, ConfigError, require_known
from ultrabench.kernel_config import ANY, ROUTING, KernelConfig
from ultrabench.layout import AXES, Layout, choice_text
from ultrabench.model_shape import ModelShape
from ultrabench.model_words import WORDS_OF_MODELS
from ultrabench.record import field_types
from ultrabench.tensor_parallel import KV_COPIES_WORD
from ultrabench.variant import FLAGS, Value

OTHER_WORDS = ("precision", ROUTING, KV_COPIES_WORD, *WORDS_OF_MODELS)
"""Words that kernel.flags and kernel.supports may name beside knobs, axes and fields of the model."""


def with_texts(kernel: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a kernel with the values of its knobs as texts; YAML reads the words on and off as booleans."""
    settings = dict(kernel)
    knobs = kernel.get("knobs") or {}
    if isinstance(tables := kernel.get("flags"), dict) and isinstance(knobs, dict):
        settings["flags"] = {
            name: {choice_text(value): arguments for value, arguments in table.items()}
            if name in knobs and isinstance(table, dict)
            else table
            for name, table in tables.items()
        }
    if isinstance(spans := kernel.get("spans"), dict):
        settings["spans"] = {
            degree: _with_value_texts(limit) if isinstance(limit, dict) else limit
            for degree, limit in spans.items()
        }
    if isinstance(values := kernel.get("knob_values"), dict):
        settings["knob_values"] = {
            knob: choice_text(value) for knob, value in values.items() if value is not None
        }
    return settings


def with_flag_texts(profile: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a profile with the values of knobs as texts, as `with_texts` makes them."""
    tables = {key: profile[key] for key in ("flags", "flag_runs") if isinstance(profile.get(key), dict)}
    return {**profile} | {key: _with_value_texts(table) for key, table in tables.items()}


def _with_value_texts(table: Mapping[str, Any]) -> dict[str, Any]:
    """Knob -> its value as text -> what the table has for it; other content of the table stays as it is."""
    return {
        knob: {choice_text(value): content for value, content in by_value.items()}
        if isinstance(by_value, dict)
        else by_value
        for knob, by_value in table.items()
    }


def require_flags(kernel: KernelConfig, reserved_names: Mapping[str, object]) -> None:
    """Raises for a name or a value in the tables of a kernel that means nothing.

    Args:
        reserved_names: the words of every run, which no knob may have.

    Raises:
        ConfigError: a table is of no knob, axis or field of the model, a knob has no table or a name of another
            word, `knob_values` or `spans` has an unknown knob or value, or `flags_at_end` an unknown name.
    """
    for option, knobs in (("flags", kernel.knobs), ("supports", {})):
        for name in getattr(kernel, option):
            is_attribute = hasattr(Layout, name) or hasattr(ModelShape, name)
            if name not in knobs and name not in OTHER_WORDS and not is_attribute:
                known_names = (*knobs, *AXES, *field_types(ModelShape), *OTHER_WORDS)
                kind = f"{'knob, axis' if option == 'flags' else 'axis'} or field of the model in kernel.{option}:"
                require_known(kind, known_names, name, first=knobs, setting=f"kernel.{option}")
    require_known(
        "name of kernel.flags in kernel.flags_at_end:",
        kernel.flags,
        *kernel.flags_at_end,
        setting="kernel.flags_at_end",
    )
    for knob, meaning in kernel.knobs.items():
        setting = f"kernel.knobs.{knob}"
        if knob in reserved_names:
            fact = f"{setting}: {knob} is already a word of every run"
            raise ConfigError(fact, "choose another name", setting=setting)
        if not meaning.strip():
            raise ConfigError(f"{setting} is empty; say in words what it sets", setting=setting)
        if not kernel.flags.get(knob):
            fact = f"{setting} has no values"
            raise ConfigError(
                fact, f"map them to arguments: kernel.flags.{knob}={{VALUE: [ARGUMENT]}}", setting
            )
        if not kernel.knob_choices(knob) and knob not in kernel.knob_values:
            fact = f"{setting} has only the value '*', so that no usual value is known"
            raise ConfigError(fact, f"give one: kernel.knob_values.{knob}=VALUE", setting)
    for degree, condition, _ in kernel.span_limits():
        if condition:
            knob, value = condition
            setting = f"kernel.spans.{degree}.{knob}"
            require_known(f"knob in kernel.spans.{degree}:", kernel.knobs, knob, setting=setting)
            _require_value(kernel, knob, value, setting)
    for knob, value in kernel.knob_values.items():
        setting = f"kernel.knob_values.{knob}"
        require_known("knob in kernel.knob_values:", kernel.knobs, knob, setting="kernel.knob_values")
        _require_value(kernel, knob, value, setting)


def read_values(kernel: KernelConfig, knob: str, listed: list[Any]) -> tuple[Value, ...]:
    """The values of a knob that a sweep lists; numbers stay numbers.

    Raises:
        ConfigError: the knob or a value is unknown, or a value is listed twice.
    """
    setting = f"sweep.{FLAGS}.{knob}"
    values = tuple(
        value if isinstance(value, int | float) and not isinstance(value, bool) else choice_text(value)
        for value in listed
    )
    if not values:
        raise ConfigError(f"{SETTING} is empty; list at least one value", setting=setting)
    for value in values:
        _require_value(kernel, knob, value, setting)
        if [*map(str, values)].count(str(value)) > 1:
            raise ConfigError(f"{SETTING} lists {value} twice", "leave one out", setting=setting)
    return values


def _require_value(kernel: KernelConfig, knob: str, value: Value, setting: str) -> None:
    """Raises ConfigError for a value that a knob cannot have: an unlisted one, or one that is no part of an argument
    where the knob takes any value.
    """
    choices, text = kernel.knob_choices(knob), str(value)
    if text in choices:
        return
    if ANY not in kernel.flags[knob]:
        require_known(f"value of {SETTING}:", choices, text, setting=setting)
    problem = None
    if not text.strip():
        problem = "is empty"
    elif len(text.split()) > 1 or text != text.strip():
        problem = "has spaces"
    elif text.startswith("-") and isinstance(value, str) and not _is_number(text):
        problem = "would be an option of its own"
    if problem:
        fact = f"{SETTING}={text!r} {problem}"
        remedy = f"give a number or one word, which becomes part of an argument for {knob}"
        raise ConfigError(fact, remedy, setting=setting)


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
