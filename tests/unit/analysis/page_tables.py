"""Result tables made by hand for tests of the page."""

import pyarrow as pa

from ultrabench.analysis.page.page import page as page_of
from ultrabench.analysis.page.rows import document
from ultrabench.analysis.schema import SCHEMA

MODEL = {
    "num_params": 10**9, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4,
    "intermediate_size": 128, "vocab_size": 256, "tie_word_embeddings": False,
}  # fmt: skip

EVIDENCE = '{"ranks": [{"rank": 3, "phase": "train", "code": 1, "killed_by_us": false, "error": "boom <b>", "last_line": null}]}'


def row(n, **values):
    """The row of an ok run, whose step time grows with `n`."""
    mbs, tp = 2 ** (n % 3), 2 ** (n // 3 % 3)
    step_s = 1.0 + n / 100
    return MODEL | {
        "schema_version": 1, "sweep": "s", "run_id": f"{n:016x}", "repeat": 0, "attempt": 0, "kernel": "embedded",
        "hardware": "h100x8", "nodes": 1, "gpus_per_node": 8, "gpus": 8, "model": "8B", "dp": 8 // tp, "tp": tp, "pp": 1,
        "cp": 1, "zero_stage": 1, "dp_shard": 0, "mbs": mbs, "gas": 256 // mbs * tp // 8, "pp_schedule": "none",
        "virtual_stages": 1, "recompute": "none", "gbs": 256, "seq_len": 4096, "precision": "bf16", "status": "ok",
        "is_final": True, "step_time_s": step_s, "tokens_per_s_per_gpu": 1e4 / step_s, "mfu": 0.4 / step_s,
        "flops_formula": "palm", "peak_mem_reserved_bytes": 2**36, "predicted_step_time_s": 1.1, "duration_s": 90.0,
        "gpu_hours": 0.2, "hostnames": ["n0"], "allreduce_busbw_bytes_per_s": 4e11 / (1 + n % 5),
    } | values  # fmt: skip


def failed(n, status, reason, **values):
    """The row of a run that failed."""
    none = dict.fromkeys(("step_time_s", "tokens_per_s_per_gpu", "mfu", "peak_mem_reserved_bytes"))
    return row(n, status=status, reason=reason, **none | values)


def page(results, *, title, public=False):
    """The page of a result table."""
    return page_of(document(results, public=public), title=title)


def table(*rows):
    return pa.Table.from_pylist(list(rows), schema=SCHEMA)


def small():
    """Two models on one and two nodes: ok, oom, a crash that was tried again, a doubt, and a rule."""
    cells = [{"model": m, "nodes": n, "gpus": 8 * n} for m in ("1B", "8B") for n in (1, 2)]
    rows = [row(10 * at + n, **cell) for at, cell in enumerate(cells) for n in range(9)]
    return table(
        *rows,
        failed(100, "oom", "CUDA out of memory", gpu_hours=None, **cells[0]),
        failed(
            101, "crash", "<script>alert(1)</script> on n7", is_final=False, evidence=EVIDENCE, **cells[0]
        ),
        row(101, attempt=1, **cells[0]),
        row(102, suspect="throttled: <b>power</b>", step_time_s=0.1, tokens_per_s_per_gpu=1e6, **cells[3]),
        failed(
            103, "rejected", "tp=3 does not divide 8", rule="heads", repeat=None, attempt=None, **cells[1]
        ),
    )


def repeated():
    """One cell whose runs have several repeats, which end differently."""
    ends = [
        ("ok", "crash"), ("oom", "crash"), ("hang", "crash"), ("crash", "ok"), ("crash", None), (None, None),
        ("skipped",),
    ]  # fmt: skip
    pairs = [(n, repeat, status) for n, ended in enumerate(ends) for repeat, status in enumerate(ended)]
    return table(
        *(
            row(n, repeat=repeat, suspect="hot" if n == 8 else None)
            if status == "ok"
            else failed(n, status, None, repeat=repeat)
            for n, repeat, status in [*pairs, (8, 0, "ok")]
        )
    )


def large(number):
    """As many runs of five models on nine numbers of nodes; every third ran out of memory."""
    made = []
    for n in range(number):
        place = {"model": f"{n % 5}B", "nodes": 2 ** (n // 5 % 9), "num_params": 10**9 * (n % 5 + 1)}
        made.append(failed(n, "oom", "no memory", **place) if n % 3 == 0 else row(n, **place))
    return table(*made)
