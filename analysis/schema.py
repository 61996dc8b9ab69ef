"""The columns of runs.parquet: one table that gives the Arrow schema and docs/reference/columns.md.

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
where one of them was not, the whole cell is ranked by `tokens_per_s_per_gpu`. Runs of one layout compete if their
environments differ: what was chosen (`env`, the program) or what was observed (GPU, versions, `variables`), whose hash is
`env_id`. They are repeats of one run if they have one environment; environments of one sweep that differ only in the
driver count as one. Rankings, heatmap and page name what differs. Imported rows (with a `source`) that are
suspect are in the cell of their model, even if they have another architecture or batch. Models of one name with another
`model_id` are in other cells, and are named with its first digits. A run counts with the median of
its repeats, which are in different allocations. Runs are as good as the best where the intervals overlap; that
of a run spans the 95 % intervals of all its repeats and, in a ratio, of the control. `heatmap --json` says
`ranked_by` for each cell; `--rank-by COLUMN` ranks by another column.
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
        column("run_id", TEXT, "First 16 hex digits of the hash of everything that makes the run."),
        column("env_id", TEXT, "Hash of the environment: env, program, GPU, torch, CUDA, NCCL, driver, variables."),
        column("env", TEXT, "Variables that kernel.env gave the program, as a JSON object; secrets are redacted."),
        column("variables", TEXT, "Variables that rank 0 saw and that configure its libraries, as a JSON object."),
        column("repeat", INT, "Independent measurement of the run; null if never attempted."),
        column("attempt", INT, "Try of that repeat; null if never attempted."),
        column("kernel", TEXT, "Name of the training program."),
        column("kernel_version", TEXT, "Version of the training program; one that counts from 1, or its publisher's word."),
        column("kernel_digest", TEXT, "Hash of the program's sources."),
        column("cluster", TEXT, "Name of the site."),
        column("hardware", TEXT, "Name of the node type."),
        column("gpu_name", TEXT, "What the driver calls the accelerator."),
        column("nodes", INT, "Nodes of the run."),
        column("gpus_per_node", INT, "Ranks on each node."),
        column("gpus", INT, "Ranks altogether."),
    ),
    "Model": (
        column("model", TEXT, "What people call the model."),
        column("model_id", TEXT, "First 16 hex digits of the hash of its shape without its name; null: unknown, as in imported rows."),
        column("model_settings", TEXT, "What its shape has beside the columns of this group, without usual values, as a JSON object: rope_theta, scoring_func, ..."),
        column("num_params", INT, "All trainable parameters, tied weights counted once."),
        column("num_active_params", INT, "Parameters used for one token: without the experts that it does not pass."),
        column("hidden_size", INT, "Width of the residual stream."),
        column("num_hidden_layers", INT, "Decoder layers."),
        column("num_attention_heads", INT, "Query heads."),
        column("num_key_value_heads", INT, "Key and value heads; fewer than query heads in GQA."),
        column("intermediate_size", INT, "Width of the feed-forward block."),
        column("vocab_size", INT, "Rows of the embedding."),
        column("tie_word_embeddings", BOOL, "Whether embedding and lm_head are one matrix."),
        column("head_dim", INT, "Width of an attention head; null: hidden_size / num_attention_heads."),
        column("qk_norm", BOOL, "Whether queries and keys are normalised."),
        column("qk_norm_across_heads", BOOL, "Whether one norm spans all heads instead of one for each head."),
        column("attention_bias", BOOL, "Whether the projections of queries, keys and values have biases."),
        column("partial_rotary_factor", FLOAT, "Part of a head's width that positions rotate."),
        column("sliding_window", INT, "Positions that a token attends to; null: all earlier ones."),
        column("num_experts", INT, "Experts of a sparse layer; null here and in the next six columns: all layers are dense."),
        column("num_experts_per_tok", INT, "Experts that the router chooses for a token."),
        column("moe_intermediate_size", INT, "Width of an expert."),
        column("n_shared_experts", INT, "Experts that every token passes in addition."),
        column("first_k_dense_replace", INT, "Number of the first layers that are dense."),
        column("decoder_sparse_step", INT, "n if of the other layers only every n-th one of the model is sparse."),
        column("routing", TEXT, "How tokens choose their experts: balanced, learned or skew=A; null also for other programs."),
    ),
    "Layout": (
        *(column(name, TEXT if name in TEXT_AXES else INT, MEANINGS[name]) for name in AXES),
        column("zero_shards", INT, "Ranks among which ZeRO sharded: dp_shard, else dp*cp; 1 for zero_stage=0."),
        column("gbs", INT, "Sequences of a global batch: dp * mbs * gas."),
        column("scaling", TEXT, "weak: gbs grows with the nodes of the sweep; strong: it is the same on all."),
        column("seq_len", INT, "Tokens of a sequence."),
        column("precision", TEXT, "Arithmetic of forward and backward; fp8: of linear layers but the head, and bf16 of all else."),
        column("compile", BOOL, "Whether torch.compile was used; never with pp_schedule=zbv."),
        column("variant", TEXT, "Options that the sweep varies beside the layout, as a JSON object; see docs/reference/configuration.md."),
        column("first_values", TEXT, "First value that the sweep lists of each axis with several, as a JSON object."),
    ),
    "Outcome": (
        column("status", TEXT, "How it ended; null while pending or running."),
        column("is_final", BOOL, "This row stands for its (run_id, repeat)."),
        column("rule", TEXT, "First rule that rejects the layout."),
        column("reason", TEXT, "One line of evidence for anything but ok."),
        column("cause", TEXT, "What failed, more exactly than the status: cuda_oom, segfault, ..."),
        column("evidence", TEXT, "How each rank of a failure ended, its last words and the cause of a hang, as JSON."),
        column("fingerprint", TEXT, "Equal for the same failure wherever it happens."),
        column("confirmed", BOOL, "Whether the allocator's own record proves an oom."),
        column("suspect_hosts", TEXTS, "Hosts that a failure points at."),
        column("suspect", TEXT, "Why the number is in doubt, all reasons; such a row wins only if all measured runs of its cell are suspect. Else null."),
        column("suspect_codes", TEXTS, "The codes of these reasons, such as throttled or other_batch."),
        column("stopped", TEXT, "Why measuring ended: interval, max_steps, program, slower_than_best, time_limit."),
        column("dominated_by", TEXT, "The run_id whose outcome made this run pointless."),
        column("measured_by", TEXT, "report: the program's own report; log: read from its log."),
        column("ci_reached", BOOL, "Whether the interval of the step time met its target."),
        column("allocation", TEXT, "The allocation it ran in."),
        column("step_time_s", FLOAT, "Median time of an optimizer step."),
        column("step_times_s", FLOATS, "Measured steps in order, warm-up dropped."),
        column("step_time_ci95_rel", FLOAT, "Half 95 % interval of the median, relative; needs 6."),
        column("num_steps_measured", INT, "Length of step_times_s."),
        column("tokens_per_s", FLOAT, "gbs * seq_len / step_time_s."),
        column("tokens_per_s_per_gpu", FLOAT, "tokens_per_s / gpus."),
        column("mfu", FLOAT, "model_flops_per_s_per_gpu / peak_flops_per_s, a fraction: of the peak of the row's precision."),
        column("hfu", FLOAT, "Executed FLOPs over the peak, a fraction; null if not counted."),
        column("flops_formula", TEXT, "FLOPs of a token; palm: 6*N_matmul + 12*L*heads*head_dim*seq_len, with the N_matmul parameters in its matrix products, experts only where it passes them; megatron: 6*L for 12*L."),
        column("peak_flops_per_s", FLOAT, "Dense peak rate of one rank in its precision."),
        column("peak_source", TEXT, "Where the peak comes from; measured: by this machine itself."),
        column("peak_core_share", FLOAT, "Share of the CPU cores that its measurement had beside other programs; null: it was alone."),
        column("source_mfu", FLOAT, "MFU as the program itself (see kernels.md) or the publisher computed it, a fraction."),
        column("model_flops_per_s_per_gpu", FLOAT, "FLOPs of a token * tokens_per_s_per_gpu."),
        column("power_w_mean", FLOAT, "Mean power of a GPU over the measured steps, from its energy counter or its power; null if unknown."),
        column("energy_j_per_step", FLOAT, "power_w_mean * gpus * step_time_s: the GPUs' energy alone, without hosts and network."),
        column("tokens_per_j", FLOAT, "gbs * seq_len / energy_j_per_step."),
        column("cost_per_billion_tokens", FLOAT, "1e9 * price_per_gpu_hour of the cluster's file / (3600 * tokens_per_s_per_gpu), in its currency; null without a price."),
        column("control", TEXT, "The run_id of the allocation's control layout."),
        column("control_ratio", FLOAT, "Speed over that of the allocation's control layout."),
        column("graphs", INT, "Graphs that torch.compile made, the most of any rank; 0: layers ran eagerly."),
        column("attention", TEXT, "Attention that ran: cudnn, flash, flash3 or math."),
        column("attention_listed", TEXT, "Attention of the run among several that its sweep lists, such as auto; null where it lists one."),
        column("loss_final", FLOAT, "Loss at the step that all layouts of a cell have in common."),
        column("peak_mem_allocated_bytes", INT, "Largest of all ranks."),
        column("peak_mem_reserved_bytes", INT, "Largest of all ranks; on CPUs the resident set."),
        column("peak_mem_reserved_rank0_bytes", INT, "Value of rank 0 alone, as other benchmarks publish it."),
        column("allocator_retries", INT, "How often the allocator of a rank found its GPU full and gave unused memory back; the rank waits each time."),
        column("checkpoint_save_s", FLOAT, "Time of a synchronous save of parameters and optimizer, of the slowest rank; null here and in the next seven columns: not asked for, or see checkpoint_cause."),
        column("checkpoint_load_s", FLOAT, "Time of loading it; memory of the nodes may serve the files, so that storage alone is slower."),
        column("checkpoint_bytes", INT, "Bytes of the files of one save."),
        column("checkpoint_bytes_per_s_per_node", FLOAT, "checkpoint_bytes / nodes / checkpoint_save_s."),
        column("checkpoint_async_blocking_s", FLOAT, "Time for which an asynchronous save keeps training from its next step."),
        column("checkpoint_async_s", FLOAT, "Time until the asynchronous save has ended."),
        column("checkpoint_async_lost_steps", FLOAT, "What the steps beside the asynchronous save take longer, in units of step_time_s; without the time in which it blocks."),
        column("checkpoint_cause", TEXT, "Why a run has no numbers of a checkpoint: disk_full, disk_slow, or another cause; the run itself stays ok."),
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
        column("bandwidths", BANDWIDTHS, "All sizes and percentiles, of runs with kernel=probe; see guide/inside.md."),
        column("gemm_flops_per_s", FLOAT, "Matrix product rate of the slowest device."),
        column("gemm_sm_clock_hz", FLOAT, "Lowest SM clock of all devices during those matrix products; null on CPUs."),
        column("memory_copy_bytes_per_s", FLOAT, "Bytes read and written by a copy, of the slowest device."),
        column("node_gemm_flops_per_s", FLOATS, "Matrix product rate of each node in the preflight, of its slowest device."),
        column("node_memory_copy_bytes_per_s", FLOATS, "Bytes read and written by a copy, of the slowest device of each node."),
        column("sm_clock_hz", FLOAT, "Median SM clock over the measured steps."),
        column("foreign_load", FLOAT, "Largest share of a node's cores that other programs used during the steps, a fraction."),
        column("foreign_gpu_processes", TEXT, "Processes of others on the GPUs during the steps; null: none, or unknown."),
        column("throttled", BOOL, "Whether a device was throttled over the measured steps."),
    ),
    "Provenance": (
        column("source", TEXT, "Who measured an imported row, such as the name of its table; null for own runs."),
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
    """The type of a column in everyday words."""
    names = {INT: "integer", FLOAT: "number", BOOL: "true or false", TEXT: "text"}
    if pa.types.is_list(kind):
        return f"list of {names.get(kind.value_type, 'records')}"
    return names.get(kind, "time (UTC)")


if __name__ == "__main__":
    print(markdown(), end="")
