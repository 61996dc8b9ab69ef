"""Sweeps made by hand, for tests of the analysis."""

from itertools import zip_longest

import pytest

from tests import sweep_folder
from tests.sweep_folder import make_folder, write
from ultrabench.analysis.results.collect import collect
from ultrabench.kernel_config import KernelConfig
from ultrabench.layout import Layout
from ultrabench.model_shape import ModelShape
from ultrabench.result import RunResult, Status
from ultrabench.run import RunSpec, Workload
from ultrabench.store.sweep_json import SweepJson
from ultrabench.sweep.candidate import Candidate
from ultrabench.sweep.config.load import read_hardware
from ultrabench.sweep.predict.predict import Prediction

TINY = ModelShape(
    name="tiny", hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=4,
    intermediate_size=128, vocab_size=256, tie_word_embeddings=False,
)  # fmt: skip
GPUS = read_hardware({"name": "h100x8", "gpu": "H100-SXM"})
LAYOUTS = tuple(Layout(dp=8, zero_stage=z, mbs=m, gas=16 // m) for z in (0, 1) for m in (1, 2, 4, 8))
OK = RunResult(
    status=Status.OK, step_times_s=(0.3, 0.1, 0.2), hardware_flops_per_step=4e12, duration_s=90.0,
    hostnames=("n0",), started_at=0.0,
)  # fmt: skip


def spec_of(layout, kernel=None, nodes=1, gpus_per_node=8):
    return RunSpec(
        shape=TINY, workload=Workload(seq_len=128, gbs=layout.gbs), layout=layout,
        kernel=kernel or KernelConfig(name="embedded", precision="bf16"), nodes=nodes,
        gpus_per_node=gpus_per_node,
    )  # fmt: skip


PREDICTED = Prediction(
    step_time_s=0.5, step_time_low_s=0.5, step_time_high_s=0.5, peak_mem_bytes=1000, memory_share=1.0, p_oom=0.25,
    limited_by="compute", duration_s=45.0,
)  # fmt: skip


def make_sweep(path, specs, why=(), hardware=GPUS, peak=None, precision="bf16", kernel=None, models=(TINY,)):
    """A sweep that was planned and not begun; `why` has the rule and the reason for which the
    first specs do not run.
    """
    candidates = [
        Candidate(
            run_id=spec.run_id, spec=spec, rule=rule, reason=reason, predicted=PREDICTED, flops_formula="palm"
        )
        for spec, (rule, reason) in zip_longest(specs, why, fillvalue=(None, None))
    ]
    content = SweepJson(
        sweep=path.name, cluster="local", hardware=hardware,
        kernel=kernel or KernelConfig(name="embedded", precision=precision), kernel_digest="digest",
        models=models, workload=Workload(seq_len=128, gbs=128), provenance={"git_commit": "abc"}, config={},
        **(peak or {}),
    )  # fmt: skip
    return make_folder(path, content, candidates)


def attempted(spec, result=None, repeat=0, attempt=0, allocation="a0"):
    """What the journal says of an attempt that was predicted."""
    predicted = {"step_time_s": 0.4, "peak_mem_bytes": 2000, "p_oom": 0.1}
    return sweep_folder.attempted(spec, result, repeat, attempt, allocation, predicted=predicted)


def rows_of(*folders, warn=lambda message: pytest.fail(message)):
    return collect(folders, warn).to_pylist()


def values(row, expected):
    """What a row holds in the columns that are expected."""
    return {name: row[name] for name in expected}


SPECS = tuple(spec_of(layout) for layout in LAYOUTS)


def swept(path, *results, specs=SPECS):
    """A sweep of specs whose first runs were claimed and ended like this; None: not ended."""
    folder = make_sweep(path / "s", specs)
    events = (event for words in zip(specs, results, strict=False) for event in attempted(*words))
    write(folder, *events)
    return folder
