"""Result tables made by hand for tests of the page."""

from tests.unit.analysis.tables import row, table_of
from ultrabench.analysis.page.page import page as page_of
from ultrabench.analysis.page.rows import document

EVIDENCE = (
    '{"ranks": [{"rank": 3, "phase": "train", "code": 1, "killed_by_us": false, "error": '
    '"boom <b>", "last_line": null}]}'
)


def run(n, **values):
    """The row of a run of the layout with this number; the step time of an ok run grows with the number."""
    mbs, tp = 2 ** (n % 3), 2 ** (n // 3 % 3)
    columns = {
        "dp": 8 // tp, "tp": tp, "zero_stage": 1, "mbs": mbs, "gas": 256 // mbs * tp // 8, "gpu_hours": 0.2,
        "hostnames": ["n0"], "allreduce_busbw_bytes_per_s": 4e11 / (1 + n % 5),
    }  # fmt: skip
    return row(f"{n:016x}", 400 / (1 + n / 100), **columns | values)


def page(results, *, title="s", public=False):
    """The page of a result table."""
    return page_of(document(results, public=public), title=title)


def decoded(column):
    """The values of an encoded column."""
    return column.get("values") or [
        None if code < 0 else column["distinct"][code] for code in column["codes"]
    ]


def shown(results, public=False):
    """The document of a page, with its columns as lists."""
    content = document(results, public=public)
    return content | {"columns": {name: decoded(column) for name, column in content["columns"].items()}}


def small():
    """Two models on one and two nodes: ok, oom, a crash that was tried again, a doubt, and a rule."""
    cells = [{"model": m, "nodes": n, "gpus": 8 * n} for m in ("1B", "8B") for n in (1, 2)]
    rejected = {"status": "rejected", "reason": "tp=3 does not divide 8", "rule": "heads", "attempt": None}
    return table_of(
        *(run(10 * index + n, **cell) for index, cell in enumerate(cells) for n in range(9)),
        run(100, status="oom", reason="CUDA out of memory", gpu_hours=None, **cells[0]),
        run(101, status="crash", reason="<script>alert(1)</script> on n7", is_final=False, evidence=EVIDENCE,
            **cells[0]),
        run(101, attempt=1, **cells[0]),
        run(102, suspect="throttled: <b>power</b>", tokens_per_s_per_gpu=1e6, **cells[3]),
        run(103, repeat=None, **rejected, **cells[1]),
    )  # fmt: skip


def repeated():
    """One cell whose runs have several repeats, which end differently."""
    ends = [
        ("ok", "crash"), ("oom", "crash"), ("hang", "crash"), ("crash", "ok"), ("crash", None), (None, None),
        ("skipped",),
    ]  # fmt: skip
    rows = [
        run(n, repeat=nth, status=status) for n, ended in enumerate(ends) for nth, status in enumerate(ended)
    ]
    return table_of(*rows, run(8, suspect="hot"))


def large(number):
    """As many runs of five models on nine numbers of nodes; every third ran out of memory."""
    ends = ({"status": "oom", "reason": "no memory"}, {}, {})
    return table_of(
        *(
            run(n, model=f"{n % 5}B", nodes=2 ** (n // 5 % 9), num_params=10**9 * (n % 5 + 1), **ends[n % 3])
            for n in range(number)
        )
    )
