"""The columns of runs.parquet: one table that gives the Arrow schema and docs/reference/columns.md.

A row is one attempt, or a [candidate](../design/architecture.md#words) that was never tried (`repeat` and `attempt` are
null). A repeat is an independent measurement of a run; an attempt is one try of a repeat. Every candidate of the plan
has at least one row. `is_final` marks one row of each repeat: its `ok` attempt, or else its latest. Units are in the
names; `mfu` and similar columns are fractions. Unknown values are null, never 0 or -1; some columns give null another
meaning.

`status` is null while a run is pending or running; [rules](rules.md#statuses) lists the others. `ok` rows have speeds
and `mfu`. So do `invalid` rows whose only fault is a loss unlike that of other layouts. The file's metadata holds
each column's description and `ultrabench.schema_version`, which new columns keep; newer versions are refused.

How ultrabench finds the best run of a cell (model, batch, nodes, hardware, kernel, precision, routing):

- `ok` rows compete, except suspect rows and rows `stopped` as `slower_than_best`. If only suspect rows are left, they
  compete.
- If all competing rows have one `control` and environment, `control_ratio` ranks them, otherwise
  `tokens_per_s_per_gpu`. `heatmap --json` names the column (`ranked_by`); `--rank-by COLUMN` chooses another.
- Rows of a plan are ranked by `tokens_per_s_per_gpu` * (1 - `p_oom`), as `sweep plan --top` and `recommend` rank them.
  Those without room for the allocator's reserve are suspect where others have room.
- The value of a run is the median of its repeats (of an even number, between the two middle ones); so are the speeds and
  step times that answers show. Its interval covers the 95 % intervals of their step times;
  for `control_ratio` these include the control's. A run is as good as the best if their intervals overlap.
- An environment is what was chosen (`env`, the program) and observed (GPU, versions, `variables`); `env_id` hashes it.
  Measurements of a run in one environment are repeats; in two, they compete. Within a sweep, a driver update makes no
  new environment.
- Models with one name and different `model_id` have separate cells, named with the first digits of the id.
- GPUs that fill no whole number of nodes, such as 4 of 8, have a cell of their own.
- An imported row (with a `source`) that is suspect for its sizes or batch belongs to the cell of its source's other rows
  for that model.
"""

import pyarrow as pa

from ultrabench.device_rates import LINK_FIELDS, OPERATIONS
from ultrabench.layout import AXES, MEANINGS, TEXT_AXES

RESULTS_SCHEMA_VERSION = 1
"""Version of result tables: new columns keep it, a changed meaning raises it, newer files are refused."""

VERSION_KEY = b"ultrabench.schema_version"
"""Key of the schema version in the metadata of a parquet file."""

TEXT, INT, FLOAT, BOOL = pa.string(), pa.int64(), pa.float64(), pa.bool_()
FLOATS, TEXTS, TIME = pa.list_(pa.float64()), pa.list_(pa.string()), pa.timestamp("us", tz="UTC")
LINK = pa.struct({"operation": TEXT, "scope": TEXT, **dict.fromkeys(LINK_FIELDS, FLOAT), "bytes": INT})
BANDWIDTHS = pa.list_(LINK)


def column(name: str, kind: pa.DataType, description: str) -> pa.Field:
    """A column: its name (with the unit), Arrow type and meaning."""
    return pa.field(name, kind, metadata={"description": description})


