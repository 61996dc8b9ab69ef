"""The predicted memory of every framework: known layouts, and what must hold of any."""

import operator
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.configs import refused
from tests.strategies import divisors
from tests.unit.predict.test_step_time import GPUS, profile_of, spec_of
from ultrabench.hardware import GIB
from ultrabench.kernel.requests import TINY
from ultrabench.kernel_config import KernelConfig
from ultrabench.layout import Layout, default_schedule
from ultrabench.model_shape import ModelShape
from ultrabench.run import RunSpec, Workload
from ultrabench.stages import split_stages
from ultrabench.sweep.config.load import load_model
from ultrabench.sweep.predict.memory import largest_stage, memory_constants, p_oom, predict_memory
from ultrabench.sweep.predict.micro_batch import micro_batch, micro_batch_work
from ultrabench.sweep.predict.stage_memory import ENDS, EVERY, LARGEST
from ultrabench.sweep.predict.ultrabench_memory import static_bytes

NARROW_EXPERTS = replace(TINY, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16)


def constants(framework, **words):
    """The constants of the shipped profile, some of them with other values."""
    return replace(memory_constants(framework, profile_of(framework).memory), **words)


@pytest.mark.parametrize(
    ("version", "model", "layout", "measured"),
    [
        ("latest", "1B", Layout(dp=8, gas=16, mbs=2), 50.18),
        ("latest", "1B", Layout(dp=8, gas=32), 36.67),
        ("latest", "8B", Layout(dp=4, tp=4, gas=16, mbs=4, zero_stage=1), 58.3),
        ("latest", "8B", Layout(dp=128, tp=4, mbs=2), 57.8),
        ("run-ahead", "80B", Layout(dp=4, tp=4, pp=16, gas=64, zero_stage=1, pp_schedule="1f1b"), 64.2),
    ],
)
def test_nanotron_reserves_what_published_runs_did(version, model, layout, measured):
    """The reserved GiB of the Ultra-Scale Playbook's tables."""
    stages = predict_memory(spec_of(layout, model), constants("nanotron", version=version))
    assert stages[0].peak_bytes / GIB == pytest.approx(measured, rel=0.12)
    assert p_oom(stages, GPUS.mem_bytes, constants("nanotron")) < 0.5


@pytest.mark.parametrize(
    ("layout", "width"),
    [
        (Layout(dp=1, tp=2, pp=4, gas=4, pp_schedule="1f1b", pp_layout="even"), 1024),
        (Layout(dp=2, tp=8, pp=8, gas=2, mbs=8, zero_stage=2, pp_schedule="1f1b"), 64),
    ],
)
def test_a_plan_computes_inner_ranks_with_experts_or_the_head(layout, width):
    """The first layer of the model is dense; with more stages than blocks the head is on an inner rank."""
    spec, of_profile = spec_of(layout, "tiny-moe"), constants("ultrabench")
    spec = replace(spec, shape=replace(spec.shape, moe_intermediate_size=width))
    largest, every = (largest_stage(predict_memory(spec, of_profile, ranks)) for ranks in (LARGEST, EVERY))
    assert largest == every


@pytest.mark.parametrize("words", [{"gas": 32, "zero_stage": 1, "dp": 2}, {"gas": 4}, {"gas": 8, "tp": 4}])
def test_a_plan_computes_few_ranks_and_the_largest_one(words):
    layout = Layout(**{"dp": 1, "pp": 16, "pp_schedule": default_schedule(16, words["gas"]), **words})
    spec = spec_of(layout, "llama3-70b")
    stages, few, ends = (
        predict_memory(spec, constants("ultrabench"), ranks) for ranks in (EVERY, LARGEST, ENDS)
    )
    assert 1 < len(few) < 5
    assert set(few) < set(stages)
    assert ends == (stages[0], stages[-1])
    assert max(s.peak_bytes for s in few) == max(s.peak_bytes for s in stages)


