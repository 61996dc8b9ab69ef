"""`ultrabench nodes` on recorded sweeps with a planted slow node and a planted failing one."""

import json
import math
from dataclasses import replace

import pyarrow as pa
import pytest

from tests.sweep_folder import claimed, finished, write
from tests.unit.analysis.sweeps import OK, SPECS, make_sweep
from tests.unit.cli.conftest import one_line
from ultrabench.analysis.figures.kinds import prepare_figure
from ultrabench.analysis.page.rows import document
from ultrabench.analysis.results.collect import collect
from ultrabench.analysis.studies.nodes.measurements import (
    COLUMNS,
    CONTROL_RATE,
    LINK_RATES,
    NODE_RATES,
    measurements,
    read_nodes,
    table_rows,
)
from ultrabench.analysis.studies.nodes.nodes import reports
from ultrabench.analysis.studies.nodes.relative import relative_speeds
from ultrabench.result import AGENT_GONE, NODE_FAILURE, RunResult, Status, proves_node_fault
from ultrabench.run import AttemptKey
from ultrabench.store.digest_history import append_verified
from ultrabench.store.events import AllocationPlanned, Preflight

HOSTS = [f"n{number:02}" for number in range(1, 9)]
SLOW, FAILING, UNLUCKY = "n03", "n05", "n07"
INTRA_NODE = {"bytes": 8, "busbw_bytes_per_s": 4e11}
NIGHT_S = 24 * 3600.0


def recorded(spec, result, repeat, allocation):
    key = AttemptKey(spec.run_id, repeat, 0)
    yield claimed(spec, key, allocation)
    yield finished(spec, key, result, allocation=allocation)


def night(day, host, number, *, xids=(FAILING,)):
    """The events of an allocation of one node: a preflight, its control run, and a run that may fail."""
    name, speed = f"{host}.{day}", (0.96 if host == SLOW else 1.0) * (1 + 0.002 * math.sin(number + 3 * day))
    common = {"hostnames": (host,), "started_at": 1.7e9 + day * NIGHT_S + 60 * number, "gpu_name": "H100"}
    probe = {
        "gemm_flops_per_s": [7e14 * speed * (1 + 0.01 * rank) for rank in range(8)],
        "memory_copy_bytes_per_s": [2.9e12] * 8,
        "collectives": {"allreduce": {"all": [], "intra_node": [INTRA_NODE]}},
    }
    yield AllocationPlanned(allocation=name, nodes=1, limit_s=60.0, tasks=(), control=SPECS[0].run_id)
    yield Preflight(allocation=name, found={"nodes": [{"host": host}], "probe": probe})
    yield from recorded(SPECS[0], replace(OK, **common, step_times_s=(0.1 / speed,) * 6), number, name)
    end = replace(OK, **common, throttled="power brake" if host == SLOW else None)
    if host in xids and day:
        end = RunResult(status=Status.NODE_FAIL, cause="xid", suspect_hosts=(host,), **common)
    if host == UNLUCKY:
        hosts = (host,) if day == 1 else tuple(HOSTS)
        cause = "ecc_error" if day == 1 else AGENT_GONE
        end = RunResult(status=Status.NODE_FAIL, cause=cause, suspect_hosts=hosts, **common)
    yield from recorded(SPECS[1], end, number, name)


@pytest.fixture
def nights(tmp_path):
    """Four sweeps, one each night, each of which runs on all nodes one by one."""
    folders = []
    for day in range(4):
        folders.append(make_sweep(tmp_path / "results" / f"night{day}", SPECS[:2]))
        write(folders[-1], *(event for n, host in enumerate(HOSTS) for event in night(day, host, n)))
    return folders


