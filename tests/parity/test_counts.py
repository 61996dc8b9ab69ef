"""What a step sends equals the formulas that dp.py, tp.py, cp.py and pp.py state."""

import pytest

from tests.parity.server import compiled_losses, counted, tokens_of_experts
from tests.parity.test_layouts import LATENT, MOE, SHALLOW, spec_of
from ultrabench.kernel.requests import TINY

pytestmark = pytest.mark.parity

LAYERS = SHALLOW.num_hidden_layers
GROUPS = LAYERS + 2
TABLES = 4 * 2 * SHALLOW.embedding_params + 4 * SHALLOW.hidden_size
"""Bytes of embedding, norm and head, which ZeRO-3 gathers once a micro-batch."""
PARAM_BYTES = 4 * SHALLOW.num_params
GAS = 4
BLOCK = 4 * 64 * TINY.hidden_size
"""Bytes of B*S*H elements."""
NORM = [1, 16]
"""The all-reduce of loss and gradient norm; an axis that spans the world shares its group."""
GATHERED = [(GROUPS + LAYERS) * GAS, (2 * PARAM_BYTES - TABLES) * GAS]
REDUCED = [GROUPS * GAS, PARAM_BYTES * GAS]
PASSED = [GAS, GAS * BLOCK]
"""Each of two pipeline ranks sends and receives B*S*H elements once a micro-batch."""
TIED = [GAS + 1, GAS * BLOCK + 4 * TINY.embedding_params]
"""Once a step both ends send each other their gradient of the tied embedding, which no other rank sees."""
BETWEEN = [2 * GAS, 2 * GAS * BLOCK]
STEP = {
    "dp=2 zero_stage=0": [{"dp_replicate all_reduce": [GROUPS + 1, PARAM_BYTES + 16]}] * 2,
    "dp=2 zero_stage=1": [
        {"dp_shard all_gather": [GROUPS, PARAM_BYTES], "dp_shard reduce_scatter": [GROUPS, PARAM_BYTES],
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
         "dp_replicate all_reduce": [GROUPS, PARAM_BYTES // 2]}
    ] * 4,
    "pp=2": [{"pp send": PASSED, "pp recv": PASSED, "pp all_reduce": NORM}] * 2,
    "pp=3 tied": [{"pp send": sent, "pp recv": sent, "pp all_reduce": NORM} for sent in (TIED, BETWEEN, TIED)],
}  # fmt: skip
"""Layout -> of each rank `axis operation` -> calls and payload bytes of a step; the table of dp.py, with payloads of
whole parameters."""


def counts_of(server, case):
    return [counts for counts, _ in server.ask(counted, spec_of(case))]


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
    biases of a key/value head that both ranks hold.
    """
    spec = spec_of(f"tp=2 {case}")
    gas, copied = spec.layout.gas, spec.shape.num_key_value_heads == 1
    gathers, scatters = (6 * LAYERS + 2) * gas, (4 * LAYERS + 2) * gas
    for counts in counts_of(server, f"tp=2 {case}"):
        calls, _ = counts.pop("tp all_reduce")
        assert calls == 2 * gas + 2 + 4 * LAYERS * copied
        assert counts == {
            "tp all_gather": [gathers, gathers * BLOCK], "tp reduce_scatter": [scatters, scatters * BLOCK]
        }  # fmt: skip


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
    (_, first), *_, (_, last) = server.ask(counted, spec_of("dp=2 pp=2 gas=2 zero_stage=3"))
    assert first[:3] == ["dp_shard all_gather", "dp_shard all_gather", "look-up"]
    assert last.index("dp_shard reduce_scatter") < max(i for i, name in enumerate(last) if name == "pp send")


def test_latents_are_gathered_instead_of_tokens(server):
    """Before attention and again in backward, which scatters their gradients: 52 channels instead of 64."""
    latents = 4 * 64 * (LATENT.q_lora_rank + LATENT.kv_lora_rank + LATENT.qk_rope_head_dim)
    for counts in counts_of(server, "tp=2 mla dense"):
        assert counts["tp all_gather"] == [6 * LAYERS + 2, LAYERS * (4 * BLOCK + 2 * latents) + 2 * BLOCK]
        assert counts["tp reduce_scatter"] == [4 * LAYERS + 2, LAYERS * (3 * BLOCK + latents) + 2 * BLOCK]


def test_a_ring_sends_keys_and_values_of_two_widths(server):
    """Without the zeros that an implementation of attention adds to values."""
    pair = 4 * LATENT.num_attention_heads * sum(LATENT.head_widths) * 64 // 2
    for counts in counts_of(server, "cp=2 mla dense"):
        assert counts["cp send"] == counts["cp recv"] == [4 * LAYERS, 4 * LAYERS * pair]


def test_ring(server):
    """cp.py: keys and values cp-1 times forward and as often backward, their gradients cp times."""
    cp = 4
    calls, pair = LAYERS * (3 * cp - 2), 2 * 4 * TINY.kv_width * 64 // cp
    for counts in counts_of(server, f"cp={cp}"):
        assert counts["cp send"] == counts["cp recv"] == [calls, calls * pair]


def test_recompute(server):
    """A layer that runs forward again gathers and scatters again: 2 of each; a selective one keeps the sums."""
    plain, full, selective = (
        counts_of(server, f"tp=2 {recompute}")[0] for recompute in ("none", "full", "selective")
    )
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
    """ep.py: rows of T*k*H elements travel 4 times a sparse layer and micro-batch, their scores twice.

    A layer that runs forward again sends both to the experts again, but not the results back.
    """
    extra = int(recompute == "full")
    gas, tokens, chosen = 2, 64, MOE.num_experts_per_tok
    sent = gas * ((4 + extra) * 4 * tokens * chosen * MOE.hidden_size + (2 + extra) * 4 * tokens * chosen)
    for counts in counts_of(server, f"dp=2 ep=2 gas={gas} moe {recompute}"):
        assert counts["ep all_to_all"] == [gas * (6 + 2 * extra), sent]


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
    (_, names), *_ = server.ask(counted, spec_of(f"tp=2 mbs=2 {mode}"))
    for weights in (2, 3):
        products = ["product"] * weights
        backward = " ".join(("tp all_gather", *products, "tp reduce_scatter", *products))
        assert " ".join(names).count(backward) == LAYERS
    assert names.count("copy") == 1
