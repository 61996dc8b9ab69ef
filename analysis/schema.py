"""The columns of runs.parquet: one table that gives the Arrow schema and docs/reference/columns.md.

A row is one attempt, or a candidate that was never tried (`repeat` and `attempt` are null). A repeat is an
independent measurement of a run; an attempt is one try of a repeat. Every candidate of the plan has at least one row.
`is_final` marks one row of each repeat: its `ok` attempt, or else its latest. Units are in the names; `mfu` and similar
columns are fractions. Unknown values are null, never 0 or -1.

`status` is null while a run waits or runs; [rules](rules.md#statuses) lists the others. Speeds and `mfu` are given for
`ok`, and for runs that are `invalid` only because their loss differs from that of other layouts. The file's metadata
holds `ultrabench.schema_version` and each column's description. New columns keep the version; files of a newer version
are refused.

How the best run of a cell (model, batch, nodes, hardware, kernel, precision) is found:

- `ok` rows compete, except suspects and rows that were `stopped` as `slower_than_best`. If only suspects are left, they
  compete with each other.
- If all rows that compete were measured beside the same `control`, `control_ratio` ranks them: it cancels differences
  between nodes. Otherwise `tokens_per_s_per_gpu` ranks the whole cell. `heatmap --json` names the column
  (`ranked_by`); `--rank-by COLUMN` chooses another.
- A run counts with the median of its repeats. It is as good as the best if their intervals overlap. Its interval spans
  the 95 % intervals of all its repeats; in a ratio it also includes that of the control.
- Runs of one layout also compete if their environments differ: what was chosen (`env`, the program) or observed (GPU,
  versions, `variables`). `env_id` is the hash of both. Runs with the same environment are repeats of one run; within a
  sweep, the driver may differ.
- Models with the same name and different `model_id` are in different cells; their names show its first digits.
- A suspect imported row (with a `source`) stays in the cell where its publisher ranked it, even if its architecture or
  batch differs.
"""

import pyarrow as pa

from ultrabench.device_rates import MEASURED, OPERATIONS
from ultrabench.layout import AXES, MEANINGS, TEXT_AXES

RESULTS_SCHEMA_VERSION = 1
"""Version of result tables: new columns keep it, a changed meaning raises it, newer files are refused."""

VERSION_KEY = b"ultrabench.schema_version"
"""Key of the schema version in the metadata of a parquet file."""

TEXT, INT, FLOAT, BOOL = pa.string(), pa.int64(), pa.float64(), pa.bool_()
FLOATS, TEXTS, TIME = pa.list_(pa.float64()), pa.list_(pa.string()), pa.timestamp("us", tz="UTC")
LINK = pa.struct({"operation": TEXT, "scope": TEXT, **dict.fromkeys(MEASURED, FLOAT), "bytes": INT})
BANDWIDTHS = pa.list_(LINK)


def column(name: str, kind: pa.DataType, description: str) -> pa.Field:
    """A column: its name (with the unit), Arrow type and meaning."""
    return pa.field(name, kind, metadata={"description": description})


