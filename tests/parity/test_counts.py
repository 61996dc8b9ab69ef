"""What a step in bf16 sends equals the formulas that dp.py, tp.py, cp.py, ep.py and pp.py state.

In bf16 the bytes say in which precision something travels: NARROW for what products take and give, and WIDE for what
is added up.
"""

from functools import cache

import pytest

from tests.parity.server import compiled_losses, counted, tokens_of_experts
from tests.parity.test_layouts import LATENT, MOE, SHALLOW, spec_of
from ultrabench.kernel.requests import TINY

pytestmark = pytest.mark.parity

LAYERS = SHALLOW.num_hidden_layers
GROUPS = LAYERS + 2
NARROW, WIDE = 2, 4
"""Bytes of a number of bf16 and of fp32."""
TABLES = NARROW * (2 * SHALLOW.embedding_params + SHALLOW.hidden_size)
"""Bytes of embedding, norm and head, which ZeRO-3 gathers once a micro-batch."""
PARAM_BYTES, GRADIENT_BYTES = NARROW * SHALLOW.num_params, WIDE * SHALLOW.num_params
GAS = 4
TOKENS = 64
BLOCK = NARROW * TOKENS * TINY.hidden_size
"""Bytes of B*S*H elements."""
LOSS_BYTES = WIDE * 3 * TOKENS
"""Bytes of the all-reduces of the loss of a micro-batch whose vocabulary is cut: maxima; sums and target logits."""
NORM = [1, 16]
"""The all-reduce of loss and gradient norm; an axis that spans the world shares its group."""
GATHERED = [(GROUPS + LAYERS) * GAS, (2 * PARAM_BYTES - TABLES) * GAS]
REDUCED = [GROUPS * GAS, GRADIENT_BYTES * GAS]
PASSED = [GAS, GAS * BLOCK]
"""Each of two pipeline ranks sends and receives B*S*H elements once a micro-batch."""
TIED = [GAS + 1, GAS * BLOCK + WIDE * TINY.embedding_params]
"""Once a step both ends send each other their gradient of the tied embedding, which no other rank sees."""
BETWEEN = [2 * GAS, 2 * GAS * BLOCK]
STEP = {
    "dp=2 zero_stage=0": [{"dp_replicate all_reduce": [GROUPS + 1, GRADIENT_BYTES + 16]}] * 2,
    "dp=2 zero_stage=1": [
        {"dp_shard all_gather": [GROUPS, PARAM_BYTES], "dp_shard reduce_scatter": [GROUPS, GRADIENT_BYTES],
            "dp_shard all_reduce": NORM}
    ] * 2,
    "dp=2 zero_stage=2": [
        {"dp_shard all_gather": [GROUPS, PARAM_BYTES], "dp_shard reduce_scatter": REDUCED, "dp_shard all_reduce": NORM}
    ] * 2,
    "dp=2 zero_stage=3": [
        {"dp_shard all_gather": GATHERED, "dp_shard reduce_scatter": REDUCED, "dp_shard all_reduce": NORM}
    ] * 2,
    "dp=4 dp_shard=2 zero_stage=3": [
        {"dp_shard all_gather": GATHERED, "dp_shard reduce_scatter": REDUCED, "world all_reduce": NORM,
         "dp_replicate all_reduce": [GROUPS, GRADIENT_BYTES // 2]}
    ] * 4,
    "pp=2": [{"pp send": PASSED, "pp recv": PASSED, "pp all_reduce": NORM}] * 2,
    "pp=3 tied": [{"pp send": sent, "pp recv": sent, "pp all_reduce": NORM} for sent in (TIED, BETWEEN, TIED)],
}  # fmt: skip
"""Layout -> of each rank `axis operation` -> calls and payload bytes of a step; the table of dp.py, with payloads of
whole parameters."""


@cache
def counted_once(server, fault, spec):
    """What `counted` says of a spec; tests that look at the same step share it. `fault` is that of the server."""
    return server.ask(counted, spec)


def counted_of(server, case):
    """Of each rank the counts and the order of the operations of a step."""
    ranks = counted_once(server, server.fault, spec_of(case))
    assert not isinstance(ranks, str), ranks
    return [(dict(counts), names) for counts, names in ranks]


def counts_of(server, case):
    return [counts for counts, _ in counted_of(server, case)]


@pytest.mark.parametrize("case", STEP)
def test_step(server, case):
    counts = counts_of(server, f"{case} gas={GAS}")
    assert counts == STEP[case]


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.campaign)])
def test_the_compiled_loss_of_a_cut_vocabulary_is_that_of_one_process(server, backend):
    for loss_diff, grad_diff in server.ask(compiled_losses, spec_of("tp=2"), backend):
        assert loss_diff < 1e-12
        assert grad_diff < 1e-15


