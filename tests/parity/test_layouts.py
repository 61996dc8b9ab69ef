"""Every form of parallelism and every pair of forms gives what one process gives, in fp64; some also in fp8."""

import dataclasses
import math
import re
from collections.abc import Callable, Iterable
from itertools import combinations
from typing import Any

import pytest

from ultrabench.attention_type import GroupedQuery, Latent
from ultrabench.feed_forward_type import Experts, FeedForward
from ultrabench.kernel.check.parity import run_check
from ultrabench.kernel.requests import FP64_TOLERANCE, TINY, CheckSpec
from ultrabench.layer_type import LayerType
from ultrabench.layout import PP_SCHEDULES, RECOMPUTE, Layout, default_schedule, default_virtual_stages
from ultrabench.model_shape import RopeScaling
from ultrabench.sweep.running.outliers import LOSS_TOLERANCE

pytestmark = pytest.mark.parity

SHALLOW = dataclasses.replace(TINY, num_hidden_layers=2)
"""What is trained where no pipeline cuts the layers."""
LONG = RopeScaling(
    rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=32
)  # fmt: skip
LATENT = Latent(
    num_attention_heads=4, q_lora_rank=24, kv_lora_rank=20, qk_nope_head_dim=12, qk_rope_head_dim=8, v_head_dim=12
)  # fmt: skip
ROUTED = Experts(
    num_experts=8, num_experts_per_tok=2, moe_intermediate_size=32, shared_expert_intermediate_size=32
)
YARN = RopeScaling(
    rope_type="yarn", factor=4.0, original_max_position_embeddings=32, mscale=0.7, mscale_all_dim=1.3
)  # fmt: skip
HEADS = GroupedQuery(num_attention_heads=4, num_key_value_heads=2, head_dim=16)
PLAIN_EXPERTS = Experts(
    num_experts=8, num_experts_per_tok=2, moe_intermediate_size=32, gated=False, hidden_act="relu2", n_group=4,
    topk_group=2, scoring_func="sigmoid", routed_scaling_factor=2.5, shared_expert_intermediate_size=48,
)  # fmt: skip
RELU2 = FeedForward(intermediate_size=128, gated=False, hidden_act="relu2")
GELU = FeedForward(intermediate_size=96, gated=False, hidden_act="gelu_tanh")
STEPS = 2
"""The first makes what later ones use: optimizer states and schedules. A third would add nothing but its time."""
CHANGES: dict[str, dict[str, Any]] = {
    "tied": {"tie_word_embeddings": True}, "mha": {"num_key_value_heads": 4}, "deep": {"num_hidden_layers": 8},
    "qwen": {"head_dim": 32, "qk_norm": True}, "long": {"rope_scaling": LONG},
    "biased": {"attention_bias": True, "partial_rotary_factor": 0.5},
    "across": {"qk_norm": True, "qk_norm_across_heads": True}, "few": {"vocab_size": 4},
    "sigmoid": {"scoring_func": "sigmoid", "routed_scaling_factor": 2.5},
    "yarn": {"rope_scaling": YARN}, "groups": {"n_group": 4, "topk_group": 2},
    "plain": {"layer_types": (
        LayerType(grouped_query=dataclasses.replace(HEADS, rope_theta=100.0), feed_forward=RELU2),
        LayerType(grouped_query=HEADS, feed_forward=GELU),
    )},
    "plain_experts": {
        "layer_types": (
            LayerType(grouped_query=HEADS, feed_forward=GELU), LayerType(grouped_query=HEADS, experts=PLAIN_EXPERTS),
        ),
        "layer_order": "a(b)", "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
    },
    "mtp": {"num_nextn_predict_layers": 1}, "mtp2": {"num_nextn_predict_layers": 2},
    "padded": {"vocab_size": 131}, "uneven": {"vocab_size": 131, "num_key_value_heads": 1},
}  # fmt: skip
"""Word of a case -> what it changes in the model.

plain has layers of two types, with rotations and feed-forward blocks of their own, which have no gate, and
plain_experts such experts in four groups.
qwen has wide heads and norms of queries and keys, and biased rotates half of the channels, as GLM-4.5 does. tp pads the
vocabulary of padded and uneven: of two ranks the second has 3 rows of tokens, of four the last two have none. It copies
the one key/value head of uneven.
"""