def test_the_slow_and_the_failing_node_are_marked_and_no_other(ultrabench, nights):
    code, out, err = ultrabench("nodes", "--json")
    assert (code, err) == (0, "")
    answer = json.loads(out)
    failing, slow, *others = answer["nodes"]
    losses = answer["smallest_losses"]
    assert {*losses} == {*NODE_RATES, CONTROL_RATE, LINK_RATES[0]}
    assert 0.01 <= losses[NODE_RATES[1]] <= losses[NODE_RATES[0]] < 0.04
    assert (failing["host"], failing["failing"], failing["slow"], failing["xids"]) == (FAILING, True, [], 3)
    assert (slow["host"], slow["failing"], {*slow["slow"]}) == (SLOW, False, {NODE_RATES[0], CONTROL_RATE})
    products = slow["rates"][NODE_RATES[0]]
    assert products["rate"] == pytest.approx(0.96 * 7e14, rel=0.005)
    assert 0.94 < products["low"] < products["relative"] < products["high"] < 1
    assert slow["rates"][LINK_RATES[0]]["relative"] == pytest.approx(1)
    assert (slow["runs"], slow["attempts"], slow["throttled"], slow["failures"]) == (8, 8, 4, {})
    times = [f"2023-11-{day}T22:15:20+00:00" for day in (14, 17)]
    assert [slow["first_seen"], slow["last_seen"]] == times
    assert [node["host"] for node in others if node["slow"] or node["failing"]] == []
    unlucky = next(node for node in others if node["host"] == UNLUCKY)
    assert unlucky["failures"] == {"ecc_error": 1}, "a failure that points at all nodes is no node's own"


def test_slurm_is_given_the_marked_nodes(ultrabench, nights):
    assert ultrabench("nodes", "--exclude-list") == (0, f"{SLOW},{FAILING}\n", "")
    assert ultrabench("nodes", "night0", "--exclude-list") == (0, "\n", ""), "one night is one observation"
    assert "leave one out" in one_line(ultrabench, "nodes", "--json", "--exclude-list")


def test_the_table_names_marks_rates_and_failures(ultrabench, nights):
    code, out, _ = ultrabench("nodes")
    lines = out.splitlines()
    assert (code, lines[0].strip()) == (0, "8 nodes, 2 marked")
    assert "failing" in lines[2]
    assert "xid 3" in lines[2]
    assert "slow: matmul, control" in lines[3]
    assert "672 TFLOP/s 0.960 (" in lines[3]
    assert lines[-2].startswith("A node measured ")
    assert "% slower in matmul or 1.0 % slower in memory" in lines[-2]
    assert "Read 4 days, 2023-11-14 to 2023-11-17." in lines[-1]


def test_the_health_of_the_latest_preflight_of_a_node_is_shown(ultrabench, nights):
    old, sound = {"fail": {"ECC errors": {"GPU 3": 2.0}}}, {"ok": {"NUMA": {}}}
    new = sound | {"warn": {"power limit": {"GPU 0": 200.0}}}
    for day, findings in ((1, {"n01": old, "n02": old}), (3, {"n01": new, "n02": sound})):
        for host, health in findings.items():
            facts = {"nodes": [{"host": host, "health": health}]}
            write(nights[day], Preflight(allocation=f"{host}.{day}", restart=1, found=facts))
    lines = {line.split()[0]: line for line in ultrabench("nodes")[1].splitlines() if "TFLOP/s" in line}
    assert "power limit (GPU 0: 200 W below)" in lines["n01"]
    assert "no findings" in lines["n02"]
    assert not any(text in lines["n04"] for text in ("no findings", "power limit"))
    health = {node["host"]: node["health"] for node in json.loads(ultrabench("nodes", "--json")[1])["nodes"]}
    assert health["n01"] == {"fail": {}, "warn": {"power limit": {"GPU 0": 200.0}}}
    assert (health["n02"], health["n04"]) == ({"fail": {}, "warn": {}}, None)
    assert "ECC errors (GPU 3: 2 errors)" in ultrabench("nodes", "night1")[1]


