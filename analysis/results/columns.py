"""All columns: the rows of results in groups, as runs.parquet has them, and those that other tables add.

A column that a field of `RunResult` or `Prediction` holds is described there; all others are rows here.
This module does not import pyarrow, so that every command can show numbers in their units.
"""

from collections.abc import Iterable
from typing import Any

from ultrabench.column import (
    BYTES,
    BYTES_PER_S,
    BYTES_PER_S_PER_NODE,
    FLOPS_PER_S,
    FRACTION,
    GPU_HOURS,
    HERTZ,
    JOULES,
    PEAK_FRACTION,
    SECONDS,
    TOKENS_PER_S,
    Better,
    Column,
    ColumnType,
    Source,
)
from ultrabench.device_rates import LINK_FIELDS, OPERATIONS
from ultrabench.layout import AXES, MEANINGS, TEXT_AXES, TEXT_BY_VALUE
from ultrabench.result import RESULT_COLUMNS
from ultrabench.sweep.predict.predict import PREDICTION_COLUMNS

TEXT, INT, FLOAT, BOOL = ColumnType.TEXT, ColumnType.INT, ColumnType.FLOAT, ColumnType.BOOL
TEXTS, FLOATS, RECORDS, TIME = ColumnType.TEXTS, ColumnType.FLOATS, ColumnType.RECORDS, ColumnType.TIME
_BANDWIDTH: dict[str, Any] = {"unit": BYTES_PER_S, "better": Better.HIGHER, "source": Source.PREFLIGHT}


def _of_run(name: str, column_type: ColumnType, meaning: str, **facts: Any) -> Column:
    """A column that says what was run."""
    return Column(name, column_type, meaning, source=Source.RUN, **facts)