LAYOUTS = [
    # One process, wrapped: the forms at degree 1.
    "dp=1 zero_stage=3 gas=2", "dp=1 gas=2 tied",
    # Data parallel alone, every ZeRO stage, degrees that do not divide the parameters; with few tokens in the
    # vocabulary one of three ranks holds no row of embedding and head.
    "dp=2 mbs=2", "dp=2 zero_stage=2 gas=4", "dp=3 zero_stage=0 gas=2", "dp=3 zero_stage=1 gas=2",
    "dp=3 zero_stage=3 mbs=2 few", "dp=2 zero_stage=3 tied",
    # Shards among some of the ranks, replicas on the others.
    "dp=4 zero_stage=1 dp_shard=2 gas=2", "dp=4 zero_stage=2 dp_shard=2 gas=3",
    "dp=2 cp=2 zero_stage=3 dp_shard=2 gas=2",
    # Tensor parallel alone, grouped and plain heads, and two pairs of ranks with copies of a head.
    "tp=2 gas=2 mbs=2 qwen", "tp=4 padded", "tp=2 tied gas=2",
    # Pipelines alone; gas = pp - 1 only fills them as afab.
    "pp=2 gas=4 mbs=2", "pp=2 gas=2 afab", "pp=4 gas=3", "pp=4 gas=4 tied", "pp=3 gas=2 tied",
    # dp x tp.
    "dp=2 tp=2 zero_stage=0 uneven", "dp=2 tp=2 zero_stage=2 gas=2 uneven",
    "dp=2 tp=2 zero_stage=3 mbs=2 qwen uneven", "dp=3 tp=2 zero_stage=1 uneven", "dp=2 tp=2 zero_stage=3 tied",
    # dp x pp.
    "dp=2 pp=2 zero_stage=3 gas=4", "dp=2 pp=2 zero_stage=1 gas=2 tied",
    "dp=3 pp=2 zero_stage=3 gas=1 tied", "dp=2 pp=2 zero_stage=0 gas=2 tied",
    # tp x pp.
    "tp=2 pp=2 gas=2 mbs=2 qwen", "tp=2 pp=2 gas=2 tied uneven",
    # All three.
    "dp=2 tp=2 pp=2 zero_stage=1 gas=2 tied",
    # Several stages on a rank: interleaved, and the V of zero bubble; few and many micro-batches.
    "pp=2 gas=1 interleaved", "pp=4 gas=6 interleaved deep",
    "pp=2 gas=4 virtual_stages=3 interleaved deep", "pp=2 gas=4 interleaved tied",
    "pp=2 gas=1 zbv", "pp=4 gas=8 zbv deep", "pp=3 gas=4 zbv deep", "pp=2 gas=4 zbv tied",
    "dp=2 pp=2 zero_stage=0 gas=2 interleaved pp_layout=2-1-1-0", "dp=2 pp=2 zero_stage=1 gas=2 interleaved",
    "dp=2 pp=2 zero_stage=0 gas=4 zbv", "dp=2 pp=2 zero_stage=1 gas=2 zbv tied",
    "tp=2 pp=2 gas=4 zbv qwen long", "dp=2 tp=2 pp=2 zero_stage=3 gas=2 interleaved",
    # A ring alone and with every other form.
    "cp=2 gas=2 mbs=2 mha qwen long", "cp=4", "cp=2 tied",
    "dp=2 cp=2 zero_stage=0 gas=2", "dp=2 cp=2 zero_stage=2 gas=2", "dp=2 cp=2 zero_stage=3 gas=2",
    "cp=2 zero_stage=3 gas=2", "tp=2 cp=2 gas=2", "cp=2 pp=2 gas=2",
    "cp=2 pp=2 gas=4 zbv", "dp=2 cp=2 pp=2 zero_stage=3 gas=2",
    # Tensor parallelism without sequence parallelism.
    "tp=2 gas=2 mbs=2 sequence_parallel=off qwen", "dp=2 tp=2 zero_stage=3 sequence_parallel=off tied uneven",
    "tp=2 pp=2 gas=4 zbv sequence_parallel=off",
    "tp=2 cp=2 sequence_parallel=off selective compile uneven", "tp=2 pp=2 gas=2 sequence_parallel=off full",
    # Keys and values gathered before attention; gradients reduced after backward.
    "cp=2 gas=2 mbs=2 cp_exchange=allgather mha", "tp=2 cp=2 pp=2 gas=2 cp_exchange=allgather uneven",
    "cp=2 full compile cp_exchange=allgather",
    "dp=2 zero_stage=0 gas=2 dp_overlap=off", "dp=2 zero_stage=1 gas=2 dp_overlap=off tied",
    "dp=2 zero_stage=2 gas=3 dp_overlap=off",
    "dp=2 zero_stage=3 gas=2 dp_overlap=off selective", "dp=4 zero_stage=1 dp_shard=2 gas=2 dp_overlap=off",
    "dp=2 tp=2 cp=2 zero_stage=3 dp_overlap=off cp_exchange=allgather",
    # Computing anew in backward.
    "attention gas=2 compile", "every2 gas=2 compile", "dp=2 zero_stage=3 gas=2 full",
    "dp=2 zero_stage=3 gas=2 selective",
    "tp=2 full qwen uneven", "tp=2 selective qwen", "pp=2 gas=2 every2", "pp=2 gas=4 interleaved selective",
    "pp=2 gas=4 zbv attention", "cp=2 full", "cp=2 selective", "cp=2 attention",
    # Biases of queries, keys and values, which tp cuts, and norms across heads, which it cannot.
    "tp=2 gas=2 mbs=2 biased mha", "tp=2 pp=2 gas=4 zbv biased uneven", "dp=2 zero_stage=3 gas=2 across biased",
    # Compiled layers; zbv runs them eagerly.
    "dp=2 zero_stage=3 gas=2 full compile", "tp=2 selective compile qwen long biased", "pp=2 gas=4 interleaved compile",
    "cp=2 full compile", "pp=2 gas=1 zbv compile",
]  # fmt: skip