def test_the_history_of_what_gpus_computed_is_shown(ultrabench, nights, tmp_path):
    assert "bit by bit" not in ultrabench("nodes")[1], "earlier versions computed nothing"
    for day in (1, 3):
        for host in HOSTS[:3]:
            parts = {"bf16 products": "5e1e" if host == "n02" else "5e1f"}
            facts = {"host": host, "digests": [{"device": f"GPU-{host}", "setup": "H100", "parts": parts}]}
            write(nights[day], Preflight(allocation=f"{host}.{day}", restart=1, found={"nodes": [facts]}))
    digest = {
        "device": "GPU-n03",
        "setup": "H100",
        "parts": {"bf16 products": "5e1f"},
        "second": {"copies": "0"},
    }
    append_verified(tmp_path / "results", "n03", [digest], 1.69e9)
    text = "GPU 0 (GPU-n02) computed bf16 products differently from 2 of 3 equal devices"
    out = " ".join(ultrabench("nodes")[1].split())
    assert "Compared bit by bit: 3 devices in 7 results; 2 differ." in out
    assert f"n02: {text} (2 of 2 results on " in out
    gpus = {gpu["device"]: gpu["history"] for gpu in json.loads(ultrabench("nodes", "--json")[1])["gpus"]}
    assert [(r["source"], r["against"], r["difference"]) for r in gpus["GPU-n02"]] == [
        ("n02.1", "others", text), ("n02.3", "others", text)
    ]  # fmt: skip
    assert [(r["against"], r["parts"]) for r in gpus["GPU-n03"]] == [
        ("itself", ["copies"]),
        (None, []),
        (None, []),
    ]
    assert "2 of 2" in " ".join(ultrabench("nodes", "--since", "2023-11-15")[1].split())


def test_since_leaves_out_the_days_before_a_repair(ultrabench, nights):
    code, out, _ = ultrabench("nodes", "--since", "2023-11-16")
    assert (code, "Read 2 days, 2023-11-16 to 2023-11-17." in out) == (0, True)
    assert "Too few days or nodes" in ultrabench("nodes", "--since", "2023-11-17")[1]
    assert ultrabench("nodes", "--since", "2023-11-17", "--exclude-list") == (0, "\n", "")
    assert "write YYYY-MM-DD" in one_line(ultrabench, "nodes", "--since", "last week")
    assert "no attempt started since" in one_line(ultrabench, "nodes", "--since", "2030-01-01")


def test_a_sweep_that_cannot_be_read_is_passed_over_unless_it_is_named(ultrabench, nights):
    nights[0].sweep_json.write_text("{")
    code, out, err = ultrabench("nodes")
    assert (code, "8 nodes" in out, "night0/sweep.json is damaged" in err) == (0, True, True)
    assert "sweep.json is damaged" in one_line(ultrabench, "nodes", "night0")
    assert "no sweep" in one_line(ultrabench, "nodes", "--results-dir", "elsewhere")


def test_the_table_of_results_says_the_same_as_the_journals(ultrabench, nights, tmp_path):
    def shown(rows):
        return [report.as_json() | {"runs": None} for report in reports(rows)]

    table = collect(nights, pytest.fail)
    from_journals = [row for folder in nights for row in read_nodes(folder, pytest.fail).rows]
    assert json.dumps(shown(table_rows(table))) == json.dumps(shown(from_journals))
    (page,) = (part for part in document(table, public=False)["sections"] if part["title"] == "Nodes")
    assert [row[0] for row in page["rows"]][:2] == [FAILING, SLOW]
    assert "Nodes" not in [part["title"] for part in document(table, public=True)["sections"]]
    assert ultrabench("collect", *(folder.name for folder in nights), "-o", "all.parquet")[0] == 0
    assert ultrabench("plot", "nodes", "all.parquet", "-o", "nodes.svg")[::2] == (0, "drew nodes.svg\n")
    picture = (tmp_path / "nodes.svg").read_text()
    assert all(text in picture for text in (f"{SLOW} (slow)", f"{FAILING} (failing)", "matmul"))


