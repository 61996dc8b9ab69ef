"""What a dry run says of a step is what the step costs real ranks."""

import json
import os
import subprocess
import sys
from dataclasses import replace

import pytest

from tests.parity.conftest import ROOT
from tests.parity.test_layouts import TINY, spec_of
from ultrabench.kernel.requests import SINGLE_THREADED, RankCost
from ultrabench.record import from_dict
from ultrabench.run import RunSpec
from ultrabench.stages import stages_by_rank
from ultrabench.sweep.config.load import load_profile
from ultrabench.sweep.predict.memory import memory_constants, predict_memory
from ultrabench.sweep.predict.ultrabench_memory import static_bytes

pytestmark = pytest.mark.parity

CLOSED_FORM = {"interleaved": 0.05, "zbv": 0.2}
"""Schedule -> largest error of the closed form of the peak; 2 % for the others."""
PEAK = 0.04
"""Real collectives hold their buffers until they are done, which is a little later."""
TRIES = 3
"""Buffers that gloo's thread releases late, on a loaded machine, only add to a peak: the smallest of so many counts."""

CASES = [
    "dp=1", "dp=2 gas=3 attention", "dp=2 zero_stage=1 gas=3", "dp=3 zero_stage=3 gas=2",
    "tp=2 gas=2 qwen", "dp=2 tp=2 zero_stage=3 tied", "dp=2 zero_stage=3 full", "tp=2 selective",
    "pp=2 gas=2 tied", "pp=4 gas=4 every2", "dp=2 pp=2 zero_stage=3 gas=3",
    "dp=2 zero_stage=2 gas=6", "pp=2 gas=12", "pp=2 gas=4 interleaved", "pp=2 gas=4 zbv", "pp=2 gas=1 zbv", "pp=2 gas=11 afab",
    "cp=2 gas=2", "cp=2 dp=2 zero_stage=3", "cp=2 tp=2", "dp=2 tp=2 pp=2 zero_stage=1 gas=2",
]  # fmt: skip


def costs(server, what, spec):
    """What a step costs each real rank, or by a dry run the first rank of each pipeline stage."""
    return [from_dict(RankCost, found) for found in server.ask(what, spec)]


@pytest.mark.parametrize("case", CASES)
def test_a_dry_run_equals_a_real_step(server, case):
    """Bytes between steps, FLOPs, calls and bytes of every collective exactly; the peak nearly."""
    spec = spec_of(case, TINY)  # in fewer layers, what a collective holds a little longer weighs more
    dry_run = costs(server, "dry costs", spec)
    assert [cost.pp_rank for cost in dry_run] == list(range(spec.layout.pp))
    run = replace(spec.run, kernel=replace(spec.run.kernel, precision="bf16"))  # as the costs are taken
    require_closed_form(run, dry_run)
    for _ in range(TRIES):
        real = costs(server, "costs", spec)
        pairs = [(dry, real[dry.rank]) for dry in dry_run]
        for dry, wet in pairs:
            assert dry.static_bytes == wet.static_bytes
            assert dry.hardware_flops == wet.hardware_flops
            assert dry.collectives == wet.collectives
            if spec.layout.world_size == spec.layout.pp:  # no buffers of a pipeline stay, however many gas is
                params = sum(
                    s.num_params(spec.shape) for s in stages_by_rank(spec.shape, spec.layout)[dry.pp_rank]
                )
                batch = 16 * spec.layout.gas * spec.layout.mbs * spec.seq_len  # its inputs and targets stay
                assert dry.static_bytes == pytest.approx(12 * params, rel=0.01, abs=batch)
        if all(wet.peak_bytes == pytest.approx(dry.peak_bytes, rel=PEAK) for dry, wet in pairs):
            break
    for dry, wet in pairs:
        assert dry.peak_bytes == pytest.approx(wet.peak_bytes, rel=PEAK)
    if spec.layout.cp == 1:  # a ring leaves out what is masked as a whole
        assert sum(dry.hardware_flops for dry in dry_run) == flops_of_one_rank_a_stage(spec)


