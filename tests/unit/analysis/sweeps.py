"""Sweeps made by hand, for tests of the analysis."""

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from ultrabench.analysis.collect import collect
from ultrabench.kernel_config import KernelConfig
from ultrabench.layout import Layout
from ultrabench.model_shape import ModelShape
from ultrabench.record import to_dict
from ultrabench.result import RunResult, Status
from ultrabench.run import RunSpec, Workload
from ultrabench.store.events import Claimed, Result
from ultrabench.store.folder import SweepFolder
from ultrabench.store.journal import JournalWriter
from ultrabench.store.sweep_json import SweepJson, write_sweep_json
from ultrabench.sweep.config.load import read_hardware

TINY = ModelShape(
    name="tiny", hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=4,
    intermediate_size=128, vocab_size=256, tie_word_embeddings=False,
)  # fmt: skip
GPUS = read_hardware({"name": "h100x8", "gpu": "H100-SXM"})
LAPTOP = read_hardware({"name": "laptop", "gpu": "cpu"})
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


def candidate(spec, decision="run", rule=None, reason=None):
    work = {"model": spec.shape.name, "gbs": spec.workload.gbs, "seq_len": spec.workload.seq_len}
    place = {"nodes": spec.nodes, "gpus_per_node": spec.gpus_per_node, "gpus": spec.layout.world_size}
    predicted = {
        "predicted_step_time_s": 0.5, "predicted_step_time_low_s": 0.5, "predicted_step_time_high_s": 0.5,
        "predicted_peak_mem_bytes": 1000, "predicted_memory_share": 1.0, "predicted_duration_s": 45.0,
        "predicted_limited_by": "compute",
    }  # fmt: skip
    price = {"predicted_gpu_hours": 0.1, "p_oom": 0.25}
    told = {"run_id": spec.run_id, "decision": decision, "rule": rule, "reason": reason}
    return to_dict(spec.layout) | work | place | predicted | price | told


def make_sweep(path, candidates, hardware=GPUS, peak=None, precision="bf16", kernel=None):
    folder = SweepFolder(path)
    folder.create()
    content = SweepJson(
        sweep=path.name, cluster="local", hardware=hardware,
        kernel=kernel or KernelConfig(name="embedded", precision=precision), kernel_digest="digest",
        models=(TINY,), workload=Workload(seq_len=128, gbs=128), provenance={"git_commit": "abc"}, config={},
        **(peak or {}),
    )  # fmt: skip
    write_sweep_json(folder, content)
    pq.write_table(pa.Table.from_pylist([{"order": i} | c for i, c in enumerate(candidates)]), folder.plan)
    return folder


def claim(writer, spec, repeat=0, attempt=0, result=None, allocation="a0"):
    key = {"run_id": spec.run_id, "repeat": repeat, "attempt": attempt}
    predicted = {"step_time_s": 0.4, "peak_mem_bytes": 2000, "p_oom": 0.1}
    writer.write(Claimed(allocation=allocation, spec=to_dict(spec), predicted=predicted, **key))
    if result is not None:
        writer.write(Result(source="agent", result=result, **key))


def rows_of(*folders, warn=lambda message: pytest.fail(message)):
    return collect(folders, warn).to_pylist()


SPECS = tuple(spec_of(layout) for layout in LAYOUTS)


def swept(path, *results):
    """A sweep of SPECS whose first runs were claimed and ended like this; None: not ended. With its journal's writer."""
    folder = make_sweep(path / "s", [candidate(spec) for spec in SPECS])
    writer = JournalWriter(folder.journal, "agent")
    for spec, result in zip(SPECS, results, strict=False):
        claim(writer, spec, result=result)
    return folder, writer
