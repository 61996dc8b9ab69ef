"""The closed form of the kernel's memory against dry runs of random layouts of random small models,
or of published models.

`OPENBLAS_NUM_THREADS=1 python benchmarks/memory.py [LAYOUTS] [SEED] [experts] [fp8] [published] [mixed] [varied]` (200,
21) prints JSON lines {family, ranks, median, p95, largest}, errors of the peak as fractions, or of the bytes that stay,
and the layout and model of the largest error.

- experts: small models with experts
- mixed: in turn dense models, models with experts, and models with latent attention, all small and half of them with
  vocabularies that tp pads
- varied: some models have blocks without a gate or predict more tokens, and more options of the layout and of the
  kernel are drawn

A dry run takes 1 to 5 s of a core, one of a published model up to 30 s. It imports torch, but only its forked children
compute, and they need a process of one thread.
"""

import json
import math
import random
import sys
from collections import defaultdict
from collections.abc import Callable
from dataclasses import fields, replace
from functools import partial
from statistics import median
from string import ascii_lowercase
from typing import Any

from ultrabench.attention_type import Latent
from ultrabench.errors import ConfigError
from ultrabench.feed_forward_type import Experts, FeedForward
from ultrabench.hardware import GIB
from ultrabench.kernel.children import run_forked
from ultrabench.kernel.dryrun.rank_cost import rank_cost
from ultrabench.kernel.requests import CheckSpec
from ultrabench.layer_type import LayerType
from ultrabench.layout import Layout, default_virtual_stages
from ultrabench.model_shape import REPLACED_BY_TYPES, ModelShape
from ultrabench.routing import LEARNED_SKEW
from ultrabench.run import RunSpec
from ultrabench.sweep.arguments import require_possible
from ultrabench.sweep.config.load import load_model, load_profile
from ultrabench.sweep.predict.memory import memory_constants, predict_memory
from ultrabench.sweep.predict.ultrabench_memory import static_bytes
from ultrabench.tensor_parallel import kinds_of_ranks

TIMEOUT_S = 3600.0
SMALL_MODELS = (
    "llama3.2-1b", "llama3.2-3b", "llama3-8b", "llama3-8b", "qwen3-8b", "qwen2.5-7b", "mistral-7b", "1B", "olmoe-1b-7b",
)  # fmt: skip
LARGE_MODELS = ("llama3-70b", "llama3-70b", "mixtral-8x7b", "qwen3-30b-a3b")
PUBLISHED_BYTES = 10 * GIB, 100 * GIB
"""Smallest and largest predicted peak of a layout of a published model."""
ODD_VOCABULARIES = (1003, 5001, 31999)
"""Sizes that no even tp divides, so that ranks pad them."""
MODES = ("experts", "fp8", "published", "mixed", "varied")
RECOMPUTE = ("none", "none", "none", "attention", "selective", "full", "every2")


def shape_of(pick: random.Random) -> ModelShape:
    heads, width = pick.choice((4, 8, 16)), pick.choice((16, 32, 64))
    hidden = heads * width if pick.random() < 0.8 else heads * 16 * pick.choice((2, 4))
    return ModelShape(
        name="random",
        hidden_size=hidden,
        num_hidden_layers=pick.randint(2, 6),
        num_attention_heads=heads,
        num_key_value_heads=pick.choice([k for k in (1, 2, 4, 8, 16) if k <= heads]),
        intermediate_size=hidden * pick.choice((2, 3, 4)),
        vocab_size=pick.choice((512, 2048, 8192, 32768)),
        tie_word_embeddings=pick.random() < 0.4,
        head_dim=width,
        qk_norm=pick.random() < 0.25,
    )