_GROUPS: dict[str, tuple[Column, ...]] = {
    "Identity": (
        Column("schema_version", INT, "Version of this schema."),
        Column("sweep", TEXT, "Name of the sweep."),
        Column("sweep_key", TEXT, "Eight hex digits by which trackers know the sweep, also after it was renamed."),
        Column("run_id", TEXT, "First 16 hex digits of the hash of everything that defines the run."),
        RESULT_COLUMNS["env_id"],
        _of_run("env", TEXT, "Environment variables that kernel.env set for the program, as JSON; "
        "secrets are redacted."),
        Column("variables", TEXT, "Environment variables of rank 0 for its libraries, as JSON."),
        Column("repeat", INT, "Number of the measurement, from 0; null if never attempted."),
        Column("attempt", INT, "Number of the try, from 0; null if never attempted."),
        _of_run("kernel", TEXT, "Name of the training program."),
        _of_run("kernel_version", TEXT, "Version of the training program: 1, 2, ... or its publisher's version."),
        RESULT_COLUMNS["kernel_digest"],
        _of_run("cluster", TEXT, "Name of the site (cluster=NAME). Attempts of a launch that names none have the "
        "name by which the batch system knows its cluster."),
        _of_run("hardware", TEXT, "Name of the node type."),
        RESULT_COLUMNS["gpu_name"],
        _of_run("nodes", INT, "Nodes of the run; all their GPUs are used unless gpus is smaller."),
        _of_run("gpus_per_node", INT, "Ranks per node."),
        _of_run("gpus", INT, "Ranks in total."),
    ),
    "Model": (
        _of_run("model", TEXT, "Name of the model."),
        _of_run("model_id", TEXT, "First 16 hex digits of the hash of its shape; null: unknown."),
        _of_run("model_settings", TEXT, "Other settings of the shape that differ from their defaults, as JSON, "
        "such as rope_theta."),
        _of_run("num_params", INT, "All trainable parameters, tied weights counted once."),
        _of_run("num_active_params", INT, "Parameters used for one token: only the chosen experts count."),
        _of_run("hidden_size", INT, "Width of the residual stream."),
        _of_run("num_hidden_layers", INT, "Decoder layers."),
        _of_run("num_attention_heads", INT, "Query heads."),
        _of_run("num_key_value_heads", INT, "Key and value heads."),
        _of_run("intermediate_size", INT, "Width of the feed-forward block."),
        _of_run("vocab_size", INT, "Rows of the embedding."),
        _of_run("tie_word_embeddings", BOOL, "Whether embedding and lm_head are one matrix."),
        _of_run("head_dim", INT, "Width of an attention head; null: hidden_size / num_attention_heads."),
        _of_run("qk_norm", BOOL, "Whether queries and keys are normalised."),
        _of_run("qk_norm_across_heads", BOOL, "Whether one norm spans all heads."),
        _of_run("attention_bias", BOOL, "Whether the projections of queries, keys and values have biases."),
        _of_run("partial_rotary_factor", FLOAT, "Fraction of the head width to which rotary positions apply."),
        _of_run("sliding_window", INT, "Positions that a token attends to; null: all earlier ones."),
        _of_run("num_experts", INT, "Experts of a sparse layer; null here and in the next six columns if all "
        "layers are dense."),
        _of_run("num_experts_per_tok", INT, "Experts that the router chooses for a token."),
        _of_run("moe_intermediate_size", INT, "Width of an expert."),
        _of_run("n_shared_experts", INT, "Experts that every token passes through."),
        _of_run("first_k_dense_replace", INT, "Number of dense layers at the start of the model."),
        _of_run("decoder_sparse_step", INT, "n: layers n, 2n, ... of the model (counted from 1) are sparse, "
        "except the dense layers at the start."),
        _of_run("routing", TEXT, "How tokens choose their experts: balanced, learned or skew=A; "
        "null also for programs other than kernel=embedded."),
    ),
    "Layout": (
        *(_of_run(name, TEXT if name in TEXT_AXES else INT, MEANINGS[name],
            text_by_value=TEXT_BY_VALUE[name]) for name in AXES),
        _of_run("zero_shards", INT, "Ranks among which ZeRO sharded: dp_shard, else dp*cp; 1 for zero_stage=0."),
        _of_run("gbs", INT, "Sequences of a global batch: dp * mbs * gas."),
        _of_run("scaling", TEXT, "weak: gbs grows in proportion to the nodes; strong: "
        "gbs is the same for every node count."),
        _of_run("seq_len", INT, "Tokens of a sequence."),
        _of_run("precision", TEXT, "Arithmetic of forward and backward; fp8: only linear layers without the "
        "head, the rest is bf16."),
        _of_run("compile", BOOL, "Whether torch.compile was used; never with pp_schedule=zbv."),
        _of_run("variant", TEXT, "Environment variables, flags, words, container and interpreter that the sweep "
        "varies, as JSON; see docs/reference/configuration.md. option.NAME: column NAME of an imported table."),
        _of_run("first_values", TEXT, "First listed value of each axis with several values, as JSON: "
        "the baseline of effects."),
    ),
    "Outcome": (
        RESULT_COLUMNS["status"],
        Column("is_final", BOOL, "Whether this row represents its repeat."),
        Column("rule", TEXT, "First rule that rejects the layout."),
        RESULT_COLUMNS["reason"],
        RESULT_COLUMNS["cause"],
        Column("evidence", TEXT, "How each rank of a failed run ended, its last log lines and the cause of a "
        "hang, as JSON."),
        RESULT_COLUMNS["fingerprint"],
        RESULT_COLUMNS["confirmed"],
        RESULT_COLUMNS["suspect_hosts"],
        RESULT_COLUMNS["began_on"],
        Column("suspect", TEXT, "Why the result is suspect; null if it is not. A suspect row wins only if all ok "
        "rows of its cell are suspect."),
        Column("suspect_codes", TEXTS, "Codes of the reasons in suspect, such as throttled or other_batch."),
        RESULT_COLUMNS["stopped"],
        Column("dominated_by", TEXT, "run_id of a run that ran out of memory, for which this larger run was skipped."),
        RESULT_COLUMNS["measured_by"],
        RESULT_COLUMNS["ci_reached"],
        Column("allocation", TEXT, "Name of the allocation (job) that ran the attempt."),
        Column("step_time_s", FLOAT, "Median time of an optimizer step.", unit=SECONDS, better=Better.LOWER,
            follows_step_time=True, short="step"),
        Column("step_times_s", FLOATS, "Times of the measured steps in order, without the warm-up.", unit=SECONDS),
        Column("step_time_ci95_rel", FLOAT, "Half the 95 % interval of step_time_s, as a fraction of it; "
        "needs 6 steps. With measured_by=arrival it contains the delay with which lines are seen.", unit=FRACTION,
        better=Better.LOWER),
        Column("num_steps_measured", INT, "Length of step_times_s."),
        RESULT_COLUMNS["measured_gas"],
        RESULT_COLUMNS["screened"],
        RESULT_COLUMNS["extrapolation_error_rel"],
        RESULT_COLUMNS["parts_step_time_s"],
        RESULT_COLUMNS["parts_ci95_rel"],
        Column("tokens_per_s", FLOAT, "gbs * seq_len / step_time_s, or as an imported table gives it; "
        "so are the other speeds.", unit=TOKENS_PER_S, better=Better.HIGHER, follows_step_time=True,
        title="tokens/s"),
        Column("tokens_per_s_per_gpu", FLOAT, "tokens_per_s / gpus.", unit=TOKENS_PER_S, better=Better.HIGHER,
            follows_step_time=True, title="tokens/s/GPU"),
        Column("mfu", FLOAT, "model_flops_per_s_per_gpu / peak_flops_per_s, in the precision of the row; "
        "null if the peak is in doubt (mfu_problem).", unit=PEAK_FRACTION, better=Better.HIGHER, follows_step_time=True,
        title="MFU"),
        Column("hfu", FLOAT, "Executed FLOPs over the peak; null for programs other than kernel=embedded, "
        "for compiled layers that recompute, and if measure.warmup_steps=1.", unit=PEAK_FRACTION, better=Better.HIGHER,
        follows_step_time=True),
        Column("flops_formula", TEXT, "Formula for the FLOPs of a token. palm: "
        "6*N_matmul + 12*L*heads*head_dim*seq_len, where N_matmul counts the parameters in matrix products, "
        "including only the chosen experts. megatron: 6*L instead of 12*L. null: "
        "kernel.params or kernel.flops_per_token gives the FLOPs."),
        Column("peak_flops_per_s", FLOAT, "Dense peak rate of one rank in its precision.", unit=FLOPS_PER_S),
        Column("peak_source", TEXT, "Source of the peak; measured: on this machine."),
        Column("peak_core_share", FLOAT, "On CPUs: fraction of the cores that was free when peak_flops_per_s was "
        "measured; null: all.", unit=FRACTION),
        RESULT_COLUMNS["source_mfu"],
        Column("model_flops_per_s_per_gpu", FLOAT, "FLOPs of a token * tokens_per_s_per_gpu; "
        "as an imported table gives it, by the table's own formula.", unit=FLOPS_PER_S, better=Better.HIGHER,
        follows_step_time=True),
        RESULT_COLUMNS["source_num_params"],
        Column("mfu_problem", TEXT, "Why mfu is null, such as a peak that was measured beside other programs, "
        "or a program that prints another number of parameters than the model has."),
        RESULT_COLUMNS["power_w_mean"],
        Column("energy_j_per_step", FLOAT, "power_w_mean * gpus * step_time_s: GPUs only, without hosts and network.",
            unit=JOULES, better=Better.LOWER),
        Column("tokens_per_j", FLOAT, "gbs * seq_len / energy_j_per_step.", better=Better.HIGHER),
        Column("cost_per_billion_tokens", FLOAT, "1e9 * price_per_gpu_hour (of the cluster) / (3600 * "
        "tokens_per_s_per_gpu); null without a price.", better=Better.LOWER, follows_step_time=True),
        Column("control", TEXT, "run_id of the control layout of its allocation."),
        Column("control_ratio", FLOAT, "Speed divided by that of the control layout, the mean of its runs before "
        "and after this run in the allocation; 1 for a control run. step_time_s and speeds stay as measured.",
        better=Better.HIGHER, follows_step_time=True),
        Column("control_ci95_rel", FLOAT, "Half the 95 % interval of that speed of the control layout, "
        "relative to it; holds both runs of it if they differ by more.", unit=FRACTION, better=Better.LOWER),
        RESULT_COLUMNS["graphs"],
        RESULT_COLUMNS["attention"],
        Column("attention_listed", TEXT, "Listed value of kernel.attention, such as auto; "
        "null if the sweep lists only one value."),
        RESULT_COLUMNS["loss_final"],
        RESULT_COLUMNS["gradient_norm"],
        RESULT_COLUMNS["peak_mem_allocated_bytes"],
        RESULT_COLUMNS["peak_mem_reserved_bytes"],
        RESULT_COLUMNS["peak_mem_reserved_rank0_bytes"],
        Column("peak_mem_device_bytes", INT, "Largest memory in use on a GPU as its driver shows it, that of CUDA and "
        "NCCL included; only in imported tables.", unit=BYTES, better=Better.LOWER),
        RESULT_COLUMNS["allocator_retries"],
        RESULT_COLUMNS["checkpoint_save_s"],
        RESULT_COLUMNS["checkpoint_load_s"],
        RESULT_COLUMNS["checkpoint_bytes"],
        Column("checkpoint_bytes_per_s_per_node", FLOAT, "checkpoint_bytes / nodes / checkpoint_save_s.",
            unit=BYTES_PER_S_PER_NODE, better=Better.HIGHER),
        RESULT_COLUMNS["checkpoint_async_blocking_s"],
        RESULT_COLUMNS["checkpoint_async_s"],
        RESULT_COLUMNS["checkpoint_async_lost_steps"],
        RESULT_COLUMNS["checkpoint_cause"],
        RESULT_COLUMNS["checkpoint_reason"],
        RESULT_COLUMNS["init_time_s"],
        PREDICTION_COLUMNS["step_time_s"],
        PREDICTION_COLUMNS["peak_mem_bytes"],
        PREDICTION_COLUMNS["p_oom"],
    ),
    "State of the cluster": (
        *(Column(f"{operation}{scope}_busbw_bytes_per_s", FLOAT, f"Bus bandwidth {where}.", **_BANDWIDTH)
          for scope, where in (("", "over all ranks"), ("_intra_node", "within a node"))
          for operation in OPERATIONS),
        Column("bandwidths", RECORDS, "All sizes and percentiles of runs with kernel=probe; "
        "the columns above have the largest size. See docs/guide/inside.md.", source=Source.PREFLIGHT),
        Column("gemm_flops_per_s", FLOAT, "Rate of matrix products on the slowest device.", unit=FLOPS_PER_S,
            better=Better.HIGHER, source=Source.PREFLIGHT),
        Column("gemm_sm_clock_hz", FLOAT, "Lowest SM clock of all devices during those matrix products; null on CPUs.",
            unit=HERTZ, better=Better.HIGHER, source=Source.PREFLIGHT),
        Column("memory_copy_bytes_per_s", FLOAT, "Rate of a memory copy (read and write) on the slowest device.",
            unit=BYTES_PER_S, better=Better.HIGHER, source=Source.PREFLIGHT),
        Column("node_gemm_flops_per_s", FLOATS, "gemm_flops_per_s of each node.", unit=FLOPS_PER_S,
            source=Source.PREFLIGHT),
        Column("node_memory_copy_bytes_per_s", FLOATS, "memory_copy_bytes_per_s of each node.", unit=BYTES_PER_S,
            source=Source.PREFLIGHT),
        RESULT_COLUMNS["sm_clock_hz"],
        RESULT_COLUMNS["foreign_load"],
        RESULT_COLUMNS["foreign_gpu_processes"],
        Column("throttled", BOOL, "Whether a device was throttled during the measured steps."),
    ),
    "Provenance": (
        Column("source", TEXT, "Who measured an imported row, such as the name of its table; else null."),
        Column("started_at", TIME, "Start of the ranks."),
        RESULT_COLUMNS["duration_s"],
        Column("gpu_hours", FLOAT, "duration_s * gpus / 3600.", unit=GPU_HOURS, better=Better.LOWER, title="GPU hours"),
        Column("job_id", TEXT, "Id of the allocation in the scheduler; null for local processes."),
        RESULT_COLUMNS["hostnames"],
        Column("git_commit", TEXT, "Commit of ultrabench that launched the sweep."),
        RESULT_COLUMNS["torch_version"],
        RESULT_COLUMNS["cuda_version"],
        RESULT_COLUMNS["nccl_version"],
        RESULT_COLUMNS["driver_version"],
    ),
}  # fmt: skip
_PLACED = {column.name for group in _GROUPS.values() for column in group}
_UNPLACED = [column for column in RESULT_COLUMNS.values() if column.name not in _PLACED]
GROUPS = _GROUPS | {"Outcome": (*_GROUPS["Outcome"], *_UNPLACED)}
"""Group -> its columns, in the order of runs.parquet; a new field of RunResult comes last in Outcome
until a row places it."""