FP8 = [
    "dp=2 zero_stage=3 gas=2 full fp8", "tp=2 selective compile qwen biased fp8",
    "tp=2 selective qwen biased uneven fp8", "tp=2 mbs=2 sequence_parallel=off tied fp8",
    "tp=2 pp=2 gas=4 zbv fp8", "tp=2 selective mla dense fp8", "tp=2 pp=2 gas=4 zbv mla dense narrow fp8",
    "dp=2 cp=2 zero_stage=1 gas=2 selective fp8", "pp=2 gas=4 interleaved attention fp8",
    "full compile fp8", "tp=2 selective compile plain fp8", "tp=2 pp=2 gas=4 zbv plain yarn fp8",
]  # fmt: skip
"""Layouts that are compared with one process whose factors are rounded as theirs, within a multiple of its rounding."""
MOE = dataclasses.replace(
    TINY, name="moe", num_experts=8, num_experts_per_tok=2, moe_intermediate_size=32, n_shared_experts=1,
    first_k_dense_replace=1,
)  # fmt: skip
"""A model with a dense layer, then layers with experts of which one is shared."""


EXPERTS = [
    # Experts on one rank, and each ZeRO stage with groups of experts that are smaller than those of the rest.
    "dp=1 moe gas=2 routing=learned sigmoid", "dp=2 ep=2 moe mbs=2 routing=learned", "dp=2 zero_stage=2 gas=2 moe",
    "dp=2 zero_stage=1 ep=2 gas=2 moe tied dp_overlap=off", "dp=4 zero_stage=3 ep=2 moe routing=skew=1.2",
    "dp=4 zero_stage=1 dp_shard=2 ep=2 gas=2 moe", "dp=4 zero_stage=2 dp_shard=2 ep=4 gas=2 moe",
    # Groups of ep along tp, along dp, and along both.
    "tp=2 moe mbs=2 routing=learned", "tp=2 ep=2 moe gas=2 sigmoid", "dp=2 tp=2 ep=4 zero_stage=3 mbs=2 moe",
    "dp=2 tp=2 ep=2 zero_stage=0 moe routing=learned", "dp=2 tp=2 ep=1 zero_stage=1 gas=2 moe uneven",
    # Pipelines; zbv computes gradients of inputs and of weights apart.
    "pp=2 gas=2 mbs=2 moe routing=learned", "dp=2 pp=2 ep=2 zero_stage=3 gas=2 moe", "pp=2 gas=1 afab moe",
    "dp=2 pp=2 ep=2 zero_stage=1 gas=4 zbv moe tied", "tp=2 pp=2 ep=2 gas=4 zbv moe routing=learned",
    "dp=2 pp=2 ep=2 zero_stage=1 gas=4 interleaved moe", "dp=2 pp=2 ep=2 gas=4 zbv attention moe",
    # Rings.
    "cp=2 ep=2 gas=2 mbs=2 moe", "dp=2 cp=2 ep=4 zero_stage=3 moe routing=learned",
    "tp=2 cp=2 ep=2 gas=2 moe routing=skew=0.8",
    # Recomputation and compiled layers, of which a rank has two kinds.
    "dp=2 ep=2 zero_stage=3 gas=2 full moe routing=learned", "dp=2 ep=2 gas=2 every2 moe routing=learned",
    "tp=2 ep=2 full compile moe", "dp=2 ep=2 selective compile moe routing=skew=0.8",
]  # fmt: skip
"""Layouts of a model with experts."""
MLA = dataclasses.replace(
    TINY, name="mla", num_experts=8, num_experts_per_tok=2, moe_intermediate_size=32, layer_order="a(b)",
    layer_types=(
        LayerType(latent=LATENT, feed_forward=FeedForward(intermediate_size=128)),
        LayerType(latent=LATENT, experts=dataclasses.replace(ROUTED, scoring_func="sigmoid")),
    ),
)  # fmt: skip
"""A model with latent attention, a dense layer, then layers with experts of which one is shared."""
LATENTS = [
    # One process, wrapped; latents under each form of parallelism, and with all of them.
    "dp=2 zero_stage=3 gas=2 mla selective", "dp=4 zero_stage=2 dp_shard=2 gas=2 mla narrow",
    "tp=2 gas=2 mbs=2 mla routing=learned", "tp=4 mla narrow dense", "tp=2 mbs=2 mla dense sequence_parallel=off",
    "pp=2 gas=2 mla", "tp=2 pp=2 gas=4 zbv mla narrow", "pp=2 gas=4 interleaved mla dense full",
    "tp=2 pp=2 gas=4 zbv sequence_parallel=off attention mla dense", "cp=2 gas=2 mbs=2 mla",
    "tp=2 cp=2 gas=2 mla narrow",
    "cp=2 cp_exchange=allgather mla dense compile", "tp=2 ep=2 mla full compile", "tp=2 mla dense selective compile",
    "dp=2 tp=2 ep=4 zero_stage=3 mla routing=learned", "dp=2 tp=2 pp=2 ep=2 zero_stage=1 gas=2 mla narrow",
    "tp=2 mbs=2 mla dense sequence_parallel=off narrow selective compile",
]  # fmt: skip
"""Layouts of a model with latent attention."""
PARTS = [
    # Feed-forward blocks without a gate, two rotations, and yarn.
    "tp=2 gas=2 mbs=2 selective compile plain yarn", "tp=2 pp=2 gas=4 zbv plain", "dp=2 zero_stage=3 gas=2 full plain",
    "tp=2 sequence_parallel=off plain yarn", "cp=2 gas=2 plain yarn", "pp=2 gas=4 interleaved every2 plain tied",
    # Experts without a gate, in groups.
    "dp=2 ep=2 zero_stage=3 gas=2 plain_experts routing=learned", "tp=2 ep=2 full compile plain_experts",
    "dp=2 pp=2 ep=2 zero_stage=1 gas=4 zbv plain_experts", "tp=2 pp=2 ep=2 gas=2 plain_experts routing=learned",
    "dp=2 tp=2 ep=4 zero_stage=2 gas=2 moe groups routing=learned",
    "cp=2 ep=2 moe groups yarn routing=learned selective",
    # Modules that predict more tokens: the last stage of a pipeline has a copy of the embedding, or its tied head.
    "dp=1 gas=2 mtp2", "tp=2 gas=2 mbs=2 mtp uneven", "cp=2 gas=2 mtp", "dp=2 zero_stage=3 gas=2 mtp tied",
    "dp=2 pp=2 zero_stage=3 gas=4 mtp", "pp=2 gas=4 mtp tied", "pp=2 gas=4 zbv mtp", "pp=2 gas=2 afab mtp2",
    "tp=2 pp=2 gas=2 interleaved mtp tied uneven", "dp=2 ep=2 gas=2 moe mtp routing=learned",
    "tp=2 sequence_parallel=off selective compile mtp", "dp=2 pp=2 ep=2 zero_stage=1 gas=4 zbv moe mtp",
]  # fmt: skip
"""Layouts of models with other feed-forward blocks, rotations and routers."""
CASES = LAYOUTS + EXPERTS + PARTS


