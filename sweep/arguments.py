"""Reads a layout from NAME=VALUE arguments, as the commands `kernel`, `predict` and `plot` take them."""

import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ultrabench.allowed import Size
from ultrabench.errors import ConfigError, LayoutError, counted, require_known, require_once
from ultrabench.hardware import Hardware
from ultrabench.kernel_config import KernelConfig
from ultrabench.layout import (
    AXES,
    BATCH,
    DEGREES,
    FOLLOWING,
    OTHER_DEGREES,
    TEXT_AXES,
    Layout,
    default_schedule,
    default_virtual_stages,
    model_parallel_degree,
    value_text,
)
from ultrabench.record import value_from
from ultrabench.routing import override_value
from ultrabench.run import RunSpec, Workload
from ultrabench.sweep.config.files import files
from ultrabench.sweep.config.load import kernel_settings, load_config
from ultrabench.sweep.config.sweep_config import SweepConfig
from ultrabench.sweep.grid import broken_rules, shards_of
from ultrabench.sweep.refusals import refusal

KERNEL_SETTINGS = ("precision", "compile", "routing")
"""Arguments that are settings of the kernel; None is what hardware and kernel usually have."""
TEXT_ARGUMENTS = TEXT_AXES | {"attention", "model", "hardware", *KERNEL_SETTINGS, "kernel", "profile"}
"""Arguments whose value is a text; the value of any other is a whole number."""
_SHARD_WORDS = ("dp_shard=all", "dp_shard=node")
"""Arguments with a text in place of a number; `layout_of` makes the number."""

PREDICTION_DEFAULTS: dict[str, Any] = {
    "model": "llama3-8b", "hardware": "h100x8", "kernel": "embedded", "profile": None, "nodes": 1, "seq_len": 4096,
    **dict.fromkeys(KERNEL_SETTINGS),
}  # fmt: skip
"""The arguments of a prediction beside those of layouts, with their usual values; a dry run has some of them."""

_ADVICE_BY_NAME = {
    "gbs": "the batch follows from gbs = dp*mbs*gas; give mbs and gas",
    "nodes": "the check runs dp*tp*pp*cp processes on this machine; give these degrees instead",
    "precision": "this is an option; write --precision bf16",
    "device": "this is an option; write --device cuda",
    "compile": "this is an option; write --compile",
    "attention": "a dry run uses the default attention; leave it out",
}
"""Name that one of the commands does not take -> what to do instead."""


def read_arguments(
    arguments: Sequence[str], other_names: Collection[str], example: str, knobs: Collection[str] = ()
) -> dict[str, Any]:
    """Name -> value of all arguments; a name is an axis of a layout, one of `other_names`, or a knob.

    Raises:
        ConfigError: an argument is not NAME=VALUE, its name is unknown or given twice, or its value is not an
            integer.
    """
    require_once(arguments)
    known_names = (*AXES, *other_names, *knobs)
    values: dict[str, Any] = {}
    for argument in arguments:
        name, equals_sign, value = argument.partition("=")
        if not equals_sign:
            raise ConfigError(f"{argument!r} is not NAME=VALUE; write, for example, {example}")
        if name in _ADVICE_BY_NAME and name not in known_names:
            raise ConfigError(f"{argument}: {_ADVICE_BY_NAME[name]}")
        require_known("argument", known_names, name)
        try:
            value = value_text(name, value) if name in TEXT_AXES else value
            is_text = name in TEXT_ARGUMENTS or name in knobs or argument in _SHARD_WORDS
            values[name] = value if is_text else _integer(value)
        except ValueError:
            problem = f"{name}={value!r} is not an integer"
            raise ConfigError(f"{problem}; give one layout, such as {name}=2") from None
    return values


def _integer(text: str) -> int:
    """The integer that a text such as `8` or `1e3` gives; raises ValueError for others."""
    with contextlib.suppress(ValueError):
        return int(text)
    number = float(text)
    if not number.is_integer():
        raise ValueError(text)
    return int(number)