GROUPS: dict[str, tuple[pa.Field, ...]] = {
    "Identity": (
        column("schema_version", INT, "Version of this schema."),
        column("sweep", TEXT, "Name of the sweep."),
        column("run_id", TEXT, "First 16 hex digits of the hash of all that defines the run."),
        column("env_id", TEXT, "Hash of the environment: env, program, GPU, torch, CUDA, NCCL, driver, variables."),
        column("env", TEXT, "Variables that kernel.env gave the program, as JSON; secrets are redacted."),
        column("variables", TEXT, "Variables of rank 0 that configure its libraries, as JSON."),
        column("repeat", INT, "Number of the measurement; null if never attempted."),
        column("attempt", INT, "Number of the try; null if never attempted."),
        column("kernel", TEXT, "Name of the training program."),
        column("kernel_version", TEXT, "Version of the training program: 1, 2, ... or its publisher's version."),
        column("kernel_digest", TEXT, "Hash of the program's sources."),
        column("cluster", TEXT, "Name of the site."),
        column("hardware", TEXT, "Name of the node type."),
        column("gpu_name", TEXT, "Name of the accelerator by its driver."),
        column("nodes", INT, "Nodes of the run."),
        column("gpus_per_node", INT, "Ranks on each node."),
        column("gpus", INT, "Ranks altogether."),
    ),
    "Model": (
        column("model", TEXT, "Name of the model."),
        column("model_id", TEXT, "First 16 hex digits of the hash of its shape; null: unknown."),
        column("model_settings", TEXT, "Settings of the shape that have no column and differ from their defaults, as JSON, such as rope_theta."),
        column("num_params", INT, "All trainable parameters, tied weights counted once."),
        column("num_active_params", INT, "Parameters used for one token: without experts that the router does not choose."),
        column("hidden_size", INT, "Width of the residual stream."),
        column("num_hidden_layers", INT, "Decoder layers."),
        column("num_attention_heads", INT, "Query heads."),
        column("num_key_value_heads", INT, "Key and value heads."),
        column("intermediate_size", INT, "Width of the feed-forward block."),
        column("vocab_size", INT, "Rows of the embedding."),
        column("tie_word_embeddings", BOOL, "Whether embedding and lm_head are one matrix."),
        column("head_dim", INT, "Width of an attention head; null: hidden_size / num_attention_heads."),
        column("qk_norm", BOOL, "Whether queries and keys are normalised."),
        column("qk_norm_across_heads", BOOL, "Whether one norm spans all heads."),
        column("attention_bias", BOOL, "Whether the projections of queries, keys and values have biases."),
        column("partial_rotary_factor", FLOAT, "Fraction of the head width to which rotary positions apply."),
        column("sliding_window", INT, "Positions that a token attends to; null: all earlier ones."),
        column("num_experts", INT, "Experts of a sparse layer; null here and in the next six columns if all layers are dense."),
        column("num_experts_per_tok", INT, "Experts that the router chooses for a token."),
        column("moe_intermediate_size", INT, "Width of an expert."),
        column("n_shared_experts", INT, "Experts that every token passes."),
        column("first_k_dense_replace", INT, "Number of the first layers that are dense."),
        column("decoder_sparse_step", INT, "n: after the dense first layers, every n-th layer of the model is sparse."),
        column("routing", TEXT, "How tokens choose their experts: balanced, learned or skew=A; null also for other programs."),
    ),
    "Layout": (
        *(column(name, TEXT if name in TEXT_AXES else INT, MEANINGS[name]) for name in AXES),
        column("zero_shards", INT, "Ranks among which ZeRO sharded: dp_shard, else dp*cp; 1 for zero_stage=0."),
        column("gbs", INT, "Sequences of a global batch: dp * mbs * gas."),
        column("scaling", TEXT, "weak: gbs grows in proportion to the nodes; strong: gbs is the same for every node count."),
        column("seq_len", INT, "Tokens of a sequence."),
        column("precision", TEXT, "Arithmetic of forward and backward; fp8: of linear layers except the head, else bf16."),
        column("compile", BOOL, "Whether torch.compile was used; never with pp_schedule=zbv."),
        column("variant", TEXT, "Values that the sweep varies beside the layout, as JSON; see docs/reference/configuration.md."),
        column("first_values", TEXT, "Of each axis with several values in the sweep, the first, as JSON."),
    ),
    "Outcome": (
        column("status", TEXT, "How it ended; see docs/reference/rules.md."),
        column("is_final", BOOL, "Whether this row stands for its repeat."),
        column("rule", TEXT, "First rule that rejects the layout."),
        column("reason", TEXT, "One line of evidence for every status except ok."),
        column("cause", TEXT, "What failed, more exactly than the status: cuda_oom, segfault, ..."),
        column("evidence", TEXT, "How each rank of a failed run ended, its last log lines and the cause of a hang, as JSON."),
        column("fingerprint", TEXT, "Equal for the same failure on any node."),
        column("confirmed", BOOL, "Whether the rank's memory record proves that the run itself ran out of memory."),
        column("suspect_hosts", TEXTS, "Hosts that may have caused the failure."),
        column("suspect", TEXT, "All reasons to doubt the result, else null. A suspect row wins only a cell whose rows are all suspect."),
        column("suspect_codes", TEXTS, "The codes of these reasons, such as throttled or other_batch."),
        column("stopped", TEXT, "Why measuring ended: interval, max_steps, program, slower_than_best, time_limit."),
        column("dominated_by", TEXT, "run_id of the run that ran out of memory, so that this larger one was skipped."),
        column("measured_by", TEXT, "report: from the program's report; log: from its log."),
        column("ci_reached", BOOL, "Whether the interval of the step time met its target."),
        column("allocation", TEXT, "Name of the job that ran it."),
        column("step_time_s", FLOAT, "Median time of an optimizer step."),
        column("step_times_s", FLOATS, "Measured steps in order, warm-up dropped."),
        column("step_time_ci95_rel", FLOAT, "Half 95 % interval of the median, relative; needs 6."),
        column("num_steps_measured", INT, "Length of step_times_s."),
        column("tokens_per_s", FLOAT, "gbs * seq_len / step_time_s."),
        column("tokens_per_s_per_gpu", FLOAT, "tokens_per_s / gpus."),
        column("mfu", FLOAT, "model_flops_per_s_per_gpu / peak_flops_per_s, in the precision of the row."),
        column("hfu", FLOAT, "Executed FLOPs over the peak; null if not counted."),
        column("flops_formula", TEXT, "FLOPs of a token. palm: 6*N_matmul + 12*L*heads*head_dim*seq_len, where N_matmul counts the parameters in matrix products, of experts only the chosen ones. megatron: 6*L in place of 12*L."),
        column("peak_flops_per_s", FLOAT, "Dense peak rate of one rank in its precision."),
        column("peak_source", TEXT, "Source of the peak; measured: on this machine."),
        column("peak_core_share", FLOAT, "Fraction of the CPU cores that other programs left to this measurement; null: all."),
        column("source_mfu", FLOAT, "MFU that the program printed (kernel.mfu_line) or the publisher computed."),
        column("model_flops_per_s_per_gpu", FLOAT, "FLOPs of a token * tokens_per_s_per_gpu."),
        column("power_w_mean", FLOAT, "Mean power of a GPU over the measured steps."),
        column("energy_j_per_step", FLOAT, "power_w_mean * gpus * step_time_s: GPUs only, without hosts and network."),
        column("tokens_per_j", FLOAT, "gbs * seq_len / energy_j_per_step."),
        column("cost_per_billion_tokens", FLOAT, "1e9 * price_per_gpu_hour (of the cluster) / (3600 * tokens_per_s_per_gpu); null without a price."),
        column("control", TEXT, "run_id of the control layout of its job."),
        column("control_ratio", FLOAT, "Speed divided by that of the control layout of its job."),
        column("graphs", INT, "Most graphs that torch.compile made on a rank; 0: layers ran eagerly."),
        column("attention", TEXT, "Attention that ran: cudnn, flash, flash3 or math."),
        column("attention_listed", TEXT, "kernel.attention of the run, such as auto, if the sweep lists several; else null."),
        column("loss_final", FLOAT, "Loss at measure.loss_step, which all layouts of a cell reach."),
        column("gradient_norm", FLOAT, "Norm of the gradient of the first step."),
        column("peak_mem_allocated_bytes", INT, "Largest allocated memory of all ranks."),
        column("peak_mem_reserved_bytes", INT, "Largest reserved memory of all ranks; on CPUs the largest resident set."),
        column("peak_mem_reserved_rank0_bytes", INT, "Reserved memory of rank 0, as other benchmarks publish it."),
        column("allocator_retries", INT, "How often the allocator of a rank found its GPU full and returned unused memory, which takes time."),
        column("checkpoint_save_s", FLOAT, "Time in which the slowest rank saves parameters and optimizer synchronously; null here and in the next six columns: not measured (see checkpoint_cause)."),
        column("checkpoint_load_s", FLOAT, "Time of loading it; the page cache may serve the files, so storage alone is slower."),
        column("checkpoint_bytes", INT, "Bytes of the files of one save."),
        column("checkpoint_bytes_per_s_per_node", FLOAT, "checkpoint_bytes / nodes / checkpoint_save_s."),
        column("checkpoint_async_blocking_s", FLOAT, "Time for which an asynchronous save delays the next training step."),
        column("checkpoint_async_s", FLOAT, "Time of the whole asynchronous save."),
        column("checkpoint_async_lost_steps", FLOAT, "Extra time of the steps during the asynchronous save, in units of step_time_s, without checkpoint_async_blocking_s."),
        column("checkpoint_cause", TEXT, "Why an ok run has no checkpoint numbers: disk_full, disk_slow or another cause."),
        column("checkpoint_reason", TEXT, "One line of evidence for checkpoint_cause."),
        column("init_time_s", FLOAT, "From the start of the ranks to the end of the first step."),
        column("predicted_step_time_s", FLOAT, "Prediction made before the run."),
        column("predicted_peak_mem_bytes", INT, "Prediction made before the run."),
        column("p_oom", FLOAT, "Predicted probability of running out of memory."),
    ),
    "State of the cluster": (
        *(column(f"{operation}{scope}_busbw_bytes_per_s", FLOAT, f"Bus bandwidth {where}.")
          for scope, where in (("", "over all ranks"), ("_intra_node", "inside a node"))
          for operation in OPERATIONS),
        column("bandwidths", BANDWIDTHS, "All sizes and percentiles of runs with kernel=probe; see docs/guide/inside.md."),
        column("gemm_flops_per_s", FLOAT, "Matrix product rate of the slowest device."),
        column("gemm_sm_clock_hz", FLOAT, "Lowest SM clock of all devices during those matrix products; null on CPUs."),
        column("memory_copy_bytes_per_s", FLOAT, "Bytes read and written by a copy, of the slowest device."),
        column("node_gemm_flops_per_s", FLOATS, "Matrix product rate of the slowest device of each node."),
        column("node_memory_copy_bytes_per_s", FLOATS, "Bytes read and written by a copy, of each node's slowest device."),
        column("sm_clock_hz", FLOAT, "Median SM clock over the measured steps."),
        column("foreign_load", FLOAT, "Largest fraction of a node's cores that other programs used during the steps."),
        column("foreign_gpu_processes", TEXT, "Other processes on the GPUs during the steps; null: none or unknown."),
        column("throttled", BOOL, "Whether a device was throttled over the measured steps."),
    ),
    "Provenance": (
        column("source", TEXT, "Who measured an imported row, such as the name of its table; else null."),
        column("started_at", TIME, "Start of the ranks."),
        column("duration_s", FLOAT, "From the start of the ranks until all of them were gone."),
        column("gpu_hours", FLOAT, "duration_s * gpus / 3600."),
        column("job_id", TEXT, "Job id of the scheduler; null for local processes."),
        column("hostnames", TEXTS, "Hosts in node order."),
        column("git_commit", TEXT, "Commit of ultrabench that launched the sweep."),
        column("torch_version", TEXT, "Version of torch."),
        column("cuda_version", TEXT, "Version of CUDA."),
        column("nccl_version", TEXT, "Version of NCCL."),
        column("driver_version", TEXT, "Version of the GPU driver."),
    ),
}  # fmt: skip