def require_closed_form(run, dry_run):
    """The closed form of `sweep/predict/` gives what a dry run measures."""
    layout, constants = run.layout, memory_constants("ultrabench", load_profile("ultrabench").memory)
    error = CLOSED_FORM.get(layout.pp_schedule, 0.02)
    assert static_bytes(run) == pytest.approx([cost.static_bytes for cost in dry_run], rel=0.001)
    peaks = [stage.allocated_bytes for stage in predict_memory(run, constants)]
    assert peaks == pytest.approx([cost.peak_bytes for cost in dry_run], rel=error)


@pytest.mark.parametrize(
    ("seed", "families"),
    [("82", {"no", "1f1b", "interleaved"}), ("271", {"no", "1f1b", "afab", "interleaved"})],
)
def test_the_closed_form_holds_for_random_layouts(seed, families):
    """Samples of the benchmark: with and without a pipeline, its schedules but zbv, a ring, and all kinds of recomputation."""
    program = [sys.executable, "benchmarks/memory.py", "6", seed]
    env = os.environ | SINGLE_THREADED
    out = subprocess.run(program, cwd=ROOT, env=env, check=True, capture_output=True, text=True).stdout
    errors = {found["family"]: found["largest"] for found in map(json.loads, out.splitlines())}
    assert errors.pop("static") < 0.001
    assert {name.split()[0] for name in errors} == families
    for name, largest in errors.items():
        assert largest < CLOSED_FORM.get(name.split()[0], 0.02), name


def flops_of_one_rank_a_stage(spec):
    """6 for each parameter in a matrix product, and 14*L*h*s for attention, computed anew in backward."""
    shape, layout, run = spec.shape, spec.layout, spec.run
    attention = 14 * shape.num_hidden_layers * shape.q_width * run.workload.seq_len
    again = (layout.recompute != "none") * shape.num_hidden_layers // (layout.full_every or 1)
    more = again * recomputed_flops(run)
    return run.tokens_per_step * (6 * shape.num_matmul_params + attention + more) // (layout.dp * layout.tp)


def recomputed_flops(run):
    """FLOPs for each token that backward computes again in one layer.

    full: a forward of the layer, of which the last product is left out at tp=1, since nothing needs its result.
    selective: the products with k, out and up, and with tp > 1 also down. attention: its forward alone.
    """
    layout, shape = run.layout, run.shape
    attention = shape.attention_flops(run.workload.seq_len) / 3
    down = shape.hidden_size * shape.intermediate_size
    products = shape.hidden_size * (shape.kv_width + shape.q_width) + down * (2 if layout.tp > 1 else 1)
    if layout.full_every:
        return 2 * (shape.layer_matmul_params - (0 if layout.tp > 1 else down)) + attention
    return {"selective": 2 * products, "attention": attention}.get(layout.recompute, 0.0)


@pytest.mark.parametrize("tp", [1, 2])
def test_recomputation_keeps_what_docs_say(server, tp):
    """Numbers of each token by the table of docs/kernel.md, in bf16; the log-sums of attention are in the tolerance."""
    h, q, kv, f, layers, tokens = 64, 64, 32, 128, TINY.num_hidden_layers, 16 * 64 // tp
    whole, half = 4 * h + 2 * q + 2 * kv + 4 * f, h + 2 * q + kv + f + (2 * h if tp > 1 else 0)
    kept = {"attention": whole, "selective": half, "every2": (whole + h) / 2, "full": h}
    (plain,) = costs(server, "dry costs", spec_of(f"tp={tp} mbs=16", TINY))
    for word, numbers in kept.items():
        (found,) = costs(server, "dry costs", spec_of(f"tp={tp} mbs=16 {word}", TINY))
        saved = 2 * tokens * layers * (whole - numbers)
        assert plain.activation_bytes - found.activation_bytes == pytest.approx(
            saved, abs=0.01 * plain.activation_bytes
        )


def test_8b_on_64_gpus_fits_this_machine():
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
