"""Reads the options that a sweep varies beside layouts: workload, kernel, variables, flags, words,
container, python.
"""

import math
import operator
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Any

from msgspec import Meta

from ultrabench.allowed import Line, Size
from ultrabench.errors import SETTING, ConfigError, nearest_name, require_known
from ultrabench.hardware import Hardware
from ultrabench.kernel_config import PRECISIONS_16_BIT, RANK_VARIABLES, KernelConfig, auto_attention
from ultrabench.layout import AUTO, AXES, TEXT_AXES, choice_text
from ultrabench.model_shape import ModelShape
from ultrabench.placeholders import command_text, names_in
from ultrabench.record import field_types, value_from
from ultrabench.run import FILES_WORD, PROCESS_WORDS, AttemptKey
from ultrabench.store.kernel_secrets import is_secret
from ultrabench.sweep.config.knobs import read_values, require_flags
from ultrabench.variant import (
    CELL_OPTIONS,
    ENV,
    FLAGS,
    JOB_OPTIONS,
    KERNEL_OPTIONS,
    WORDS,
    Value,
    Variant,
    options_in_group,
)

EXAMPLES = {
    ENV: "{NCCL_ALGO: [null, Ring]}", FLAGS: "{overlap: {on: [--overlap], off: []}}", WORDS: "{etp: [1, 8]}",
}  # fmt: skip
"""Group of options -> what a sweep may list there."""
OPTION_GROUPS = (*EXAMPLES,)
SWEEP_KEYS = (*CELL_OPTIONS[:2], *OPTION_GROUPS, "rules", *JOB_OPTIONS)
"""Keys of `sweep` that list values of options; those of precision, compile and attention are keys of `kernel`."""
NAME_PATTERN = r"[A-Za-z_]\w*"
NAME_RULE = "a name consists of letters, digits and '_' and does not start with a digit"
"""What NAME allows the names of options that a user chooses."""
_RULE = re.compile(r"(?P<left>[\w* ]+?) +(?P<relation>divides|<=|>=|==) +(?P<right>[\w* ]+)")
_RELATIONS: dict[str, tuple[Callable[[float, float], bool], str]] = {
    "divides": (lambda a, b: a != 0 and b % a == 0, "does not divide"),
    "<=": (operator.le, "is more than"), ">=": (operator.ge, "is less than"), "==": (operator.eq, "is not"),
}  # fmt: skip
"""Relation of a rule -> whether it holds, and how the reason of a rejection says that it does not."""
_OptionValue = Annotated[
    str | int | float | bool | None, Meta(description="a text, a number, true, false or null")
]
_ArgumentsByFlag = dict[str, dict[str, tuple[str, ...]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class WordRule:
    """A rule between words, such as `etp divides tp`; layouts that break it are rejected."""

    text: str
    left: tuple[str, ...]
    relation: str
    right: tuple[str, ...]

    def broken(self, values: Mapping[str, Any]) -> str | None:
        """Why the values of a run break the rule; None where they do not."""
        factors = ((float(values.get(name, name)) for name in side) for side in (self.left, self.right))
        left_product, right_product = map(math.prod, factors)
        relation_holds, negation = _RELATIONS[self.relation]
        if relation_holds(left_product, right_product):
            return None
        return f"{'*'.join(self.left)}={left_product:g} {negation} {'*'.join(self.right)}={right_product:g}"

    @property
    def names(self) -> tuple[str, ...]:
        """The words that the rule compares."""
        return tuple(name for name in (*self.left, *self.right) if not name.isdecimal())


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What a sweep varies beside layouts."""

    values: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    """Option -> its values; seq_len, gbs and precision are always there, others where the sweep lists some."""
    arguments: Mapping[str, Mapping[str, tuple[str, ...]]] = field(default_factory=dict)
    """Flag that the sweep maps to arguments -> each of its values -> the arguments that it adds to the command;
    those of knobs are in `kernel.flags`."""
    rules: tuple[WordRule, ...] = ()

    @property
    def of_variants(self) -> dict[str, tuple[Any, ...]]:
        """The options whose values are in the variant of a run."""
        return {name: values for name, values in self.values.items() if name not in CELL_OPTIONS}

    @property
    def first_variant(self) -> Variant:
        """The first value of each option, which control runs have."""
        return {name: values[0] for name, values in self.of_variants.items()}

    def arguments_of(self, variant: Variant) -> tuple[str, ...]:
        """The arguments that the flags of a variant add to the command."""
        flags = options_in_group(variant, FLAGS)
        arguments = (
            self.arguments[name][str(value)] for name, value in flags.items() if name in self.arguments
        )
        return tuple(word for words in arguments for word in words)


def values_in(value: Any) -> list[Any]:
    """The values of a setting that takes one value or a list of values."""
    return list(value) if isinstance(value, list | tuple) else [value]


def read_list(values: Any, value_type: Any, setting: str) -> tuple[Any, ...]:
    """What `values_in` returns, each value turned into this type.

    Raises:
        ConfigError: the list is empty, or its type forbids a value.
    """
    if value_list := values_in(values):
        return tuple(value_from(value_type, value, setting) for value in value_list)
    raise ConfigError(f"{SETTING} is empty; list at least one value", setting=setting)


def read_options(
    sweep: Mapping[str, Any],
    kernel_options: Mapping[str, tuple[Value, ...]],
    kernel: KernelConfig,
    hardware: Hardware,
) -> Options:
    """The options of a composed configuration.

    Args:
        sweep: the group `sweep`.
        kernel_options: precision, compile and attention -> their values.
        kernel: the kernel with the first of these values.

    Raises:
        ConfigError: an option has no values or one that is not allowed, or the kernel cannot have it.
    """
    values: dict[str, tuple[Value, ...]] = {
        name: tuple(dict.fromkeys(read_list(sweep[name], Size, f"sweep.{name}"))) for name in CELL_OPTIONS[:2]
    }
    values |= {"precision": kernel_options["precision"]}
    values |= {name: kernel_options[name] for name in KERNEL_OPTIONS if len(kernel_options[name]) > 1}
    for name, listed in _listed_by_name(sweep, ENV, kernel).items():
        listed_values = _option_values(listed, f"{ENV}.{name}", to_text=_in_environment)
        values[f"{ENV}.{name}"] = tuple(None if v is None else _in_environment(v) for v in listed_values)
    require_flags(kernel, dict.fromkeys((*_words_of_runs(), FILES_WORD)))
    listed_by_flag = _listed_by_name(sweep, FLAGS, kernel)
    values_by_knob = {
        name: read_values(kernel, name, values_in(listed))
        for name, listed in listed_by_flag.items()
        if name in kernel.knobs
    }
    arguments = read_flags(
        {name: listed for name, listed in listed_by_flag.items() if name not in values_by_knob},
        knobs=kernel.knobs,
    )
    for name in listed_by_flag:
        values[f"{FLAGS}.{name}"] = values_by_knob.get(name) or tuple(arguments[name])
    rules = tuple(map(_word_rule, values_in(sweep.get("rules") or [])))
    listed_by_word = _listed_by_name(sweep, WORDS, kernel)
    words = {name: _option_values(listed, f"{WORDS}.{name}") for name, listed in listed_by_word.items()}
    if text_knob := next((name for name in words if name in kernel.knobs), None):
        fact = f"sweep.{WORDS}.{text_knob}: {text_knob} is a knob of kernel {kernel.name}"
        raise ConfigError(fact, f"list it in sweep.{FLAGS}", setting=f"sweep.{WORDS}.{text_knob}")
    _require_used(words, arguments, kernel)
    values |= {f"{WORDS}.{name}": listed for name, listed in words.items()}
    job_options = [name for name in JOB_OPTIONS if sweep.get(name) is not None]
    values |= {name: _option_values(sweep[name], name, Line) for name in job_options}
    number_words = [name for name, listed in words.items() if all(isinstance(v, int | float) for v in listed)]
    for rule in rules:
        if text_word := next((name for name in rule.names if name in {*words} - {*number_words}), None):
            problem = (
                f"sweep.rules {rule.text!r} compares numbers; sweep.words.{text_word}={[*words[text_word]]}"
            )
            remedy = "list only numbers there, or leave the rule out"
            raise ConfigError(problem, remedy, setting="sweep.rules")
        what = f"numeric word in sweep.rules {rule.text!r}:"
        require_known(what, (*number_words, *_numeric_words_of_runs()), *rule.names, setting="sweep.rules")
    if kernel.trains_itself:
        _require_different_attention(kernel_options, hardware)
    for precision in kernel_options["precision"]:
        replace(kernel, precision=str(precision))  # refuses one that the kernel does not have
        hardware.peak(str(precision), 1, None, 1)  # refuses a precision without a rate
    return Options(values=values, arguments=arguments, rules=rules)


def _option_values(
    values: Any, name: str, value_type: Any = _OptionValue, to_text: Callable[[Value], str] = command_text
) -> tuple[Value, ...]:
    """The values of an option that a program gets as texts, which `to_text` makes of them.

    Raises:
        ConfigError: two of them are the same for the program.
    """
    option_values: tuple[Value, ...] = read_list(values, value_type, f"sweep.{name}")
    received = (("null" if v is None else repr(v), v if v is None else to_text(v)) for v in option_values)
    _require_different(f"sweep.{name}", received)
    return option_values


def _require_different(setting: str, received_by_value: Iterable[tuple[str, object]]) -> None:
    """Raises ConfigError if a program receives the same for two values, which would be one run twice."""
    value_by_received: dict[object, str] = {}
    for value, received in received_by_value:
        if received in value_by_received:
            fact = f"{setting}: {value_by_received[received]} and {value} are the same for the program"
            raise ConfigError(fact, "leave one out, or the same run would be measured twice", setting=setting)
        value_by_received[received] = value


def _require_different_attention(kernel_options: Mapping[str, tuple[Value, ...]], hardware: Hardware) -> None:
    """Raises ConfigError if auto stands beside what it becomes on the hardware in one of the precisions."""
    for precision in kernel_options["precision"]:
        meaning = auto_attention(hardware.device, precision in PRECISIONS_16_BIT, hardware.prefers_cudnn)
        text_by_value = {str(v): meaning if v == AUTO else v for v in kernel_options["attention"]}
        _require_different("kernel.attention", text_by_value.items())


def _listed_by_name(sweep: Mapping[str, Any], group: str, kernel: KernelConfig) -> dict[str, Any]:
    """NAME -> values of a group of options whose names a user chooses.

    Raises:
        ConfigError: a name cannot be used here, or the kernel takes no such option or has it already.
    """
    mapping = sweep.get(group) or {}
    if not isinstance(mapping, dict):
        problem = f"sweep.{group}={mapping!r} is not a mapping"
        raise ConfigError(problem, f"write one, such as {EXAMPLES[group]}", setting=f"sweep.{group}")
    is_variable, knobs = group == ENV, kernel.knobs if group == FLAGS else {}
    for name, listed in ((str(key), listed) for key, listed in mapping.items()):
        setting = f"sweep.{group}.{name}"
        if not re.fullmatch(NAME_PATTERN, name):
            raise ConfigError(f"{setting}; {NAME_RULE}", setting=f"sweep.{group}")
        is_foreign = not is_variable and kernel.forks
        refusals = [
            (is_secret(name), f"{setting} looks like a secret, and results show swept values; use kernel.env"),
            (is_foreign, f"{setting} with kernel={kernel.name}; only a command takes arguments: use kernel=command"),
            (is_variable and name in RANK_VARIABLES, f"{setting}: ultrabench sets {name} for each rank; leave it out"),
            (name in knobs and isinstance(listed, dict),
             f"{setting} maps values to arguments, as kernel {kernel.name} does; list values instead, such as "
             f"+{setting}=[{','.join(kernel.knob_choices(name)[:2])}]"),
            (is_variable and name in kernel.env,
             f"{setting} and kernel.env.{name} are both set; give only one of them"),
            (not is_variable and name in (*_words_of_runs(), *([FILES_WORD] if kernel.files else [])),
             f"{setting}: {name} is already a word of every run; choose another name"),
        ]  # fmt: skip
        if refusal := next((line for applies, line in refusals if applies), None):
            raise ConfigError(refusal, setting=setting)
    return {str(name): values for name, values in mapping.items()}


def _in_environment(value: Value) -> str:
    """A value as a program gets it: true and false become 1 and 0, as most variables have it."""
    return str(int(value)) if isinstance(value, bool) else str(value)


def read_flags(flags: Mapping[str, Any], knobs: Collection[str] = ()) -> _ArgumentsByFlag:
    """Flag -> each of its values -> its arguments, of those in `sweep.flags` that are no knobs of the kernel.

    Args:
        knobs: the knobs of the kernel, one of which may be meant by a list of values.

    Raises:
        ConfigError: a flag has no values, or two with the same arguments.
    """
    arguments_by_flag: _ArgumentsByFlag = {}
    for name, arguments_by_value in flags.items():
        setting = f"sweep.{FLAGS}.{name}"
        if knobs and not isinstance(arguments_by_value, dict):
            require_known(f"knob in sweep.{FLAGS}:", knobs, name, setting=setting)
        if not isinstance(arguments_by_value, dict) or not arguments_by_value:
            remedy = f"write {{VALUE: [ARGUMENT, ...]}}, such as sweep.{FLAGS}: {EXAMPLES[FLAGS]}"
            problem = f"{setting}={arguments_by_value!r} does not map values to arguments"
            raise ConfigError(problem, remedy, setting=setting)
        arguments_by_text = {choice_text(value): arguments for value, arguments in arguments_by_value.items()}
        arguments_by_flag[name] = value_from(dict[str, tuple[str, ...]], arguments_by_text, setting)
        _require_different(setting, arguments_by_flag[name].items())
    return arguments_by_flag


def _require_used(words: Mapping[str, Any], arguments: _ArgumentsByFlag, kernel: KernelConfig) -> None:
    """Raises ConfigError for a word that the command uses nowhere."""
    argument_tables = (*kernel.flags.values(), *arguments.values())
    flag_arguments = (part for table in argument_tables for parts in table.values() for part in parts)
    command_parts = [*kernel.command, *flag_arguments]
    names_in_braces = [name for part in command_parts for name in re.findall(r"\{([^{}]*)\}", part)]
    calculated_names = {name for part in (*command_parts, *kernel.files.values()) for name in names_in(part)}
    for name in (name for name in words if name not in {*names_in_braces, *calculated_names}):
        known_names = (*words, *_words_of_runs(), *AttemptKey._fields, "steps", FILES_WORD, *PROCESS_WORDS)
        unknown_words = [f"{{{other}}}" for other in names_in_braces if other not in known_names]
        like = nearest_name(f"{{{name}}}", unknown_words, 0.55)
        reason = f"the command has {like} instead" if like else f"the command does not contain {{{name}}}"
        problem, setting = f"sweep.{WORDS}.{name} has no effect: {reason}", f"sweep.{WORDS}.{name}"
        keys_text = "kernel.command or kernel.files" if kernel.files else "kernel.command"
        raise ConfigError(problem, f"use {{{name}}} in {keys_text}", setting=setting)


def _words_of_runs() -> tuple[str, ...]:
    """The words that every run has."""
    return (*AXES, *field_types(ModelShape), *CELL_OPTIONS, "nodes", "gpus_per_node", "world_size")


def _numeric_words_of_runs() -> tuple[str, ...]:
    """Those of them that are numbers in every run."""
    shape_fields = field_types(ModelShape).items()
    sizes = [name for name, kind in shape_fields if getattr(kind, "__origin__", kind) is int]
    layout_axes = [name for name in AXES if name not in TEXT_AXES]
    return (*layout_axes, *sizes, *CELL_OPTIONS[:2], "nodes", "gpus_per_node", "world_size")


def _word_rule(text: Any) -> WordRule:
    match = _RULE.fullmatch(str(text).strip())
    if match is None:
        rule = "write NAME divides NAME, or use <=, >= or ==; a product is NAME*NAME"
        raise ConfigError(f"sweep.rules: {text!r}; {rule}", setting="sweep.rules")
    sides = {side: tuple(part.strip() for part in match[side].split("*")) for side in ("left", "right")}
    return WordRule(text=str(text), relation=match["relation"], **sides)