def mla_shape(words, num_layers):
    """A model with latent attention: `dense` has no experts, and queries of `narrow` follow from the input."""
    shape = dataclasses.replace(MLA, num_hidden_layers=num_layers)
    if "narrow" in words:
        attention = dataclasses.replace(LATENT, q_lora_rank=None, attention_bias=True)
        types = tuple(dataclasses.replace(kind, latent=attention) for kind in shape.layer_types)
        shape = dataclasses.replace(shape, layer_types=types)
    if "dense" in words:
        no_experts = dict.fromkeys(("num_experts", "num_experts_per_tok", "moe_intermediate_size"), 0)
        shape = dataclasses.replace(shape, layer_types=shape.layer_types[:1], layer_order="", **no_experts)
    return shape


def spec_of(case, shallow=SHALLOW):
    """The check that a line of CASES describes, which may name a precision;
    without a pipeline of the model `shallow`.
    """
    words = case.split()
    pairs = (term.partition("=") for term in words if "=" in term)
    axes = {name: int(value) if value.isdecimal() else value for name, _, value in pairs}
    pp, gas = axes.get("pp", 1), axes.get("gas", 1)
    shape = TINY if pp > 1 else shallow
    routing = axes.pop("routing", "balanced")
    sizes = tuple(map(int, str(axes.pop("sizes", "")).split("-"))) if "sizes" in axes else ()
    if "mla" in words:
        shape = mla_shape({*words}, shape.num_hidden_layers)
    if "moe" in words:
        shape = dataclasses.replace(MOE, num_hidden_layers=shape.num_hidden_layers)
    for term in CHANGES.keys() & set(words):
        shape = dataclasses.replace(shape, **CHANGES[term])
    schedule = next((w for w in words if w in PP_SCHEDULES), default_schedule(pp, gas))
    virtual = default_virtual_stages(schedule)
    recompute = next(filter(re.compile(str(RECOMPUTE.pattern)).match, words), "none")
    layout = Layout(**{"dp": 1, "virtual_stages": virtual, **axes}, pp_schedule=schedule, recompute=recompute)
    precision = next((term for term in words if term in ("bf16", "fp8", "fp32")), "fp64")
    options = {"precision": precision, "routing": routing, "compile": "compile" in words}
    return CheckSpec(layout=layout, shape=shape, steps=len(sizes) or STEPS, sizes=sizes, **options)


