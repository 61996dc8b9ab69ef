"""Result tables made by hand, for tests of what rankings, figures and the page make of them."""

import pyarrow as pa

from ultrabench.analysis.results.schema import SCHEMA

USUAL = {
    "schema_version": 1, "is_final": True, "sweep": "s", "repeat": 0, "attempt": 0, "kernel": "embedded",
    "hardware": "h100x8", "gpus_per_node": 8, "model": "8B", "num_params": 8_000_000_000, "hidden_size": 64,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4, "intermediate_size": 128,
    "vocab_size": 256, "tie_word_embeddings": False, "precision": "bf16", "seq_len": 4096, "gbs": 256, "tp": 1, "pp": 1,
    "cp": 1, "mbs": 1, "zero_stage": 0, "dp_shard": 0, "pp_schedule": "none", "virtual_stages": 1, "recompute": "none",
    "flops_formula": "palm",
}  # fmt: skip


def row(run_id, rate=100.0, status="ok", nodes=1, **extra):
    """The row of a run on nodes of 8 GPUs; `rate` in tokens/s/GPU gives the numbers of an ok one."""
    gpus = 8 * nodes
    layout = {"dp": gpus, "gas": 256 // gpus, "nodes": nodes, "gpus": gpus}
    numbers = {
        "tokens_per_s_per_gpu": rate, "tokens_per_s": rate * gpus, "mfu": rate / 1000, "step_time_s": 1e3 / rate,
        "peak_mem_reserved_bytes": int(rate * 2**29), "predicted_step_time_s": 900 / rate,
    }  # fmt: skip
    return USUAL | layout | {"run_id": run_id, "status": status} | (numbers if status == "ok" else {}) | extra


def table_of(*rows):
    return pa.Table.from_pylist(list(rows), schema=SCHEMA)


def piped(run_id, rate=80.0, pp=2, dp=4, **extra):
    """The row of a run with a pipeline on 8 GPUs; its like without has dp=8."""
    return row(run_id, rate, pp=pp, dp=dp, gas=256 // dp, **{"pp_schedule": "1f1b"} | extra)


SAVED = {
    "checkpoint_save_s": 8.0, "checkpoint_load_s": 4.0, "checkpoint_bytes": 96 * 10**9,
    "checkpoint_bytes_per_s_per_node": 12e9,
    "checkpoint_async_blocking_s": 0.5, "checkpoint_async_s": 9.0, "checkpoint_async_lost_steps": -0.2,
}  # fmt: skip
"""The columns of a run that saved its state."""
PIPELINES = (
    row("like", **SAVED), piped("a"), piped("b", 50.0, pp=4, dp=2, pp_schedule="interleaved", virtual_stages=3),
    piped("c", 70.0, mbs=2), piped("d", 10.0, suspect="mfu 1.2 is above 1"), piped("e", status="oom", pp=8, dp=1),
)  # fmt: skip
"""Runs with pipelines: a and b have their like, c differs in mbs, d is in doubt, and e ran out of memory."""
