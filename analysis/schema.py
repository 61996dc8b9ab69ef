"""The columns of runs.parquet: one table that gives the Arrow schema and docs/results-schema.md.

A row is one attempt of one repeat of a run, or a candidate that was never attempted (`repeat` and
`attempt` are null). Every candidate of the plan has at least one row. `is_final` marks the one row
that stands for a (run_id, repeat): its ok attempt, else its latest. Units are in the names; `mfu`
and its like are fractions. What is not known is null, never 0 or -1.

`status` is null while a run waits or runs; `rejected` when a rule or the kernel forbids the layout (`rule`,
`reason`); `skipped` when a decision made it pointless; else `ok`, `oom`, `hang`, `timeout`,
`comm_error`, `crash`, `node_fail`, `preempted`, `cancelled`, `lost` or `invalid`. Speeds and `mfu`
are given for `ok`, and for a run that is `invalid` only because its loss differs from that of other layouts.
The file's metadata holds the version (`ultrabench.schema_version`) and each column's description. New columns
keep the version; a file of a newer version is refused.

How the best of a cell (model, batch, nodes, hardware, kernel) is found: `ok` rows compete, without suspects
and without those that were `stopped` as `slower_than_best`. Where each of them was measured beside one and the
same `control`, they are ranked by `control_ratio`, which takes out what the nodes of an allocation were worth;
where one of them was not, the whole cell is ranked by `tokens_per_s_per_gpu`. A run counts with the median of
its repeats, which are in different allocations. Runs are as good as the best where the intervals overlap; that
of a run spans the 95 % intervals of all its repeats and, in a ratio, of the control. `heatmap --json` says
`ranked_by` for each cell; `--rank-by COLUMN` ranks by another column.
"""

from typing import NamedTuple

import pyarrow as pa

from ultrabench.device_rates import OPERATIONS
from ultrabench.layout import AXES, MEANINGS, TEXT_AXES

RESULTS_SCHEMA_VERSION = 1
"""Version of result tables: new columns keep it, a changed meaning raises it, newer files are refused."""

VERSION_KEY = b"ultrabench.schema_version"
"""Key of the schema version in the metadata of a parquet file."""

TEXT, INT, FLOAT, BOOL = pa.string(), pa.int64(), pa.float64(), pa.bool_()
FLOATS, TEXTS, TIME = pa.list_(pa.float64()), pa.list_(pa.string()), pa.timestamp("us", tz="UTC")
BANDWIDTHS = pa.list_(pa.struct({
    "operation": TEXT, "scope": TEXT, "bytes": INT, "seconds": FLOAT, "busbw_bytes_per_s": FLOAT,
    "busbw_p5_bytes_per_s": FLOAT, "busbw_p95_bytes_per_s": FLOAT,
}))  # fmt: skip


class Column(NamedTuple):
    """One column: its name (with the unit), Arrow type and meaning."""

    name: str
    type: pa.DataType
    description: str