def traits(case: str) -> set[str]:
    """What sets the layout and the model of `case` apart: degrees that are more than 1,
    values of other axes, and words.
    """
    spec = spec_of(case)
    degrees, others = set[str](), set[str]()
    for name, value in dataclasses.asdict(spec.layout).items():
        if isinstance(value, int) and name not in ("zero_stage", "virtual_stages"):
            degrees |= {name} if value > 1 else set()
        else:
            others.add(f"{name}={value}")
    words = {*CHANGES, "moe", "mla", "narrow", "dense", "compile"} & {*case.split()}
    return degrees | others | words | {spec.routing.split("=")[0]}


def cost(case: str) -> float:
    """About how long `case` takes, in times of a rank; one that traces layers takes five times as long."""
    spec = spec_of(case)
    return 1 + spec.layout.world_size * (5 if spec.compile else 1) + spec.layout.gas / 4


def covering(cases: Iterable[str], size: int) -> set[str]:
    """Cheap cases that together have all that some case has: each trait (size 1), or each pair of traits (2).

    Of size 0 it is one case.
    """
    needed_by_case = {case: {*combinations(sorted(traits(case)), size)} for case in cases}
    missing_by_case, chosen = needed_by_case, set[str]()
    while any(missing_by_case.values()):
        best = max(missing_by_case, key=lambda case: len(missing_by_case[case]) / cost(case))
        chosen.add(best)
        covered = missing_by_case[best]
        missing_by_case = {case: missing - covered for case, missing in missing_by_case.items()}
    for case in sorted(chosen, key=lambda case: (cost(case), case), reverse=True):
        # Later choices may have all that an earlier one has.
        others = chosen - {case}
        if others and needed_by_case[case] <= set.union(*(needed_by_case[other] for other in others)):
            chosen = others
    return chosen


