"""The dry runs of published models with experts hold what a calculation by hand says, to the byte.

Every layer is sparse. To be quick, the models have a sixteenth of their layers here, and the rows of experts a
smaller share of the activations than with all of them.
"""

import dataclasses

import pytest

from tests.parity.server import dry_cost
from ultrabench.cli.kernel.dryrun import dryrun_spec

pytestmark = pytest.mark.parity

TOKENS = 4096


def params_of(shape):
    """Parameters of all but the experts, and of all experts."""
    h, layers = shape.hidden_size, shape.num_hidden_layers
    heads = shape.num_attention_heads + shape.num_key_value_heads
    attention = 2 * h * 128 * heads + 2 * 128 * shape.qk_norm
    layer = attention + 2 * h + shape.num_experts * h
    routed = layers * shape.num_experts * 3 * h * shape.moe_intermediate_size
    return layers * layer + 2 * shape.vocab_size * h + h, routed


@pytest.mark.parametrize(
    ("name", "dp", "total", "rows_share"),
    [("mixtral-8x7b", 8, 46_702_792_704, 0.42), ("qwen3-30b-a3b", 16, 30_532_122_624, 0.18)],
)
def test_a_rank_holds_what_a_calculation_by_hand_says(server, name, dp, total, rows_share):
    """With ZeRO-1 and ep=8: 12 bytes of each parameter shard, and 2 of each parameter that is gathered."""
    words = [f"model={name}", f"nodes={dp // 8}", f"dp={dp}", "ep=8", "zero_stage=1", f"seq_len={TOKENS}"]
    run, _ = dryrun_spec(words)
    assert sum(params_of(run.shape)) == total
    layers, chosen = run.shape.num_hidden_layers // 16, run.shape.num_experts_per_tok
    run = dataclasses.replace(run, shape=dataclasses.replace(run.shape, num_hidden_layers=layers))
    cost, (dense, experts) = server.ask(dry_cost, run), params_of(run.shape)
    shard = dense // dp + experts // dp  # dp/ep ranks share the experts of each rank of ep
    tensors = layers * (4 + 2 * run.shape.qk_norm + 2 + 1 + 3) + 3
    assert cost.optimizer_bytes == 8 * shard + 4 * tensors  # two moments, and the steps of each tensor
    assert cost.parameter_bytes == 4 * shard + 2 * (dense + experts // 8)
    route = 48 * chosen * TOKENS  # where the rows of all tokens go
    assert cost.static_bytes == pytest.approx(12 * shard + 4 * tensors + route, rel=1e-5)
    # The rest of the peak is what the layers keep: of each chosen expert its input and three products.
    rows = 2 * layers * TOKENS * chosen * (run.shape.hidden_size + 3 * run.shape.moe_intermediate_size)
    parts = cost.parameter_bytes + cost.optimizer_bytes + cost.gradient_bytes + cost.activation_bytes
    assert parts == cost.peak_bytes
    assert rows / cost.activation_bytes == pytest.approx(rows_share, abs=0.01)