def small(pick: random.Random) -> RunSpec:
    """A run of a small random model."""
    dp, pp, cp = pick.choice((1, 2, 4, 8)), pick.choice((1, 1, 2, 4)), pick.choice((1, 1, 1, 1, 2, 4))
    schedule = pick.choice(("1f1b", "1f1b", "afab", "interleaved", "zbv")) if pp > 1 else "none"
    layout = Layout(
        dp=dp, tp=pick.choice((1, 1, 2, 4, 8)), pp=pp, cp=cp, zero_stage=pick.choice((0, 1, 2, 3, 3)),
        dp_shard=pick.choice((0, 0, 0, 2)), mbs=pick.choice((1, 2, 4, 8)), gas=pick.randint(1, 6),
        pp_schedule=schedule, virtual_stages=default_virtual_stages(schedule), recompute=pick.choice(RECOMPUTE),
    )  # fmt: skip
    precision = pick.choice(("bf16", "bf16", "bf16", "fp32"))
    shape, seq_len = shape_of(pick), pick.choice((128, 256, 512, 1024))
    return CheckSpec(layout=layout, shape=shape, seq_len=seq_len, precision=precision).run


def with_experts(spec: RunSpec, pick: random.Random) -> RunSpec:
    """The run with experts in most layers."""
    shape = replace(
        spec.shape, num_experts=pick.choice((4, 8, 16)), num_experts_per_tok=pick.choice((1, 2, 4)),
        moe_intermediate_size=spec.shape.hidden_size // pick.choice((1, 2, 4)), n_shared_experts=pick.choice((0, 0, 1)),
        first_k_dense_replace=pick.choice((0, 0, 1)), decoder_sparse_step=pick.choice((1, 1, 1, 2)),
        scoring_func=pick.choice(("softmax", "sigmoid")),
    )  # fmt: skip
    return replace(spec, shape=shape, layout=replace(spec.layout, ep=pick.choice((1, 2, 4, 8))))