@pytest.mark.parametrize("case", ["gas=1", "gas=2 uneven biased"])
def test_tensor_parallel(server, case):
    """6 gathers and 4 reduce-scatters a layer, 2 for embedding and head, B*S*H elements each.

    All-reduces: 2 for the loss of a micro-batch (maxima; sums and target logits), one for the
    gradients of all norms, and one for the gradient's norm. Once a step 4 a layer sum the gradients of weights and
    biases of a key/value head that both ranks hold. All of them are wide.
    """
    spec = spec_of(f"tp=2 {case}")
    gas, copied = spec.layout.gas, spec.shape.num_key_value_heads == 1
    gathers, scatters = (6 * LAYERS + 2) * gas, (4 * LAYERS + 2) * gas
    for counts in counts_of(server, f"tp=2 {case}"):
        calls, reduced_bytes = counts.pop("tp all_reduce")
        assert calls == 2 * gas + 2 + 4 * LAYERS * copied
        norms, heads = (
            (2 * LAYERS + 1) * TINY.hidden_size,
            2 * LAYERS * (TINY.hidden_size + 1) * TINY.head_width,
        )
        assert reduced_bytes == 16 + gas * LOSS_BYTES + WIDE * (norms + heads * copied)
        assert counts == {
            "tp all_gather": [gathers, gathers * BLOCK], "tp reduce_scatter": [scatters, scatters * BLOCK]
        }  # fmt: skip


def test_without_sequence_parallelism_all_reduces_take_the_place_of_all_gathers(server):
    """4 a layer and micro-batch, one after the look-up and one for the gradient of what the head gets: narrow ones.

    Norms have all tokens on each rank, so that nothing is summed once a step but the gradient's norm.
    """
    gas = 2
    for counts in counts_of(server, f"tp=2 gas={gas} sequence_parallel=off"):
        calls = gas * (4 * LAYERS + 2)
        assert counts == {"tp all_reduce": [calls + 2 * gas + 1, calls * BLOCK + gas * LOSS_BYTES + 16]}


