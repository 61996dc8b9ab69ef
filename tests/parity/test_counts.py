"""What a step sends equals the formulas that dp.py, tp.py and pp.py state."""

import pytest

from tests.parity.test_layouts import SHALLOW, spec_of
from ultrabench.kernel.requests import TINY

pytestmark = pytest.mark.parity

Counts = dict[str, list[int]]
"""`axis operation` -> calls and payload bytes of one step of one rank."""
LAYERS = SHALLOW.num_hidden_layers
GROUPS = LAYERS + 2
TABLES = 4 * 2 * SHALLOW.embedding_params + 4 * SHALLOW.hidden_size
"""Bytes of embedding, norm and head, which ZeRO-3 gathers once a micro-batch."""
PARAM_BYTES = 4 * SHALLOW.num_params
GAS = 4
NORM = [1, 16]
"""The all-reduce of loss and gradient norm; an axis that spans the world shares its group."""


@pytest.fixture
def counted(server):
    """Counts of one step by rank, for a case of test_layouts."""
    return lambda case: server.ask("counts", spec_of(case))


ZERO = {
    0: {"dp_replicate all_reduce": [GROUPS + 1, PARAM_BYTES + 16]},
    1: {
        "dp_shard all_gather": [GROUPS, PARAM_BYTES],
        "dp_shard reduce_scatter": [GROUPS, PARAM_BYTES],
        "dp_shard all_reduce": NORM,
    },
    2: {
        "dp_shard all_gather": [GROUPS, PARAM_BYTES],
        "dp_shard reduce_scatter": [GROUPS * GAS, PARAM_BYTES * GAS],
        "dp_shard all_reduce": NORM,
    },
    3: {
        "dp_shard all_gather": [(GROUPS + LAYERS) * GAS, (2 * PARAM_BYTES - TABLES) * GAS],
        "dp_shard reduce_scatter": [GROUPS * GAS, PARAM_BYTES * GAS],
        "dp_shard all_reduce": NORM,
    },
}


@pytest.mark.parametrize("zero_stage", [0, 1, 2, 3])
def test_zero(counted, zero_stage):
    """The table of dp.py, with payloads of whole parameters."""
    for counts in counted(f"dp=2 gas={GAS} zero_stage={zero_stage}"):
        assert counts == ZERO[zero_stage]


def test_hybrid(counted):
    """The counts of ZeRO-3 among the shards, and one all-reduce a group and step of 1/shards of all bytes."""
    for counts in counted(f"dp=4 dp_shard=2 gas={GAS} zero_stage=3"):
        assert counts.pop("dp_replicate all_reduce") == [GROUPS, PARAM_BYTES // 2]
        assert counts.pop("world all_reduce") == NORM
        assert counts == {name: value for name, value in ZERO[3].items() if name != "dp_shard all_reduce"}


@pytest.mark.parametrize("gas", [1, 2])
def test_tensor_parallel(counted, gas):
    """6 gathers and 4 reduce-scatters a layer, 2 for embedding and head, B*S*H elements each.

    All-reduces: 2 for the loss of a micro-batch (maxima; sums and target logits), one for the
    gradients of all norms, and one for the gradient's norm.
    """
    block = 4 * 64 * TINY.hidden_size
    for counts in counted(f"tp=2 gas={gas}"):
        for op, of_a_layer in (("all_gather", 6), ("reduce_scatter", 4)):
            calls = (of_a_layer * LAYERS + 2) * gas
            assert counts.pop(f"tp {op}") == [calls, calls * block]
        calls, _ = counts.pop("tp all_reduce")
        assert calls == 2 * gas + 2
        assert counts == {}


def test_pipeline(counted):
    """Each of the two ranks sends and receives B*S*H elements once a micro-batch."""
    calls = [GAS, GAS * 4 * 64 * TINY.hidden_size]
    for counts in counted(f"pp=2 gas={GAS}"):
        assert counts == {"pp send": calls, "pp recv": calls, "pp all_reduce": NORM}


def test_tied_pipeline(counted):
    """Once a step both ends send each other their gradient of the tied embedding, which no other rank sees."""
    sent = GAS * 4 * 64 * TINY.hidden_size
    for rank, counts in enumerate(counted(f"pp=3 gas={GAS} tied")):
        tied = [1, 4 * TINY.embedding_params] if rank != 1 else [0, 0]
        passed = 1 if rank != 1 else 2
        calls = [passed * GAS + tied[0], passed * sent + tied[1]]
        assert counts == {"pp send": calls, "pp recv": calls, "pp all_reduce": NORM}


def test_zero3_pipeline(counted):
    """1+gas gathers a layer, gas of the embedding, one of the head; one reduce-scatter a group."""
    first, *_, last = counted(f"dp=2 pp=2 gas={GAS} zero_stage=3")
    assert first["dp_shard all_gather"][0] == 3 * (1 + GAS) + GAS
    assert first["dp_shard reduce_scatter"][0] == 3 + 1
    assert last["dp_shard all_gather"][0] == 1 * (1 + GAS) + 1
    assert last["dp_shard reduce_scatter"][0] == 1 + 1


def test_zero1_pipeline(counted):
    """Each group of a stage is gathered and reduced once."""
    first, *_, last = counted(f"dp=2 pp=2 gas={GAS} zero_stage=1")
    for counts, groups in ((first, 3 + 1), (last, 1 + 1)):
        assert counts["dp_shard all_gather"][0] == counts["dp_shard reduce_scatter"][0] == groups


def test_order(server):
    """Layer 0 is requested before the look-up of tokens, and gradients are reduced before the last backward ends."""
    first, *_, last = server.ask("order", spec_of("dp=2 pp=2 gas=2 zero_stage=3"))
    assert first[:3] == ["dp_shard all_gather", "dp_shard all_gather", "look-up"]
    assert last.index("dp_shard reduce_scatter") < max(i for i, name in enumerate(last) if name == "pp send")


def test_ring(counted):
    """cp.py: keys and values cp-1 times forward and as often backward, their gradients cp times."""
    cp = 4
    pair = 2 * 4 * TINY.kv_width * 64 // cp
    calls = LAYERS * (3 * cp - 2)
    for counts in counted(f"cp={cp}"):
        assert counts["cp send"] == counts["cp recv"] == [calls, calls * pair]


def test_recompute(counted):
    """A layer that runs forward again gathers and scatters again: 2 of each; a selective one keeps the sums."""
    (full, *_), (selective, *_) = counted("tp=2 full"), counted("tp=2 selective")
    (plain, *_) = counted("tp=2")
    assert full["tp all_gather"][0] == plain["tp all_gather"][0] + 2 * LAYERS
    assert full["tp reduce_scatter"][0] == plain["tp reduce_scatter"][0] + 2 * LAYERS
    assert selective["tp reduce_scatter"] == plain["tp reduce_scatter"]