@pytest.mark.parametrize(
    ("model", "layout", "static", "peak"),
    [
        ("llama3-8b", Layout(dp=8, zero_stage=3), 11.22, 35.76),
        ("llama3-8b", Layout(dp=1, tp=8), 11.22, 16.34),
        ("llama3-70b", Layout(dp=2, tp=8, pp=4, zero_stage=1, gas=8, pp_schedule="1f1b"), 13.29, 40.23),
    ],
)
def test_our_kernel_allocates_what_dry_runs_of_it_said(model, layout, static, peak):
    """The GiB of rank 0 that `ultrabench kernel dryrun` printed; tests/parity compares it with many small ones."""
    spec = spec_of(layout, model)
    assert static_bytes(spec)[0] / GIB == pytest.approx(static, rel=0.001)
    (largest, *_) = predict_memory(spec, constants("ultrabench"))
    assert largest.allocated_bytes / GIB == pytest.approx(peak, rel=0.01)


SMALL = ModelShape(
    name="small", hidden_size=512, num_hidden_layers=2, num_attention_heads=8, num_key_value_heads=4,
    intermediate_size=1536,
    vocab_size=512, tie_word_embeddings=False,
)  # fmt: skip


@pytest.mark.parametrize(
    ("layout", "layers", "compiled", "bf16", "fp8"),
    [
        (Layout(dp=4, tp=2, zero_stage=3, mbs=2), 2, False, 39.76, 40.77),
        (Layout(dp=1, tp=2, mbs=4, sequence_parallel="off"), 2, False, 108.01, 108.01),
        (Layout(dp=4, zero_stage=3, mbs=4, recompute="full"), 3, False, 111.44, 112.95),
        (Layout(dp=4, zero_stage=1, mbs=4, recompute="selective"), 3, False, 128.07, 129.58),
        (Layout(dp=2, mbs=4), 4, True, 320.47, 307.51),
        (Layout(dp=1, tp=2, mbs=4), 4, True, 161.85, 160.10),
    ],
)
def test_fp8_allocates_what_dry_runs_of_it_said(layout, layers, compiled, bf16, fp8):
    """The MiB of rank 0 of a small model with so few words that the backward of a layer makes its peak."""
    shape = replace(SMALL, num_hidden_layers=layers)
    for precision, peak in (("bf16", bf16), ("fp8", fp8)):
        spec = spec_of(layout, shape, seq_len=512, precision=precision, compiled=compiled)
        (largest, *_) = predict_memory(spec, constants("ultrabench"))
        assert largest.allocated_bytes / 2**20 == pytest.approx(peak, rel=0.022), precision


EXPERTS = replace(SMALL, num_experts=8, num_experts_per_tok=2, moe_intermediate_size=256)
ZBV = Layout(dp=1, pp=2, gas=4, mbs=4, pp_schedule="zbv", virtual_stages=2)


@pytest.mark.parametrize(
    ("layout", "shape", "precision", "peaks"),
    [
        (ZBV, SMALL, "bf16", (425.04, 314.74)),
        (replace(ZBV, dp=2, tp=2, gas=2, mbs=1, zero_stage=1), SMALL, "bf16", (51.13, 48.57)),
        (Layout(dp=2, ep=2, gas=2, mbs=8, recompute="selective"), EXPERTS, "bf16", (317.11,)),
        (Layout(dp=2, gas=3, zero_stage=1), EXPERTS, "fp32", (275.64,)),
    ],
)
def test_split_backwards_and_experts_allocate_what_dry_runs_of_them_said(layout, shape, precision, peaks):
    """The MiB of each rank of a pipeline."""
    spec = spec_of(layout, replace(shape, num_hidden_layers=4), seq_len=512, precision=precision)
    stages = predict_memory(spec, constants("ultrabench"))
    assert [stage.allocated_bytes / 2**20 for stage in stages] == pytest.approx(peaks, rel=0.02)