GROUPS: dict[str, tuple[Column, ...]] = {
    "Identity": (
        Column("schema_version", INT, "Version of this schema."),
        Column("sweep", TEXT, "Name of the sweep."),
        Column("run_id", TEXT, "First 16 hex digits of the hash of everything that makes the run."),
        Column("env_id", TEXT, "Hash of where it ran: GPU, torch, CUDA, NCCL, driver, kernel."),
        Column("repeat", INT, "Independent measurement of the run; null if never attempted."),
        Column("attempt", INT, "Try of that repeat; null if never attempted."),
        Column("kernel", TEXT, "Name of the training program."),
        Column("kernel_digest", TEXT, "Hash of the program's sources."),
        Column("cluster", TEXT, "Name of the site."),
        Column("hardware", TEXT, "Name of the node type."),
        Column("gpu_name", TEXT, "What the driver calls the accelerator."),
        Column("nodes", INT, "Nodes of the run."),
        Column("gpus_per_node", INT, "Ranks on each node."),
        Column("gpus", INT, "Ranks altogether."),
    ),
    "Model": (
        Column("model", TEXT, "What people call the model."),
        Column("num_params", INT, "All trainable parameters, tied weights counted once."),
        Column("num_active_params", INT, "Parameters used for one token."),
        Column("hidden_size", INT, "Width of the residual stream."),
        Column("num_hidden_layers", INT, "Decoder layers."),
        Column("num_attention_heads", INT, "Query heads."),
        Column("num_key_value_heads", INT, "Key and value heads; fewer than query heads in GQA."),
        Column("intermediate_size", INT, "Width of the feed-forward block."),
        Column("vocab_size", INT, "Rows of the embedding."),
        Column("tie_word_embeddings", BOOL, "Whether embedding and lm_head are one matrix."),
    ),
    "Layout": (
        *(Column(name, TEXT if name in TEXT_AXES else INT, MEANINGS[name]) for name in AXES),
        Column("gbs", INT, "Sequences of a global batch: dp * mbs * gas."),
        Column("seq_len", INT, "Tokens of a sequence."),
        Column("recompute", TEXT, "Activation recomputation: none, selective or full."),
        Column("precision", TEXT, "Arithmetic of forward and backward."),
        Column("compile", BOOL, "Whether torch.compile was used."),
    ),
    "Outcome": (
        Column("status", TEXT, "How it ended; null while pending or running."),
        Column("is_final", BOOL, "This row stands for its (run_id, repeat)."),
        Column("rule", TEXT, "First rule that rejects the layout."),
        Column("reason", TEXT, "One line of evidence for anything but ok."),
        Column("cause", TEXT, "What failed, more exactly than the status: cuda_oom, segfault, ..."),
        Column("fingerprint", TEXT, "Equal for the same failure wherever it happens."),
        Column("confirmed", BOOL, "Whether the allocator's own record proves an oom."),
        Column("suspect_hosts", TEXTS, "Hosts that a failure points at."),
        Column("suspect", TEXT, "Why the number is in doubt, all reasons; such a row wins no cell. Else null."),
        Column("stopped", TEXT, "Why measuring ended: interval, max_steps, program, slower_than_best, time_limit."),
        Column("dominated_by", TEXT, "The run_id whose outcome made this run pointless."),
        Column("measured_by", TEXT, "report: the program's own report; log: read from its log."),
        Column("ci_reached", BOOL, "Whether the interval of the step time met its target."),
        Column("allocation", TEXT, "The allocation it ran in."),
        Column("step_time_s", FLOAT, "Median time of an optimizer step."),
        Column("step_times_s", FLOATS, "Measured steps in order, warm-up dropped."),
        Column("step_time_ci95_rel", FLOAT, "Half 95 % interval of the median, relative; needs 6."),
        Column("num_steps_measured", INT, "Length of step_times_s."),
        Column("tokens_per_s", FLOAT, "gbs * seq_len / step_time_s."),
        Column("tokens_per_s_per_gpu", FLOAT, "tokens_per_s / gpus."),
        Column("mfu", FLOAT, "model_flops_per_s_per_gpu / peak_flops_per_s, a fraction."),
        Column("hfu", FLOAT, "Executed FLOPs over the peak, a fraction; null if not counted."),
        Column("flops_formula", TEXT, "FLOPs of a token; matmul-v1: 6*N_matmul + 12*L*h*seq_len."),
        Column("peak_flops_per_s", FLOAT, "Dense peak rate of one rank."),
        Column("peak_source", TEXT, "Where the peak comes from; measured: by this machine itself."),
        Column("source_mfu", FLOAT, "MFU as its publisher computed it, a fraction."),
        Column("model_flops_per_s_per_gpu", FLOAT, "FLOPs of a token * tokens_per_s_per_gpu."),
        Column("control", TEXT, "The run_id of the allocation's control layout."),
        Column("control_ratio", FLOAT, "Speed over that of the allocation's control layout."),
        Column("loss_final", FLOAT, "Loss at the step that all layouts of a cell have in common."),
        Column("peak_mem_allocated_bytes", INT, "Largest of all ranks."),
        Column("peak_mem_reserved_bytes", INT, "Largest of all ranks; on CPUs the resident set."),
        Column("peak_mem_reserved_rank0_bytes", INT, "Value of rank 0 alone, as other benchmarks publish it."),
        Column("init_time_s", FLOAT, "From the start of the ranks to the end of the first step."),
        Column("predicted_step_time_s", FLOAT, "Prediction made before the run."),
        Column("predicted_peak_mem_bytes", INT, "Prediction made before the run."),
        Column("p_oom", FLOAT, "Predicted probability of running out of memory."),
    ),
    "State of the cluster": (
        *(Column(f"{operation}{scope}_busbw_bytes_per_s", FLOAT, f"Bus bandwidth {where}.")
          for scope, where in (("", "over all ranks"), ("_intra_node", "inside a node"))
          for operation in OPERATIONS),
        Column("bandwidths", BANDWIDTHS, "All sizes and percentiles, of runs with kernel=probe; see comm.md."),
        Column("gemm_flops_per_s", FLOAT, "Matrix product rate of the slowest device."),
        Column("memory_copy_bytes_per_s", FLOAT, "Bytes read and written by a copy, of the slowest device."),
        Column("sm_clock_hz", FLOAT, "Median SM clock over the measured steps."),
        Column("throttled", BOOL, "Whether a device was throttled over the measured steps."),
    ),
    "Provenance": (
        Column("started_at", TIME, "Start of the ranks."),
        Column("duration_s", FLOAT, "From the start of the ranks until all of them were gone."),
        Column("gpu_hours", FLOAT, "duration_s * gpus / 3600."),
        Column("job_id", TEXT, "Job id of the scheduler; null for local processes."),
        Column("hostnames", TEXTS, "Hosts in node order."),
        Column("git_commit", TEXT, "Commit of ultrabench that launched the sweep."),
        Column("torch_version", TEXT, "Version of torch."),
        Column("cuda_version", TEXT, "Version of CUDA."),
        Column("nccl_version", TEXT, "Version of NCCL."),
        Column("driver_version", TEXT, "Version of the GPU driver."),
    ),
}  # fmt: skip