def with_latent_attention(spec: RunSpec, pick: random.Random) -> RunSpec:
    """The run with latent attention in all layers, and with experts in all but the first one in two of three models."""
    shape, has_experts = spec.shape, pick.random() < 2 / 3
    hidden = shape.hidden_size
    latent = Latent(
        num_attention_heads=shape.num_attention_heads, q_lora_rank=pick.choice((None, hidden // 2, hidden // 4)),
        kv_lora_rank=hidden // pick.choice((2, 4)), qk_nope_head_dim=pick.choice((16, 32)),
        qk_rope_head_dim=pick.choice((8, 16)), v_head_dim=pick.choice((16, 32)), attention_bias=pick.random() < 0.2,
    )  # fmt: skip
    dense = LayerType(latent=latent, feed_forward=FeedForward(intermediate_size=shape.intermediate_size))
    if not has_experts:
        return replace(spec, shape=replace(shape, layer_types=(dense,), qk_norm=False))
    width = hidden // pick.choice((1, 2, 4))
    experts = Experts(
        num_experts=pick.choice((4, 8, 16)), num_experts_per_tok=pick.choice((1, 2, 4)), moe_intermediate_size=width,
        shared_expert_intermediate_size=width * pick.choice((0, 1, 2)),
        scoring_func=pick.choice(("softmax", "sigmoid")),
    )  # fmt: skip
    types = dense, LayerType(latent=latent, experts=experts)
    mixed_shape = replace(
        shape, layer_types=types, layer_order="a(b)", qk_norm=False, num_experts=experts.num_experts,
        num_experts_per_tok=experts.num_experts_per_tok, moe_intermediate_size=width,
    )  # fmt: skip
    return replace(spec, shape=mixed_shape, layout=replace(spec.layout, ep=pick.choice((1, 2, 4))))


def with_padding(spec: RunSpec, pick: random.Random) -> RunSpec:
    """The run, in one of two cases with a vocabulary that ranks of tensor parallelism pad."""
    if pick.random() < 0.5:
        return spec
    return replace(spec, shape=replace(spec.shape, vocab_size=pick.choice(ODD_VOCABULARIES)))


def with_variant(spec: RunSpec, pick: random.Random) -> RunSpec:
    """The run with options that `small` leaves at their defaults, and with few layers, so that a dry run is short."""
    tp, cp, pp = spec.layout.tp, spec.layout.cp, spec.layout.pp
    layout = replace(
        spec.layout, sequence_parallel=pick.choice(("on", "on", "off")) if tp > 1 else "on",
        cp_exchange=pick.choice(("ring", "allgather")) if cp > 1 else "ring",
        dp_overlap=pick.choice(("on", "on", "on", "off")) if pp == 1 else "on",
    )  # fmt: skip
    kernel = replace(
        spec.kernel, precision=pick.choice(("bf16", "bf16", "fp8", "fp32")), compile=pick.random() < 0.1,
        routing=pick.choice(("balanced", "skew=1", LEARNED_SKEW)) if spec.shape.num_experts else "balanced",
    )  # fmt: skip
    num_layers = min(spec.shape.num_hidden_layers, max(3, layout.num_stages))
    shape = replace(
        spec.shape, num_hidden_layers=num_layers, num_nextn_predict_layers=pick.choice((0, 0, 0, 0, 1, 2))
    )
    if pick.random() < 0.3:
        shape = without_gates(shape)
    return replace(spec, layout=layout, kernel=kernel, shape=shape)


def without_gates(shape: ModelShape) -> ModelShape:
    """The model with blocks of two matrices and the square of relu."""
    plain: dict[str, Any] = {"gated": False, "hidden_act": "relu2"}
    types = tuple(
        replace(
            kind,
            feed_forward=kind.feed_forward and replace(kind.feed_forward, **plain),
            experts=kind.experts and replace(kind.experts, **plain),
        )
        for kind in shape.kinds
    )
    defaults: dict[str, Any] = {
        field.name: field.default for field in fields(ModelShape) if field.name in REPLACED_BY_TYPES
    }
    order = "".join(ascii_lowercase[number] for number in shape.kind_numbers)
    return replace(shape, **defaults, layer_types=types, layer_order=order)


MIXED: tuple[Callable[[RunSpec, random.Random], RunSpec], ...] = (
    lambda spec, pick: spec,
    with_experts,
    with_latent_attention,
)
"""How the models of `mixed` are changed in turn."""


def published(pick: random.Random) -> RunSpec:
    """A run of a published model."""
    is_large = pick.random() < len(LARGE_MODELS) / len(LARGE_MODELS + SMALL_MODELS)
    shape = load_model(pick.choice(LARGE_MODELS if is_large else SMALL_MODELS))
    pp, cp = pick.choice((1, 2, 4, 4, 8) if is_large else (1, 1, 2, 4)), pick.choice((1, 1, 1, 1, 2, 4))
    schedule = pick.choice(("1f1b", "1f1b", "afab", "interleaved", "zbv")) if pp > 1 else "none"
    layout = Layout(
        dp=pick.choice((1, 2, 4, 8)), tp=pick.choice((2, 4, 8, 8) if is_large else (1, 1, 2, 4, 8)), pp=pp, cp=cp,
        zero_stage=pick.choice((0, 1, 2, 3, 3)), dp_shard=pick.choice((0, 0, 0, 0, 2)), mbs=pick.choice((1, 1, 2, 4)),
        gas=pick.choice((1, 2, 4) if pp == 1 else (pp, 2 * pp - 1, 2 * pp)), pp_schedule=schedule,
        virtual_stages=default_virtual_stages(schedule), recompute=pick.choice(RECOMPUTE[1:]),
        sequence_parallel=pick.choice(("on",) * 7 + ("off",)), cp_exchange=pick.choice(("ring", "allgather")),
        dp_overlap=pick.choice(("on",) * 7 + ("off",)), ep=pick.choice((1, 2, 4, 8)) if shape.num_experts else 1,
    )  # fmt: skip
    spec = CheckSpec(
        layout=layout, shape=shape, precision=pick.choice(("bf16",) * 5 + ("fp8",)), compile=pick.random() < 0.2,
        routing=pick.choice(("balanced", "balanced", "skew=1", LEARNED_SKEW)) if shape.num_experts else "balanced",
        seq_len=pick.choice((2048, 4096, 4096, 8192)) * pick.choice((1, cp)),
    )  # fmt: skip
    return spec.run


def possible(draw: Callable[..., RunSpec], *values: Any) -> RunSpec | None:
    """The run that `draw` makes of its values, or None where the kernel cannot do it."""
    try:
        spec = draw(*values)
        require_possible(spec, "cpu")
    except ConfigError:
        return None
    return spec


def shortened(spec: RunSpec) -> RunSpec:
    """The run with at most two micro-batches without a pipeline: the first one, and the last one, which needs no less
    than those between.
    """
    return spec.with_gas(min(2, spec.layout.gas)) if spec.layout.pp == 1 else spec


def families(spec: RunSpec) -> list[str]:
    """The groups whose errors are printed to which a run of a small model belongs."""
    shape, tp = spec.shape, spec.layout.tp
    has_latents = any(kind.latent for kind in shape.kinds)
    model = "latent" if has_latents else "experts" if shape.num_experts else "dense"
    has_by_name = {
        "padded vocabulary": shape.vocab_size % tp > 0,
        "copied heads": kinds_of_ranks(shape, tp) != shape.kinds,
        "blocks without a gate": any(
            block and not block.gated for kind in shape.kinds for block in (kind.feed_forward, kind.experts)
        ),
        "more predictions": shape.num_nextn_predict_layers > 0,
        "compiled": spec.compiles,
        f"ZeRO-{spec.layout.zero_stage}": True,
        spec.kernel.precision: True,
    }
    return [model, *(name for name, has in has_by_name.items() if has), family(spec.layout)]


def family(layout: Layout) -> str:
    ring = " cp" if layout.cp > 1 else ""
    recomputed = "" if layout.recompute in ("none", "attention") else " recomputed"
    return (layout.pp_schedule if layout.pp > 1 else "no pipeline") + ring + recomputed


def main() -> None:
    modes = set(sys.argv[1:]) & set(MODES)
    numbers = [arg for arg in sys.argv[1:] if arg not in modes]
    layouts, seed = (int(arg) for arg in (*numbers, *("200", "21")[len(numbers) :]))
    pick, errors = random.Random(seed), defaultdict[str, list[float]](list)
    profile = load_profile("ultrabench")
    constants = memory_constants("ultrabench", profile.memory)
    is_published, worst = "published" in modes, (0.0, "")
    while layouts:
        if (spec := possible(published if is_published else small, pick)) is None:
            continue
        peak_bytes = max(
            stage.allocated_bytes for stage in predict_memory(profile.as_divided(spec), constants)
        )
        if is_published and not PUBLISHED_BYTES[0] < peak_bytes < PUBLISHED_BYTES[1]:
            continue  # a GPU would hold far more, or could not hold it
        if "experts" in modes and (spec := possible(with_experts, spec, pick)) is None:
            continue
        if "mixed" in modes:
            spec = possible(MIXED[layouts % len(MIXED)], spec, pick)
            spec = spec and possible(with_padding, spec, pick)
            if spec is None:
                continue
        if "varied" in modes and (spec := possible(with_variant, spec, pick)) is None:
            continue
        if "fp8" in modes:
            spec = replace(spec, kernel=replace(spec.kernel, precision="fp8"))
        layouts, spec = layouts - 1, shortened(spec)
        stages, static = predict_memory(profile.as_divided(spec), constants), static_bytes(spec)
        for stage, stays in zip(stages, static, strict=True):
            body = partial(rank_cost, spec, spec.layout.first_rank(stage.pp_rank))
            cost = run_forked({"rank": body}, TIMEOUT_S)["rank"]
            errors["static"].append(abs(stays / cost["static_bytes"] - 1))
            difference = stage.allocated_bytes / cost["peak_bytes"] - 1
            for name in (
                "every",
                *(families(spec) if modes & {"mixed", "varied"} else [family(spec.layout)]),
            ):
                errors[name].append(abs(difference))
            text = f"{difference:+.4f} pp_rank={stage.pp_rank} {spec.layout.label()} {spec.workload} {spec.shape}"
            worst = max(worst, (abs(difference), text))
    for name, fractions in sorted(errors.items()):
        row = {"family": name, "ranks": len(fractions), "median": median(fractions)}
        p95 = sorted(fractions)[math.ceil(0.95 * len(fractions)) - 1]
        print(json.dumps({**row, "p95": p95, "largest": max(fractions)}))
    print(json.dumps({"worst": worst[1]}))


if __name__ == "__main__":
    main()