def test_a_split_backward_computes_and_gathers_each_half_once(server):
    """A layer and micro-batch has 7 products, with experts 8 and 3 for each expert, and twice as many in backward.

    A split backward gathers twice more. The first rank has the first stage with the dense layer, and the last stage
    with 3 products of the head; it splits no backward here. The second rank splits all.
    """
    first, _, second, _ = counted_of(server, f"tp=2 pp=2 gas={GAS} zbv moe")
    of_sparse_layer = 8 + 3 * MOE.num_experts
    sparse_layers = TINY.num_hidden_layers - 1
    cases = ((first, 1, 6, 2, 3 * 7 + 3), (second, sparse_layers, 8, 0, 3 * sparse_layers * of_sparse_layer))
    for (counts, names), layers, gathers, at_ends, products in cases:
        calls = GAS * (layers * gathers + at_ends)
        assert counts["tp all_gather"] == [calls, calls * BLOCK]
        scatters = GAS * (layers * 4 + at_ends)
        assert counts["tp reduce_scatter"] == [scatters, scatters * BLOCK]
        assert counts["pp send"] == counts["pp recv"] == [2 * GAS, 2 * GAS * BLOCK // 2]
        assert names.count("product") == GAS * products


@pytest.mark.parametrize(
    ("zero_stage", "of_first", "of_last"),
    [(1, [3 + 1, 3 + 1], [1 + 1, 1 + 1]), (3, [3 * (1 + GAS) + GAS, 3 + 1], [1 * (1 + GAS) + 1, 1 + 1])],
)
def test_zero_of_pipelines(server, zero_stage, of_first, of_last):
    """ZeRO-1 gathers each group of a stage once; ZeRO-3 a layer 1+gas times, the embedding gas times, the head once.

    Both reduce each group once.
    """
    first, *_, last = counts_of(server, f"dp=2 pp=2 gas={GAS} zero_stage={zero_stage}")
    for counts, calls in ((first, of_first), (last, of_last)):
        assert [counts[f"dp_shard {op}"][0] for op in ("all_gather", "reduce_scatter")] == calls


def test_order(server):
    """Layer 0 is requested before the look-up of tokens, and gradients are reduced before the last backward ends."""
    (_, first), *_, (_, last) = counted_of(server, f"dp=2 pp=2 gas={GAS} zero_stage=3")
    assert first[:3] == ["dp_shard all_gather", "dp_shard all_gather", "look-up"]
    assert last.index("dp_shard reduce_scatter") < max(i for i, name in enumerate(last) if name == "pp send")


def test_latents_are_gathered_instead_of_tokens(server):
    """Before attention and again in backward, which scatters their gradients: 52 channels instead of 64."""
    latents = NARROW * TOKENS * (LATENT.q_lora_rank + LATENT.kv_lora_rank + LATENT.qk_rope_head_dim)
    for counts in counts_of(server, "tp=2 mla dense"):
        assert counts["tp all_gather"] == [6 * LAYERS + 2, LAYERS * (4 * BLOCK + 2 * latents) + 2 * BLOCK]
        assert counts["tp reduce_scatter"] == [4 * LAYERS + 2, LAYERS * (3 * BLOCK + latents) + 2 * BLOCK]


def test_a_ring_sends_keys_and_values_of_two_widths(server):
    """Without the zeros that an implementation of attention adds to values."""
    pair = LATENT.num_attention_heads * sum(LATENT.head_widths) * TOKENS // 2
    sent = LAYERS * (2 * NARROW + 2 * WIDE) * pair
    for counts in counts_of(server, "cp=2 mla dense"):
        assert counts["cp send"] == counts["cp recv"] == [4 * LAYERS, sent]


def test_ring(server):
    """cp.py: keys and values cp-1 times forward and as often backward, their wide gradients cp times."""
    cp, pair = 4, 2 * TINY.kv_width * TOKENS // 4
    sent = LAYERS * pair * (2 * (cp - 1) * NARROW + cp * WIDE)
    for counts in counts_of(server, f"cp={cp}"):
        assert counts["cp send"] == counts["cp recv"] == [LAYERS * (3 * cp - 2), sent]


def test_gathered_keys_and_values(server):
    """cp.py: keys and values of all ranks are gathered in forward and in backward; their wide gradients are summed."""
    gas, pairs = 2, 2 * TINY.kv_width * TOKENS
    for counts in counts_of(server, f"cp=2 gas={gas} cp_exchange=allgather"):
        layers = gas * LAYERS
        assert counts["cp all_gather"] == [2 * layers, 2 * layers * NARROW * pairs]
        assert counts["cp reduce_scatter"] == [layers, layers * WIDE * pairs]


def test_recompute(server):
    """A layer that runs forward again gathers and scatters again: 2 of each; a selective one keeps the sums."""
    cases = "gas=1", "full", "selective"
    plain, full, selective = (counts_of(server, f"tp=2 {case}")[0] for case in cases)
    assert full["tp all_gather"][0] == plain["tp all_gather"][0] + 2 * LAYERS
    assert full["tp reduce_scatter"][0] == plain["tp reduce_scatter"][0] + 2 * LAYERS
    assert selective["tp reduce_scatter"] == plain["tp reduce_scatter"]


@pytest.mark.parametrize(
    ("recompute", "gathers", "scatters"), [("none", 6, 4), ("selective", 8, 4), ("full", 8, 5)]
)
def test_compiled_tensor_parallel(server, recompute, gathers, scatters):
    """Collectives of a compiled layer: as many as eager, but full computes no sum again that no backward needs."""
    counts, *_ = counts_of(server, f"tp=2 mbs=2 compile {recompute}")
    assert counts["tp all_gather"][0] == gathers * LAYERS + 2
    assert counts["tp reduce_scatter"][0] == scatters * LAYERS + 2


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_expert_parallel(server, recompute):
    """ep.py: rows of T*k*H elements travel 4 times a sparse layer and micro-batch, their wide scores twice.

    A layer that runs forward again sends both to the experts again, but not the results back. Nothing is copied.
    """
    extra = int(recompute == "full")
    gas, rows = 2, TOKENS * MOE.num_experts_per_tok
    sent = gas * rows * ((4 + extra) * NARROW * MOE.hidden_size + (2 + extra) * WIDE)
    for counts, names in counted_of(server, f"dp=2 ep=2 gas={gas} moe {recompute}"):
        assert counts["ep all_to_all"] == [gas * (6 + 2 * extra), sent]
        assert names.count("copy") == 0
        assert names.count("rows") == gas * (12 + 4 * (recompute != "none")), (
            "rows are sorted once on each way"
        )


def test_experts_are_gathered_early_and_reduced_wide(server):
    """They are requested with their layer: in forward before the first product of the layer before, and in backward
    beside that of the head, whose gradients are reduced afterwards.

    Half of the experts are gathered from two ranks, and their gradients are reduced to two.
    """
    elements = 3 * MOE.num_experts * MOE.hidden_size * MOE.moe_intermediate_size // 2
    for counts, names in counted_of(server, "dp=4 ep=2 zero_stage=3 moe"):
        assert counts["expert_shard all_gather"] == [2, 2 * NARROW * elements]
        assert counts["expert_shard reduce_scatter"] == [1, WIDE * elements]
        first, second = (i for i, name in enumerate(names) if name == "expert_shard all_gather")
        sent = [i for i, name in enumerate(names) if name == "ep all_to_all"]
        assert first < names.index("product")
        assert sent[2] < second < names.index("dp_shard reduce_scatter") < sent[3]


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_tokens_of_experts_are_counted_once(server, recompute):
    """The counts by which routers are balanced, on each rank: k for each token of its micro-batches."""
    gas = 2
    for counted_tokens in server.ask(
        tokens_of_experts, spec_of(f"dp=2 ep=2 gas={gas} moe routing=learned {recompute}")
    ):
        assert counted_tokens == [gas * 64 * MOE.num_experts_per_tok]


@pytest.mark.parametrize("mode", ["eager", "compile"])
def test_tensor_parallel_overlaps(server, mode):
    """Backward gathers beside the products that make the input's gradient, and scatters it beside the weights'.

    Nothing is added or copied between; the one copy of a step is of the maxima of the loss.
    """
    (_, names), *_ = counted_of(server, f"tp=2 mbs=2 {mode}")
    for weights in (2, 3):
        products = ["product"] * weights
        backward = " ".join(("tp all_gather", *products, "tp reduce_scatter", *products))
        assert " ".join(names).count(backward) == LAYERS
    assert names.count("copy") == 1
