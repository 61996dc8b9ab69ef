"""Result tables made by hand, for tests of what rankings, figures and the page make of them."""

import pyarrow as pa

from ultrabench.analysis.schema import SCHEMA

USUAL = {
    "schema_version": 1, "is_final": True, "sweep": "s", "repeat": 0, "attempt": 0, "kernel": "embedded",
    "hardware": "h100x8", "gpus_per_node": 8, "model": "8B", "num_params": 8_000_000_000, "hidden_size": 64,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4, "intermediate_size": 128,
    "vocab_size": 256, "tie_word_embeddings": False, "precision": "bf16", "seq_len": 4096, "gbs": 256, "tp": 1, "pp": 1,
    "cp": 1, "mbs": 1, "zero_stage": 0, "dp_shard": 0, "pp_schedule": "none", "virtual_stages": 1, "recompute": "none",
    "flops_formula": "palm",
}  # fmt: skip


def row(run_id, rate=100.0, status="ok", nodes=1, **more):
    """The row of a run on nodes of 8 GPUs; `rate` in tokens/s/GPU gives the numbers of an ok one."""
    gpus = 8 * nodes
    layout = {"dp": gpus, "gas": 256 // gpus, "nodes": nodes, "gpus": gpus}
    measured = {
        "tokens_per_s_per_gpu": rate, "tokens_per_s": rate * gpus, "mfu": rate / 1000, "step_time_s": 1e3 / rate,
        "peak_mem_reserved_bytes": int(rate * 2**29), "predicted_step_time_s": 900 / rate,
    }  # fmt: skip
    return USUAL | layout | {"run_id": run_id, "status": status} | (measured if status == "ok" else {}) | more


def table_of(*rows):
    return pa.Table.from_pylist(list(rows), schema=SCHEMA)
