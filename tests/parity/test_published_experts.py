"""The dry runs of published models with experts hold what a calculation by hand says, to the byte.

The sizes are those of the config.json of each model, and every layer is sparse. To be quick, the models have a
sixteenth of their layers here, and the rows of experts a smaller share of the activations than with all of them.
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

    @property
    def dense(self):
        """Parameters of all but the experts."""
        attention = 2 * self.hidden * (self.queries + self.keys) + self.head_norms
        layer = attention + 2 * self.hidden + self.experts * self.hidden
        return self.layers * layer + 2 * self.vocabulary * self.hidden + self.hidden

    @property
    def routed(self):
        """Parameters of all experts."""
        return self.layers * self.experts * 3 * self.hidden * self.width

    @property
    def params(self):
        return self.dense + self.routed


MIXTRAL = Published(32, 4096, 32 * 128, 8 * 128, 32000, 8, 2, 14336, 0)
QWEN3 = Published(48, 2048, 32 * 128, 4 * 128, 151936, 128, 8, 768, 2 * 128)


@pytest.mark.parametrize(
    ("name", "model", "dp", "total", "rows_share"),
    [("mixtral-8x7b", MIXTRAL, 8, 46_702_792_704, 0.42), ("qwen3-30b-a3b", QWEN3, 16, 30_532_122_624, 0.18)],
)
def test_a_rank_holds_what_a_calculation_by_hand_says(server, name, model, dp, total, rows_share):
    """With ZeRO-1 and ep=8: 12 bytes of each parameter shard, and 2 of each parameter that is gathered."""
    assert model.params == total
    run, _ = dryrun_spec(
        [f"model={name}", f"nodes={dp // 8}", f"dp={dp}", "ep=8", "zero_stage=1", f"seq_len={TOKENS}"]
    )
    model = dataclasses.replace(model, layers=model.layers // 16)
    run = dataclasses.replace(run, shape=dataclasses.replace(run.shape, num_hidden_layers=model.layers))
    cost = server.ask(dry_cost, run)
    dense, experts = model.dense, model.routed
    shard = dense // dp + experts // dp  # dp/ep ranks share the experts of each rank of ep
    tensors = model.layers * (4 + 2 * (model.head_norms > 0) + 2 + 1 + 3) + 3
    assert cost.optimizer_bytes == 8 * shard + 4 * tensors  # two moments, and the steps of each tensor
    assert cost.parameter_bytes == 4 * shard + 2 * (dense + experts // 8)
    route = 48 * model.chosen * TOKENS  # where the rows of all tokens go
    assert cost.static_bytes == pytest.approx(12 * shard + 4 * tensors + route, rel=1e-5)
    # The rest of the peak is what the layers keep: of each chosen expert its input and three products.
    rows = 2 * model.layers * TOKENS * model.chosen * (model.hidden + 3 * model.width)
    parts = cost.parameter_bytes + cost.optimizer_bytes + cost.gradient_bytes + cost.activation_bytes
    assert parts == cost.peak_bytes
    assert rows / cost.activation_bytes == pytest.approx(rows_share, abs=0.01)
