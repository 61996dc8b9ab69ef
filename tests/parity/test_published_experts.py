"""The dry runs of published models with experts hold what a calculation by hand says, to the byte.

The sizes are those of the config.json of each model, and every layer is sparse.
"""

import dataclasses

import pytest

from tests.parity.server import dry_cost
from ultrabench.cli.kernel.dryrun import dryrun_spec

pytestmark = pytest.mark.parity

TOKENS = 4096


@dataclasses.dataclass(frozen=True)
class Published:
    layers: int
    hidden: int
    queries: int
    keys: int
    vocabulary: int
    experts: int
    chosen: int
    width: int
    head_norms: int
    """Elements of the norms of queries and keys."""


MIXTRAL = Published(32, 4096, 32 * 128, 8 * 128, 32000, 8, 2, 14336, 0)
QWEN3 = Published(48, 2048, 32 * 128, 4 * 128, 151936, 128, 8, 768, 2 * 128)


@pytest.mark.parametrize(
    ("name", "model", "dp", "total", "rows_share"),
    [("mixtral-8x7b", MIXTRAL, 8, 46_702_792_704, 0.74), ("qwen3-30b-a3b", QWEN3, 16, 30_532_122_624, 0.53)],
)
def test_a_rank_holds_what_a_calculation_by_hand_says(server, name, model, dp, total, rows_share):
    """With ZeRO-1 and ep=8: 12 bytes of each parameter shard, and 2 of each parameter that is gathered."""
    h, ep = model.hidden, 8
    attention = 2 * h * model.queries + 2 * h * model.keys + model.head_norms
    dense = model.layers * (attention + 2 * h + model.experts * h) + 2 * model.vocabulary * h + h
    experts = model.layers * model.experts * 3 * h * model.width
    assert dense + experts == total
    run, _ = dryrun_spec(
        [f"model={name}", f"nodes={dp // 8}", f"dp={dp}", f"ep={ep}", "zero_stage=1", f"seq_len={TOKENS}"]
    )
    cost = server.ask(dry_cost, run)
    shard = dense // dp + experts // dp  # dp/ep ranks share the experts of each rank of ep
    tensors = model.layers * (4 + 2 * (model.head_norms > 0) + 2 + 1 + 3) + 3
    assert (
        cost.optimizer_bytes == 8 * shard + 4 * tensors
    )  # two moments, and the number of steps of each tensor
    assert cost.parameter_bytes == 4 * shard + 2 * (dense + experts // ep)
    batch = 16 * TOKENS
    assert cost.static_bytes == pytest.approx(12 * shard + 4 * tensors + batch, rel=1e-4)
    # The rest of the peak is what the layers keep: of each chosen expert its input and three products.
    rows = 2 * model.layers * TOKENS * model.chosen * (h + 3 * model.width)
    parts = cost.parameter_bytes + cost.optimizer_bytes + cost.gradient_bytes + cost.activation_bytes
    assert parts == cost.peak_bytes
    assert rows / cost.activation_bytes == pytest.approx(rows_share, abs=0.01)