MODEL = tuple(column.name for column in GROUPS["Model"])
"""Columns that say which model a run trains."""

COLUMNS: tuple[Column, ...] = tuple(column for group in GROUPS.values() for column in group)

SCHEMA: pa.Schema = pa.schema(
    [pa.field(c.name, c.type, metadata={"description": c.description}) for c in COLUMNS],
    metadata={VERSION_KEY: str(RESULTS_SCHEMA_VERSION).encode()},
)


def markdown() -> str:
    """The text of docs/results-schema.md: this module's docstring and a table for each group of columns."""
    heading = f"# The columns of runs.parquet\n\nSchema version {RESULTS_SCHEMA_VERSION}; printed by"
    meaning = str(__doc__).partition("\n\n")[2]
    parts = [f"{heading} `python -m ultrabench.analysis.schema`.\n\n{meaning}"]
    for group, columns in GROUPS.items():
        lines = [f"| `{c.name}` | {_type_name(c.type)} | {c.description} |" for c in columns]
        parts.append("\n".join([f"## {group}\n", "| column | type | meaning |", "|---|---|---|", *lines, ""]))
    return "\n".join(parts)


def _type_name(kind: pa.DataType) -> str:
    """The type of a column in everyday words."""
    names = {INT: "integer", FLOAT: "number", BOOL: "true or false", TEXT: "text"}
    if pa.types.is_list(kind):
        return f"list of {names.get(kind.value_type, 'records')}"
    return names.get(kind, "time (UTC)")


if __name__ == "__main__":
    print(markdown(), end="")