def test_every_panel_of_the_figure_has_dates_also_above_an_empty_place(nights):
    """Three rates leave the last place of the second column empty."""
    table = collect(nights, pytest.fail)
    column = table.schema.field(NODE_RATES[1])
    unknown = pa.nulls(len(table), column.type)
    table = table.set_column(table.column_names.index(column.name), column, unknown)
    figure = prepare_figure("nodes", table, title="t")[1]()
    figure.draw_without_rendering()
    days = ["15", "16", "17", "18"]
    for axes in figure.axes[:3]:
        assert [label.get_text() for label in axes.get_xticklabels() if label.get_visible()] == days


@pytest.mark.parametrize(
    ("status", "cause", "num_days", "is_failing"),
    [
        (Status.NODE_FAIL, "xid", 3, True), (Status.NODE_FAIL, "ecc_error", 3, True),
        (Status.NODE_FAIL, NODE_FAILURE, 3, True),
        (Status.NODE_FAIL, "xid", 1, False), (Status.NODE_FAIL, AGENT_GONE, 3, False),
        (Status.NODE_FAIL, "gpu_unavailable", 3, False), (Status.CRASH, "segfault", 3, False),
    ],
)  # fmt: skip
def test_only_failures_that_prove_a_fault_mark_a_node_and_all_are_counted(
    status, cause, num_days, is_failing
):
    """Twelve nodes run once a day for four days, and one of them fails on some days."""
    failure = {"status": status, "cause": cause, "suspect_hosts": ["n00"]}
    rows = [
        dict.fromkeys(COLUMNS) | {"sweep": f"day{day}", "run_id": "r", "started_at": 1.7e9 + day * NIGHT_S,
            "status": Status.OK}
        | {"hostnames": [f"n{number:02}"]} | (failure if number == 0 and day < num_days else {})
        for day in range(4) for number in range(12)
    ]  # fmt: skip
    failed_report = next(report for report in reports(rows) if report.node.host == "n00")
    assert failed_report.num_by_failure == {cause: num_days}
    assert (failed_report.failing, failed_report.marked) == (is_failing, is_failing)
    assert proves_node_fault(status, cause) == (is_failing or num_days == 1)


def test_nodes_of_two_clusters_without_a_name_are_told_apart(tmp_path):
    """Sweeps with launcher=slurm and without cluster= have the name that Slurm gives, those on this machine none."""
    clusters, rows = ("alps", "jura", ""), []
    for sweep in clusters:
        folder = make_sweep(tmp_path / f"sweep-{sweep}", SPECS[:1])
        first, *rest = night(0, "n01", 1)
        write(folder, replace(first, by={"user": "ann", "cluster": sweep, "host": "login"}), *rest)
        expected = {sweep or "local"}
        assert {row["cluster"] for row in read_nodes(folder, pytest.fail).rows} == expected
        assert {row["cluster"] for row in table_rows(collect([folder], lambda message: None))} == expected
        rows += read_nodes(folder, pytest.fail).rows
    labels = {report.label.partition(" (")[2] for report in reports(rows)}
    assert labels == {"alps)", "jura)", "local)"}


def control_row(host, time_s, **values):
    usual = dict.fromkeys(COLUMNS) | {
        "sweep": "s", "cluster": "c", "hardware": "h100x8", "kernel": "embedded", "allocation": host,
        "run_id": "r", "control": "r", "status": Status.OK, "hostnames": (host,), "started_at": 1.7e9,
    }  # fmt: skip
    return usual | {"step_time_s": time_s} | values


def test_controls_by_parts_are_compared_with_controls_by_parts():
    """Parts say that a step takes 10 % more; only n4 has measured both."""
    rows = [control_row(host, 1.1, measured_gas="2,4") for host in HOSTS[:3]]
    rows.append(control_row("n4", 1.0, parts_step_time_s=1.1))
    settings = {m.setting[-1]: 1 / m.value for m in measurements(rows)}
    assert settings == pytest.approx({True: 1.1, False: 1.0})
    speeds = {node.host: speed.relative for (_, node), speed in relative_speeds(measurements(rows)).items()}
    assert speeds == pytest.approx(dict.fromkeys((*HOSTS[:3], "n4"), 1.0))