RATE = "tokens_per_s_per_gpu"
"""The column that ranks runs by default, beside `control_ratio`."""
EXPECTED_RATE = Column(
    "expected_tokens_per_s_per_gpu",
    FLOAT,
    "tokens_per_s_per_gpu * (1 - p_oom), by which the rows of a plan are ranked.",
    unit=TOKENS_PER_S,
    better=Better.HIGHER,
)
_LINK_COLUMNS = (
    Column(name, FLOAT, "Bus bandwidth of an operation in one size.", **_BANDWIDTH)
    for name in LINK_FIELDS
    if "busbw" in name
)

RESULT_TABLE = {column.name: column for group in GROUPS.values() for column in group}
"""Name -> column of result tables."""
_ALL_COLUMNS = {
    column.name: column for column in (*PREDICTION_COLUMNS.values(), EXPECTED_RATE, *_LINK_COLUMNS)
} | RESULT_TABLE


def column_of(name: str) -> Column:
    """The column with this name; one of numbers or texts without a unit if no table of ultrabench has it."""
    return _ALL_COLUMNS.get(name) or Column(name, TEXT, "")


def unit_of(name: str) -> str:
    """The symbol of the unit of the column with this name; empty for plain numbers and texts."""
    return column_of(name).unit.symbol


def rankable(names: Iterable[str]) -> list[str]:
    """Those of the columns by which runs can be ranked: columns of results that say which of their
    numbers are better.
    """
    return [name for name in names if name in RESULT_TABLE and RESULT_TABLE[name].better != Better.NONE]