def test_fp64_takes_twice_the_bytes_of_fp32_and_zbv_a_margin():
    plain = Layout(dp=1, pp=2, gas=4, pp_schedule="1f1b")
    zbv = replace(plain, pp_schedule="zbv", virtual_stages=2)
    narrow, wide, bare, margin = (
        predict_memory(spec_of(layout, "tiny", seq_len=512, precision=precision), constants("ultrabench", **words))[0]
        for layout, precision, words in (
            (plain, "fp32", {}), (plain, "fp64", {}), (zbv, "bf16", {"zbv_margin": 0.0}),
            (zbv, "bf16", {"zbv_margin": 0.5}),
        )
    )  # fmt: skip
    assert wide.activations == 2 * narrow.activations
    assert margin.activations == 1.5 * bare.activations


def test_what_cannot_fit_is_sure_to_run_out():
    stages = predict_memory(spec_of(Layout(dp=8, mbs=8, gas=4), "8B"), constants("nanotron"))
    assert stages[0].peak_bytes > 5 * GPUS.mem_bytes
    assert p_oom(stages, GPUS.mem_bytes, constants("nanotron")) > 0.999
    assert p_oom(stages, 100 * GPUS.mem_bytes, constants("nanotron")) < 0.001


def test_older_versions_keep_gathered_tokens_and_cut_stages_by_the_older_rule():
    small = spec_of(Layout(dp=2, tp=4, gas=128), "8B")
    deep = replace(small, shape=replace(small.shape, num_hidden_layers=80))  # the host is not so far ahead
    (latest, old), (latest_of_deep, old_of_deep) = (
        [predict_memory(spec, constants("nanotron", version=v))[0] for v in ("latest", "old")]
        for spec in (small, deep)
    )
    assert old.peak_bytes > latest.peak_bytes
    assert old.allocated_bytes == latest.allocated_bytes
    assert old_of_deep.reserve - latest_of_deep.reserve == pytest.approx(old.reserve - latest.reserve)
    rules = (constants("nanotron", version=v).ties_advance for v in ("latest", "old"))
    assert [split_stages(load_model("1B"), 2, ties_advance=rule)[0].num_layers for rule in rules] == [10, 11]


@st.composite
def runs(draw):
    """A run with two ranks of dp, of a model whose matrices no padding of fully_shard enlarges."""
    heads = draw(st.sampled_from((4, 8, 16)))
    shape = ModelShape(
        name="drawn", hidden_size=64 * heads, num_hidden_layers=draw(st.integers(4, 40)),
        num_attention_heads=heads, num_key_value_heads=draw(divisors(heads)),
        intermediate_size=64 * draw(st.integers(2, 100)), vocab_size=512 * draw(st.integers(1, 250)),
        tie_word_embeddings=draw(st.booleans()),
    )  # fmt: skip
    pp = draw(st.sampled_from((1, 2, 4)))
    gas = draw(st.integers(pp, 9))
    layout = Layout(
        dp=2, tp=draw(divisors(shape.num_key_value_heads)), pp=pp, gas=gas, pp_schedule=default_schedule(pp, gas),
        recompute=draw(st.sampled_from(("none", "selective", "full", "every2"))),
        mbs=draw(st.integers(1, 4)), zero_stage=draw(st.integers(0, 3)),
    )  # fmt: skip
    return spec_of(layout, shape, seq_len=512)


def test_backward_of_a_feed_forward_block_has_what_tp_gathers_and_the_rows_of_experts():
    """A token has 64 channels, a block 128; of 4 experts of 16 channels it takes 2, whose rows travel with ep.

    In backward of the product with down, tp=4 gathers the gradient of the output of all tokens. Narrow experts need
    less for their products than for the gradients of their rows: in the order of tokens, of experts, and of ranks.
    """
    tokens, width = 512, 2
    hidden = 64 * width * tokens
    dense, experts = (
        micro_batch(micro_batch_work(spec_of(layout, shape, seq_len=512))).layers[0]
        for layout, shape in ((Layout(dp=1, tp=4), TINY), (Layout(dp=2, ep=2), NARROW_EXPERTS))
    )
    kept = (
        4 * hidden + hidden * (2 * 64 + 2 * 64 + 4 * 128) // 64
    )  # two key/value heads are copied to four ranks
    assert dense.feed_forward == kept / 4 + hidden / 4 + hidden + 128 * width * tokens / 4
    rows, products = 2 * hidden, 2 * 16 * width * tokens
    scores = 4 * 4 * tokens  # of 4 experts, in fp32
    kept = 4 * hidden + hidden * (2 * 64 + 2 * 32) // 64 + rows + 3 * products + scores
    assert experts.feed_forward == kept + hidden + 3 * rows > kept + hidden + 4 * products