def every_run(*groups: tuple[list[str], int]) -> Callable[..., Any]:
    """Tests cases of each group that are `covering` for its size in every run, and all of them in `make parity`."""
    parameters = []
    for cases, size in groups:
        chosen = covering(cases, size)
        marks = {case: () if case in chosen else pytest.mark.campaign for case in cases}
        parameters += [pytest.param(case, marks=marks[case]) for case in cases]
    return pytest.mark.parametrize("case", parameters)


@every_run((LAYOUTS + EXPERTS, 2), (LATENTS, 0), (PARTS, 1), (FP8, 1))
def test_layout_equals_one_process(server, case):
    """Losses of all steps, gradients of the first, parameters after the last; one graph for each kind of layer."""
    spec = spec_of(case)
    result = server.ask(run_check, spec)
    assert result.error is None
    assert not result.missing_gradients
    assert result.passed, f"{result} (tolerance {FP64_TOLERANCE})"
    kinds = 2 if spec.layout.full_every > 1 or len(spec.shape.kinds) > 1 else 1
    assert result.graphs == kinds * spec.run.compiles


@pytest.mark.parametrize(
    "case",
    [
        "dp=2 zero_stage=1 gas=8 sizes=2-4-4-2",
        "pp=2 gas=8 interleaved sizes=4-8-4",
        "pp=2 gas=8 zbv sizes=6-3",
    ],
)
def test_steps_of_several_sizes_in_turn_equal_one_process(server, case):
    """A rank whose steps have more and fewer micro-batches trains as one process with the same batches."""
    result = server.ask(run_check, spec_of(case))
    assert (result.error, result.passed) == (None, True), result


def test_losses_of_fp8_stay_within_what_a_sweep_allows(server):
    """The losses of 20 steps together are as near to one process in fp64 as a sweep allows for the last one alone."""
    result = server.ask(run_check, dataclasses.replace(spec_of("tp=2 pp=2 gas=2 mbs=2 fp8"), steps=20))
    assert result.error is None
    assert result.loss_diff < LOSS_TOLERANCE["fp8"] * math.log(TINY.vocab_size) / 2