GROUPS: dict[str, tuple[pa.Field, ...]] = {
    "Identity": (
        column("schema_version", INT, "Version of this schema."),
        column("sweep", TEXT, "Name of the sweep."),
        column("sweep_key", TEXT, "Eight hex digits by which trackers know the sweep, also after it was renamed."),
        column("run_id", TEXT, "First 16 hex digits of the hash of everything that defines the run."),
        column("env_id", TEXT, "Hash of the environment: env, program, GPU, torch, CUDA, NCCL, driver, variables."),
        column("env", TEXT, "Environment variables that kernel.env set for the program, as JSON; secrets are redacted."),
        column("variables", TEXT, "Environment variables of rank 0 for its libraries, as JSON."),
        column("repeat", INT, "Number of the measurement, from 0; null if never attempted."),
        column("attempt", INT, "Number of the try, from 0; null if never attempted."),
        column("kernel", TEXT, "Name of the training program."),
        column("kernel_version", TEXT, "Version of the training program: 1, 2, ... or its publisher's version."),
        column("kernel_digest", TEXT, "Hash of the program's sources."),
        column("cluster", TEXT, "Name of the site (cluster=NAME). Attempts of a launch with Slurm that names none have Slurm's ClusterName."),
        column("hardware", TEXT, "Name of the node type."),
        column("gpu_name", TEXT, "Name of the accelerator, as its driver reports it."),
        column("nodes", INT, "Nodes of the run; all their GPUs are used unless gpus is smaller."),
        column("gpus_per_node", INT, "Ranks per node."),
        column("gpus", INT, "Ranks in total."),
    ),
    "Model": (
        column("model", TEXT, "Name of the model."),
        column("model_id", TEXT, "First 16 hex digits of the hash of its shape; null: unknown."),
        column("model_settings", TEXT, "Other settings of the shape that differ from their defaults, as JSON, such as rope_theta."),
        column("num_params", INT, "All trainable parameters, tied weights counted once."),
        column("num_active_params", INT, "Parameters used for one token: only the chosen experts count."),
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
        column("n_shared_experts", INT, "Experts that every token passes through."),
        column("first_k_dense_replace", INT, "Number of dense layers at the start of the model."),
        column("decoder_sparse_step", INT, "n: layers n, 2n, ... of the model (counted from 1) are sparse, except the dense layers at the start."),
        column("routing", TEXT, "How tokens choose their experts: balanced, learned or skew=A; null also for programs other than kernel=embedded."),
    ),
    "Layout": (
        *(column(name, TEXT if name in TEXT_AXES else INT, MEANINGS[name]) for name in AXES),
        column("zero_shards", INT, "Ranks among which ZeRO sharded: dp_shard, else dp*cp; 1 for zero_stage=0."),
        column("gbs", INT, "Sequences of a global batch: dp * mbs * gas."),
        column("scaling", TEXT, "weak: gbs grows in proportion to the nodes; strong: gbs is the same for every node count."),
        column("seq_len", INT, "Tokens of a sequence."),
        column("precision", TEXT, "Arithmetic of forward and backward; fp8: only linear layers without the head, the rest is bf16."),
        column("compile", BOOL, "Whether torch.compile was used; never with pp_schedule=zbv."),
        column("variant", TEXT, "Environment variables, flags, words, container and interpreter that the sweep varies, as JSON; see docs/reference/configuration.md. option.NAME: column NAME of an imported table."),
        column("first_values", TEXT, "First listed value of each axis with several values, as JSON: the baseline of effects."),
    ),
    "Outcome": (
        column("status", TEXT, "How the attempt ended; see docs/reference/rules.md."),
        column("is_final", BOOL, "Whether this row represents its repeat."),
        column("rule", TEXT, "First rule that rejects the layout."),
        column("reason", TEXT, "One line of evidence for every status except ok."),
        column("cause", TEXT, "What failed, in more detail than the status: cuda_oom, segfault, ..."),
        column("evidence", TEXT, "How each rank of a failed run ended, its last log lines and the cause of a hang, as JSON."),
        column("fingerprint", TEXT, "Hash of the failure, equal on all nodes and ranks."),
        column("confirmed", BOOL, "For oom: whether the rank's memory record proves that the run, not another process, filled the memory."),
        column("suspect_hosts", TEXTS, "Hosts that this attempt alone makes suspects of the failure."),
        column("began_on", TEXTS, "Hosts on which the failure began, where a node can be at fault."),
        column("suspect", TEXT, "Why the result is suspect; null if it is not. A suspect row wins only if all ok rows of its cell are suspect."),
        column("suspect_codes", TEXTS, "Codes of the reasons in suspect, such as throttled or other_batch."),
        column("stopped", TEXT, "Why measuring ended: interval (narrow enough), max_steps, program (it ended), slower_than_best, time_limit."),
        column("dominated_by", TEXT, "run_id of a run that ran out of memory, for which this larger run was skipped."),
        column("measured_by", TEXT, "Where step times come from: report (the program's report), log (times or rates in its log), arrival (of lines of its log)."),
        column("ci_reached", BOOL, "Whether the interval of the step time met its target."),
        column("allocation", TEXT, "Name of the allocation (job) that ran the attempt."),
        column("step_time_s", FLOAT, "Median time of an optimizer step."),
        column("step_times_s", FLOATS, "Times of the measured steps in order, without the warm-up."),
        column("step_time_ci95_rel", FLOAT, "Half the 95 % interval of step_time_s, as a fraction of it; needs 6 steps. With measured_by=arrival it contains the delay with which lines are seen."),
        column("num_steps_measured", INT, "Length of step_times_s."),
        column("tokens_per_s", FLOAT, "gbs * seq_len / step_time_s, or as an imported table gives it; so are the other speeds."),
        column("tokens_per_s_per_gpu", FLOAT, "tokens_per_s / gpus."),
        column("mfu", FLOAT, "model_flops_per_s_per_gpu / peak_flops_per_s, in the precision of the row; null if the peak is in doubt (mfu_problem)."),
        column("hfu", FLOAT, "Executed FLOPs over the peak; null for programs other than kernel=embedded, for compiled layers that recompute, and if measure.warmup_steps=1."),
        column("flops_formula", TEXT, "Formula for the FLOPs of a token. palm: 6*N_matmul + 12*L*heads*head_dim*seq_len, where N_matmul counts the parameters in matrix products, including only the chosen experts. megatron: 6*L instead of 12*L. null: kernel.params or kernel.flops_per_token gives the FLOPs."),
        column("peak_flops_per_s", FLOAT, "Dense peak rate of one rank in its precision."),
        column("peak_source", TEXT, "Source of the peak; measured: on this machine."),
        column("peak_core_share", FLOAT, "On CPUs: fraction of the cores that was free when peak_flops_per_s was measured; null: all."),
        column("source_mfu", FLOAT, "MFU that the program printed (kernel.mfu_line) or its publisher computed."),
        column("model_flops_per_s_per_gpu", FLOAT, "FLOPs of a token * tokens_per_s_per_gpu; as an imported table gives it, by the table's own formula."),
        column("source_num_params", INT, "Number of parameters that the program printed; see kernel.params."),
        column("mfu_problem", TEXT, "Why mfu is null, such as a peak that was measured beside other programs, or a program that prints another number of parameters than the model has."),
        column("power_w_mean", FLOAT, "Mean power of a GPU during the measured steps."),
        column("energy_j_per_step", FLOAT, "power_w_mean * gpus * step_time_s: GPUs only, without hosts and network."),
        column("tokens_per_j", FLOAT, "gbs * seq_len / energy_j_per_step."),
        column("cost_per_billion_tokens", FLOAT, "1e9 * price_per_gpu_hour (of the cluster) / (3600 * tokens_per_s_per_gpu); null without a price."),
        column("control", TEXT, "run_id of the control layout of its allocation."),
        column("control_ratio", FLOAT, "Speed divided by that of the control layout, the mean of its runs before and after this run in the allocation; 1 for a control run. step_time_s and speeds stay as measured."),
        column("control_ci95_rel", FLOAT, "Half the 95 % interval of that speed of the control layout, relative to it; holds both runs of it if they differ by more."),
        column("graphs", INT, "Most graphs that torch.compile made on a rank; 0: layers ran eagerly."),
        column("attention", TEXT, "Attention kernel that ran: cudnn, flash, flash3 or math."),
        column("attention_listed", TEXT, "Listed value of kernel.attention, such as auto; null if the sweep lists only one value."),
        column("loss_final", FLOAT, "Loss at step measure.loss_step, which all layouts of a cell reach; not the last loss."),
        column("gradient_norm", FLOAT, "Norm of the gradient of the first step."),
        column("peak_mem_allocated_bytes", INT, "Largest allocated memory of all ranks."),
        column("peak_mem_reserved_bytes", INT, "Largest reserved memory of all ranks; on CPUs the largest resident set."),
        column("peak_mem_reserved_rank0_bytes", INT, "Reserved memory of rank 0, as other benchmarks publish it."),
        column("allocator_retries", INT, "Times that a rank's allocator found its GPU full and freed unused memory, which is slow."),
        column("checkpoint_save_s", FLOAT, "Time that the slowest rank takes to save parameters and optimizer synchronously; null here and in the next six columns: see checkpoint_cause."),
        column("checkpoint_load_s", FLOAT, "Time to load the checkpoint, maybe from the page cache, which is faster than storage."),
        column("checkpoint_bytes", INT, "Bytes of the files of one save."),
        column("checkpoint_bytes_per_s_per_node", FLOAT, "checkpoint_bytes / nodes / checkpoint_save_s."),
        column("checkpoint_async_blocking_s", FLOAT, "Time by which an asynchronous save delays the next training step."),
        column("checkpoint_async_s", FLOAT, "Total time of the asynchronous save."),
        column("checkpoint_async_lost_steps", FLOAT, "Extra time of the steps during the asynchronous save, divided by step_time_s; excludes checkpoint_async_blocking_s."),
        column("checkpoint_cause", TEXT, "Why an ok run has no checkpoint numbers: disk_full, disk_slow or another cause."),
        column("checkpoint_reason", TEXT, "One line of evidence for checkpoint_cause."),
        column("init_time_s", FLOAT, "Time from the start of the ranks to the end of the first step."),
        column("predicted_step_time_s", FLOAT, "Step time predicted before the run."),
        column("predicted_peak_mem_bytes", INT, "Peak memory predicted before the run."),
        column("p_oom", FLOAT, "Probability of running out of memory, predicted before the run."),
    ),
    "State of the cluster": (
        *(column(f"{operation}{scope}_busbw_bytes_per_s", FLOAT, f"Bus bandwidth {where}.")
          for scope, where in (("", "over all ranks"), ("_intra_node", "within a node"))
          for operation in OPERATIONS),
        column("bandwidths", BANDWIDTHS, "All sizes and percentiles of runs with kernel=probe; the columns above have the largest size. See docs/guide/inside.md."),
        column("gemm_flops_per_s", FLOAT, "Rate of matrix products on the slowest device."),
        column("gemm_sm_clock_hz", FLOAT, "Lowest SM clock of all devices during those matrix products; null on CPUs."),
        column("memory_copy_bytes_per_s", FLOAT, "Rate of a memory copy (read and write) on the slowest device."),
        column("node_gemm_flops_per_s", FLOATS, "gemm_flops_per_s of each node."),
        column("node_memory_copy_bytes_per_s", FLOATS, "memory_copy_bytes_per_s of each node."),
        column("sm_clock_hz", FLOAT, "Median SM clock during the measured steps."),
        column("foreign_load", FLOAT, "Largest fraction of a node's cores that other programs used during the steps."),
        column("foreign_gpu_processes", TEXT, "Other processes on the GPUs during the steps; null: none or unknown."),
        column("throttled", BOOL, "Whether a device was throttled during the measured steps."),
    ),
    "Provenance": (
        column("source", TEXT, "Who measured an imported row, such as the name of its table; else null."),
        column("started_at", TIME, "Start of the ranks."),
        column("duration_s", FLOAT, "Time from the start of the ranks until all have exited."),
        column("gpu_hours", FLOAT, "duration_s * gpus / 3600."),
        column("job_id", TEXT, "Id of the allocation in the scheduler; null for local processes."),
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