@pytest.mark.parametrize(
    ("framework", "num_rows"), [("nanotron", 50258), ("megatron", 50432), ("ultrabench", 50432)]
)
def test_each_program_pads_a_vocabulary_to_its_own_multiple(framework, num_rows):
    """nanotron to a multiple of tp, the others to one of 128 * tp; 2 bytes of weights per parameter in bf16."""
    shape, layout = replace(load_model("1B"), vocab_size=50257), Layout(dp=1, tp=2, gas=16)
    padded, unpadded = (
        predict_memory(spec_of(layout, replace(shape, vocab_size=rows)), constants(framework))[0].weights
        for rows in (50257, num_rows)
    )
    assert padded == unpadded


@pytest.mark.parametrize("framework", ["nanotron", "megatron", "ultrabench"])
@given(spec=runs())
def test_parts_add_up_and_more_tokens_need_more_memory_and_less_sharding_never_less(framework, spec):
    def stages(seq_len=512, **words):
        changed = spec_of(replace(spec.layout, **words), spec.shape, seq_len=seq_len)
        return predict_memory(changed, constants(framework))

    def peaks(**words):
        return [stage.peak_bytes for stage in stages(**words)]

    assert [stage.pp_rank for stage in stages()] == list(range(spec.layout.pp))
    for stage in stages():
        assert min(stage[2:]) >= 0
        assert sum(stage[2:]) == pytest.approx(stage.peak_bytes)
    for then in (peaks(mbs=spec.layout.mbs + 1), peaks(seq_len=1024)):
        assert sum(then) > sum(peaks())
        assert all(map(operator.ge, then, peaks()))
    if spec.layout.zero_stage:
        assert max(peaks(zero_stage=spec.layout.zero_stage - 1)) >= max(peaks())


NANOTRON, LIMIT = profile_of("nanotron").memory, {"share": 0.9, "pipeline_share": 0.9, "sigma": 0.0}


@pytest.mark.parametrize(
    ("framework", "values", "message"),
    [
        ("nanotron", NANOTRON | {"logitz": 1.0}, "logitz"),
        ("nanotron", {k: v for k, v in NANOTRON.items() if k != "logits"}, "memory lacks the key logits"),
        ("megatron", profile_of("megatron").memory | {"limit": LIMIT}, "sigma=0"),
    ],
)
def test_a_constant_that_is_unknown_missing_or_impossible_is_named(framework, values, message):
    with refused(match=message):
        memory_constants(framework, values)


def test_programs_add_gradients_up_in_their_formats_and_may_take_logits_at_once():
    of_bf16, of_fp16 = (
        RunSpec(
            shape=load_model("llama3.2-1b"), layout=Layout(dp=8, zero_stage=1), nodes=1, gpus_per_node=8,
            workload=Workload(seq_len=4096, gbs=8),
            kernel=KernelConfig(name="other", kind="command", command=("train",), precision=precision),
        )
        for precision in ("bf16", "fp16")
    )  # fmt: skip
    formats = constants("megatron", gradients=4.0, gradients_fp16=2.0)
    assert predict_memory(of_bf16, formats)[0].gradients == 2 * predict_memory(of_fp16, formats)[0].gradients
    layout = Layout(dp=8, zero_stage=3, mbs=2)
    chunks, whole = (
        predict_memory(spec_of(layout, "llama3.1-8b"), constants("ultrabench", whole_logits=width))[0].logits
        for width in (0.0, 16.0)
    )
    assert whole - 16 * 8192 * 128256 == pytest.approx(0, abs=0.01 * whole)
    assert chunks < 0.4 * whole