CHECKPOINT = tuple(
    column.name
    for column in GROUPS["Outcome"]
    if column.name.startswith("checkpoint_") and column.type != TEXT
)
"""Columns with the numbers of a checkpoint."""
MODEL = tuple(column.name for column in GROUPS["Model"])
"""Columns that say which model a run trains."""
SIZES = tuple(name for name in MODEL if name not in ("model", "model_id", "model_settings", "routing"))
"""Those of them that are fields or properties of its shape."""
OF_EXPERTS = SIZES[SIZES.index("num_experts") :]
"""Those of them that only models with experts have."""

SCHEMA: pa.Schema = pa.schema(
    [column for group in GROUPS.values() for column in group],
    metadata={VERSION_KEY: str(RESULTS_SCHEMA_VERSION).encode()},
)


def markdown() -> str:
    """The text of docs/reference/columns.md: this module's docstring and a table for each group of columns."""
    heading = f"# The columns of runs.parquet\n\nSchema version {RESULTS_SCHEMA_VERSION}; printed by"
    about = str(__doc__).partition("\n\n")[2]
    parts = [f"{heading} `python -m ultrabench.analysis.schema`.\n\n{about}"]
    for group, columns in GROUPS.items():
        described = [(c, c.metadata[b"description"].decode()) for c in columns]
        lines = [f"| `{c.name}` | {type_name(c.type)} | {meaning} |" for c, meaning in described]
        parts.append("\n".join([f"## {group}\n", "| column | type | meaning |", "|---|---|---|", *lines, ""]))
    return "\n".join(parts)


def type_name(kind: pa.DataType) -> str:
    """The name of the type of a column in the table."""
    names = {INT: "integer", FLOAT: "number", BOOL: "boolean", TEXT: "text"}
    if pa.types.is_list(kind):
        return f"list[{names.get(kind.value_type, 'record')}]"
    return names.get(kind, "time (UTC)")


if __name__ == "__main__":
    print(markdown(), end="")