def layout_of(values: Mapping[str, Any], gpus_per_node: int = 2**30) -> Layout:
    """The layout that the axes among `values` give, by default on one node;
    schedule and stages have the usual defaults.
    """
    axes = {axis: values[axis] for axis in AXES if axis in values}
    schedule = axes.setdefault("pp_schedule", default_schedule(axes.get("pp", 1), axes.get("gas", 1)))
    shard_value = axes.pop("dp_shard", "all")
    layout = Layout(**{"virtual_stages": default_virtual_stages(schedule)} | axes)
    num_copies, ranks_in_node = layout.dp * layout.cp, max(1, gpus_per_node // layout.tp)
    return replace(layout, dp_shard=shards_of(shard_value, num_copies, ranks_in_node, layout.zero_stage))


def read_run(
    arguments: Sequence[str], defaults: Mapping[str, Any], *, any_model: bool = False
) -> tuple[RunSpec, SweepConfig]:
    """The run that arguments such as `model=llama3-8b nodes=8 tp=8` describe, and what they configure besides.

    By default dp is the number of GPUs divided by the other degrees, gas equals pp, the precision is that of the
    hardware, and other settings of the kernel are its usual ones.

    Args:
        defaults: the arguments beside those of layouts, with their usual values; nodes and seq_len are among them.
        any_model: whether the model may be one that our own kernel does not train.

    Raises:
        ConfigError: a word or a name is unknown, or the layout is impossible.
    """
    knobs = knobs_of(arguments)
    given_values = read_arguments(arguments, defaults, "model=llama3-8b nodes=8 tp=8", knobs)
    values = {**defaults, **given_values}
    config = config_of(values, knobs)
    return run_of(values, config, any_model=any_model), config


def knobs_of(arguments: Sequence[str]) -> tuple[str, ...]:
    """The knobs of the kernel that the arguments name; a kernel that does not exist has none."""
    kernel_names = [
        value for name, _, value in (argument.partition("=") for argument in arguments) if name == "kernel"
    ]
    if not kernel_names or kernel_names[0] not in files("kernel"):
        return ()
    return tuple(kernel_settings(kernel_names[0]).get("knobs") or ())


def config_of(values: Mapping[str, Any], knobs: Collection[str] = ()) -> SweepConfig:
    """What the arguments of a run configure beside its layout: model, hardware, kernel,
    profile, settings of the kernel and the values of its knobs.

    Raises:
        ConfigError: a value cannot be used; the message names the argument, not the setting that it stands for.
    """
    run_arguments = {*AXES, "nodes", "seq_len", *KERNEL_SETTINGS, *knobs}
    overrides = {key: value for key, value in values.items() if key not in run_arguments}
    overrides |= {f"kernel.{name}": values.get(name) for name in KERNEL_SETTINGS}
    if routing := values.get("routing"):
        overrides["kernel.routing"] = override_value(routing)
    overrides |= {f"+sweep.flags.{knob}": f"[{values[knob]}]" for knob in knobs if knob in values}
    typed_names = {f"kernel.{name}": name for name in KERNEL_SETTINGS}
    typed_names |= {f"sweep.flags.{knob}": knob for knob in knobs}
    return load_config(
        [f"{key}={value}" for key, value in overrides.items() if value is not None], typed_names
    )


def run_of(values: Mapping[str, Any], config: SweepConfig, *, any_model: bool = False) -> RunSpec:
    """The run that the arguments describe, among which are nodes and seq_len; `any_model` is that of `read_run`.

    Raises:
        ConfigError: the layout is impossible.
    """
    (shape,), hardware = config.models, config.hardware
    nodes, pp, gpus_per_node = values["nodes"], values.get("pp", 1), hardware.gpus_per_node
    if nodes < 1:
        raise ConfigError(f"nodes={nodes}; must be >= 1")
    num_gpus, others = nodes * gpus_per_node, max(1, model_parallel_degree(values))
    gpus_text = f"{counted(num_gpus, 'GPU')} ({counted(nodes, 'node')} of {gpus_per_node})"
    if num_gpus % others:
        raise ConfigError(f"{OTHER_DEGREES}={others} does not divide {gpus_text}; choose degrees that do")
    usual_dp = num_gpus // others
    if (dp := values.get("dp", usual_dp)) != usual_dp:
        problem = f"dp={dp} with {OTHER_DEGREES}={others} needs {dp * others} GPUs, not {gpus_text}"
        raise ConfigError(f"{problem}: give dp={usual_dp}, leave dp out, or change nodes, tp, pp or cp")
    layout = layout_of(dict(zip(FOLLOWING, (dp, max(1, pp)), strict=True)) | dict(values), gpus_per_node)
    workload = Workload(seq_len=values["seq_len"], gbs=value_from(Size, layout.gbs, "gbs=dp*mbs*gas"))
    spec = RunSpec(
        shape=shape,
        workload=workload,
        layout=layout,
        kernel=config.kernel,
        nodes=nodes,
        gpus_per_node=gpus_per_node,
        variant=dict(config.options.first_variant),
    )
    require_possible(spec, hardware.device, hardware, any_model=any_model)
    return spec


def require_possible(
    spec: RunSpec, device: str, hardware: Hardware | None = None, *, any_model: bool = False
) -> None:
    """Raises when the kernel of a run cannot run its layout on a device, cuda or cpu;
    `any_model` is that of `read_run`.

    Raises:
        ConfigError: the kernel cannot run the layout; the message says why.
    """
    _, broken_rule = next(broken_rules(spec.layout, spec.shape), (None, None))

    def refusal_of(kernel: KernelConfig, layout: Layout) -> str | None:
        return refusal(
            kernel,
            layout,
            spec.shape,
            spec.workload.seq_len,
            device,
            hardware,
            variant=spec.variant,
            any_model=any_model,
        )

    if reason := broken_rule or refusal_of(spec.kernel, spec.layout):
        advice = "choose another layout"
        if refusal_of(spec.kernel, Layout(dp=1)):  # no layout mends it
            advice = _supported_settings(spec.kernel, lambda kernel: not refusal_of(kernel, spec.layout))
        if not broken_rule and advice and not refusal_of(replace(spec.kernel, precision="bf16"), spec.layout):
            advice = "choose another layout, or precision bf16"
        elif advice:
            runnable_texts = (
                text
                for text, layout in _supported_changes(spec.kernel, spec.layout)
                if not next(broken_rules(layout, spec.shape), None) and not refusal_of(spec.kernel, layout)
            )
            advice = next((f"add {text}" for text in runnable_texts), advice)
        raise LayoutError(spec.layout.label(), reason, advice)


def _supported_settings(kernel: KernelConfig, can_run: Callable[[KernelConfig], bool]) -> str:
    """Advice to give one setting a value that the kernel lists and with which it can run; empty where none helps."""
    tables = kernel.flags | kernel.supports
    listed_pairs = ((name, value) for name in KERNEL_SETTINGS for value in tables.get(name, ()))
    texts = []
    for name, value in listed_pairs:
        with contextlib.suppress(ConfigError):
            if can_run(replace(kernel, **dict[str, Any]({name: value}))):
                texts.append(f"{name}={value}")
    return f"use {' or '.join(texts)}" if texts else ""


def _supported_changes(kernel: KernelConfig, layout: Layout) -> Iterator[tuple[str, Layout]]:
    """Each argument that gives one axis a value that the kernel lists, and the layout with that value.

    Degrees and the batch are left as they are, since others follow from them.
    """
    for axis in AXES:
        if axis in (*DEGREES, *BATCH):
            continue
        for value in (kernel.flags | kernel.supports).get(axis, ()):
            with contextlib.suppress(ConfigError, ValueError):
                axis_value: Any = str(value) if axis in TEXT_AXES else int(value)
                yield f"{axis}={value}", replace(layout, **{axis: axis_value})
