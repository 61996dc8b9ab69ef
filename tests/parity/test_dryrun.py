"""What a dry run says of a step is what the step costs real ranks."""

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from conftest import Server
from stepping import bf16
from test_layouts import spec_of

from ultrabench.kernel.dryrun_spec import RankCost, ask
from ultrabench.record import from_dict
from ultrabench.run import RunSpec

pytestmark = pytest.mark.parity

PEAK = 0.04
"""Real collectives hold their buffers until they are done, which is a little later."""

CASES = [
    "dp=1", "dp=2 gas=3", "dp=2 zero_stage=1 gas=3", "dp=2 zero_stage=2 gas=3", "dp=3 zero_stage=3 gas=2",
    "tp=2 gas=2", "dp=2 tp=2 zero_stage=3 tied", "dp=2 zero_stage=3 full", "tp=2 selective",
    "pp=2 gas=2 tied", "pp=4 gas=4", "pp=2 gas=4 interleaved", "pp=2 gas=4 zbv", "dp=2 pp=2 zero_stage=3 gas=3",
    "dp=2 zero_stage=2 gas=6", "dp=2 pp=2 zero_stage=1 gas=12", "pp=2 gas=8 interleaved", "pp=2 gas=11 zbv",
    "pp=2 gas=11 afab", "cp=2 gas=2", "cp=2 dp=2 zero_stage=3", "cp=2 tp=2", "dp=2 tp=2 pp=2 zero_stage=1 gas=2",
]  # fmt: skip


@pytest.fixture(scope="module")
def costs() -> Iterator[Callable[[str], list[list[RankCost]]]]:
    """Costs of all real ranks and of the dry-run ones, for a case of test_layouts."""
    with Server((sys.executable, "-P", str(Path(__file__).with_name("stepping.py")))) as server:
        yield lambda case: [[from_dict(RankCost, c) for c in some] for some in server.ask(spec_of(case))]


@pytest.mark.parametrize("case", CASES)
def test_a_dry_run_equals_a_real_step(costs: Callable[[str], list[list[RankCost]]], case: str) -> None:
    """Bytes between steps, FLOPs, calls and bytes of every collective exactly; the peak nearly."""
    real, dry_run = costs(case)
    assert [cost.pp_rank for cost in dry_run] == list(range(spec_of(case).layout.pp))
    for dry in dry_run:
        wet = real[dry.rank]
        assert dry.static_bytes == wet.static_bytes
        assert dry.hardware_flops == wet.hardware_flops
        assert dry.collectives == wet.collectives
        assert dry.peak_bytes == pytest.approx(wet.peak_bytes, rel=PEAK)


@pytest.mark.parametrize("case", ["dp=2 zero_stage=3 gas=2", "tp=2", "pp=2 gas=4", "pp=2 gas=4 zbv tied"])
def test_flops_are_those_of_the_formula(case: str) -> None:
    """6 for each parameter in a matrix product, and 14*L*h*s for attention, computed anew in backward."""
    spec = bf16(spec_of(case))
    shape, layout = spec.shape, spec.layout
    attention = 14 * shape.num_hidden_layers * shape.hidden_size * spec.workload.seq_len
    expected = spec.tokens_per_step * (6 * shape.num_matmul_params + attention)
    one_rank_a_stage = sum(cost.hardware_flops for cost in ask(spec))
    assert one_rank_a_stage * layout.dp * layout.tp == expected


def test_8b_on_64_gpus_fits_this_machine() -> None:
    """The command's answer: masters and moments are 12 bytes a parameter, spread over all ranks."""
    words = "model=llama3-8b nodes=8 tp=8 zero_stage=3 --json"
    command = [sys.executable, "-P", "-m", "ultrabench.cli.main", "kernel", "dryrun", *words.split()]
    found = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)
    (stage,) = found["stages"]
    params = from_dict(RunSpec, found["spec"]).shape.num_params
    assert stage["static_bytes"] == pytest.approx(12 * params / 64, rel=1e-3)
    parts = ("parameter", "gradient", "optimizer", "activation")
    assert sum(stage[f"{part}_bytes"] for part in parts) == stage["peak_bytes"] == found["peak_bytes"]
    assert stage["model_flops"] * 64 == found["model_flops"] < found["hardware_flops"]
