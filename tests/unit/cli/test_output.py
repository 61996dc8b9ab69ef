"""What commands print: JSON that keeps its promise, tables on stdout, and nothing heavy imported for it."""

import json
import re
import subprocess
import sys

import pytest

from tests.configs import write_config
from tests.sweep_folder import write
from tests.unit.cli.conftest import QUICK, as_json, record
from ultrabench import __version__
from ultrabench.launchers.open_sweep import folder_of, sweep_json_of
from ultrabench.record import to_dict
from ultrabench.result import Status
from ultrabench.run import AttemptKey
from ultrabench.store.events import AllocationEnded, Launched
from ultrabench.store.sweep_json import create_sweep_json
from ultrabench.sweep.candidate import CellKey
from ultrabench.sweep.config.files import CONFIG_GROUPS
from ultrabench.sweep.config.load import load_config

OK, CRASHED = (run.run_id for run in QUICK.runs[:2])
TRACKERS = {"wandb", "mlflow", "tensorboard"}
HEAVY = {"torch", "pandas", "scipy", "matplotlib", "seaborn", "hydra", "submitit", "numpy", *TRACKERS}


def test_plan_json_keeps_its_promise(ultrabench, tmp_path):
    words = ("sweep", "plan", "sweep=playbook", "model=1B", "sweep.nodes=[1,2]")
    plan = as_json(ultrabench, *words)
    shared = {"hardware": "h100x8", "seq_len": 4096, "gbs": 256, "precision": "bf16", "kernel": "embedded"}
    assert (shared | {"sweep": "playbook-h100x8"}).items() <= plan.items()
    assert plan["candidates"] == plan["valid"] + sum(plan["rejected"].values())
    assert [c["nodes"] for c in plan["cells"]] == [1, 2]
    numbers = {"candidates", "valid", "runs", "runs_at_most", "pruned", "predicted_to_fit"}
    promised = {*CellKey._fields, "predicted_gpu_hours", "predicted_gpu_hours_interval", "reason"} | numbers
    assert all(set(c) == promised for c in plan["cells"])
    assert 0 < plan["runs"] == sum(c["runs"] for c in plan["cells"]) < plan["runs_at_most"] / 5
    exhaustive = as_json(ultrabench, *words, "sweep.strategy=exhaustive")
    assert exhaustive["runs"] == exhaustive["runs_at_most"] == plan["runs_at_most"]
    beside = plan["beside_runs"]
    assert 0 < beside["repeats of the best"]["count"] <= 16
    parts = [part["predicted_gpu_hours"] for part in (*plan["cells"], *beside.values())]
    assert sum(parts) == pytest.approx(plan["predicted_gpu_hours"], rel=1e-3)
    for priced in (*plan["cells"], plan):
        low, high = priced["predicted_gpu_hours_interval"]
        assert 0.7 * priced["predicted_gpu_hours"] < low <= priced["predicted_gpu_hours"] <= high
    note = r"[\d.,]+ GPU hours, [\d.,]+ to [\d.,]+ with all step times at the ends"
    assert any(re.match(note, line) for line in plan["notes"])
    jobs = beside["starts of jobs"]["count"]
    jobs_note = rf"{jobs} jobs of [\d.]+ to [\d.]+ predicted minutes \(launcher.allocation_minutes=10"
    assert any(re.match(f"price for launcher=local: {jobs_note}", line) for line in plan["notes"])
    assert (plan["partial_steps"], exhaustive["partial_steps"]) == ("auto", "off")
    assert plan["notes"][-1] == "to measure every run in full, add measure.partial_steps=off"
    assert list(tmp_path.iterdir()) == []


def test_plan_of_a_sweep_that_has_begun_prices_what_is_left(ultrabench, sweep):
    words, total = ("sweep", "plan", "model=tiny"), len(QUICK.runs)
    begun = as_json(ultrabench, *words)
    record(sweep, QUICK.runs[2])
    later = as_json(ultrabench, *words)
    assert (begun["settled"], later["settled"], begun["runs"], later["runs"]) == (2, 3, total, total)
    assert 0 < later["cells"][0]["predicted_gpu_hours"] < begun["cells"][0]["predicted_gpu_hours"]
    assert f"3 of {total} runs settled: the price covers the rest" in later["notes"]
    for run in QUICK.runs[3:]:
        record(sweep, run)
    over = as_json(ultrabench, *words)
    assert (over["settled"], over["predicted_gpu_hours"]) == (total, 0)
    assert over["notes"] == [f"{total} of {total} runs settled: nothing is left to run"]
    _, out, err = ultrabench(*words, "sweep.seq_len=32", "--json")
    assert json.loads(out)["settled"] == 0
    assert re.match("warning: sweep launch would refuse this plan: .*start a new one with name=NAME", err)


def test_plan_top_names_what_fits_how_sure_a_prediction_is_and_what_limits_a_layout(ultrabench):
    words = ("sweep", "plan", "sweep=playbook", "sweep.models=[80B,8B]", "sweep.nodes=[1]", "--top", "2")
    document, out = as_json(ultrabench, *words), ultrabench(*words)[1]
    first, second = document["top"]
    assert (first["model"], second["model"]) == ("8B", "8B")
    assert first["step_time_low_s"] < first["step_time_s"] < first["step_time_high_s"]
    assert (0 <= first["p_oom"] <= 0.1, first["peak_mem_bytes"] < 80 * 2**30) == (True, True)
    assert first["expected_tokens_per_s_per_gpu"] == first["tokens_per_s_per_gpu"] * (1 - first["p_oom"])
    assert first["expected_tokens_per_s_per_gpu"] >= second["expected_tokens_per_s_per_gpu"]
    ends = f"{first['step_time_low_s']:.3g}-{first['step_time_high_s']:.3g}"
    assert re.search(rf"\({ends}\).* {first['limited_by']} .*{first['run_id']}", out)
    assert (document["cells"][0]["pruned"], document["cells"][0]["runs"]) == (115, 0)
    note = r"80B on 1 node: no layout is likely to fit into 79.11 GiB; the smallest is dp1 tp8 pp1 z0 mbs1 gas256, "
    fits = r"[\d.]+ GiB, P\(OOM\) 100 %; try sweep.nodes=\[\d\] [^|]*, P\(OOM\) (<1|[1-4]?\d) %\)"
    assert re.match(note + fits, document["notes"][0])
    assert document["notes"][0] in out


def test_plan_top_leaves_out_what_may_not_fit_and_marks_the_likeliest_where_nothing_else_is_left(ultrabench):
    batch, first = ("sweep.seq_len=8192", "sweep.gbs=128"), ("--top", "9", "--all")
    words = ["sweep", "plan", "model=llama3-70b", "hardware=h100x8", *batch, *first]
    odds = [row["p_oom"] for row in as_json(ultrabench, *words, "sweep.nodes=[4]")["top"]]
    assert (max(odds) <= 0.1, len(odds)) == (True, 3)
    eight = ["sweep", "plan", "model=llama3-8b", "hardware=h100x8", "sweep.nodes=[1]", batch[0], *first]
    strict, loose = (as_json(ultrabench, *eight, "--advise-p-oom", p)["top"] for p in ("0.01", "0.1"))
    assert max(row["p_oom"] for row in strict) < 0.01 < max(row["p_oom"] for row in loose) <= 0.1
    (only,) = as_json(ultrabench, *words, "sweep.nodes=[2]", "max_p_oom=1")["top"]
    assert (only["advised"], only["p_oom"] > 0.1) == (False, True)
    _, out, _ = ultrabench(*words, "sweep.nodes=[2]", "max_p_oom=1")
    assert "most likely to fit, not advised" in out
    (sizes,) = re.findall(r"; try (sweep.*)", out)
    for size, p_oom, rest in re.findall(r", ([\d.]+) GiB, P\(OOM\) (\d+) %([^)]*)", sizes):
        assert int(p_oom) <= 10
        assert (float(size) > 79.11) == ("no room for the allocator's reserve" in rest)


def test_plan_advises_to_share_experts_where_their_copies_do_not_fit(ultrabench):
    """Mixtral 8x7B with ZeRO-1: a rank without expert parallelism has 12 bytes and more for each of its experts."""
    write_config(
        "model/mixtral",
        "hidden_size: 4096\nnum_hidden_layers: 32\nnum_attention_heads: 32\nnum_key_value_heads: 8\n"
        "intermediate_size: 14336\nvocab_size: 32000\ntie_word_embeddings: false\nnum_experts: 8\n"
        "num_experts_per_tok: 2\nmoe_intermediate_size: 14336\n",
    )
    place = "sweep plan model=mixtral hardware=h100x8 sweep.nodes=[4]"
    words = f"{place} sweep.tp=[1] sweep.pp=[1] sweep.zero_stage=[1] sweep.recompute=[full]".split()
    _, _, err = ultrabench(*words, "sweep.ep=[1]")
    fits = r"try sweep.ep=\[8\] \(dp32 tp1 pp1 z1 mbs\d gas\d recompute-full ep8, ([\d.]+) GiB"
    assert float(re.search(fits, err)[1]) < 79.11
    (best,) = as_json(ultrabench, *words, "--top", "1")["top"]
    assert best["layout"].endswith(" ep8")


@pytest.mark.parametrize(
    ("overrides", "text"),
    [("launcher=slurm launcher.pack=4", "launcher.pack=4 besides the control run), time limit"),
     ("launcher=slurm launcher.pack=1", "launcher.pack=1), time limit"),
     ("launcher=slurm launcher.time_minutes=30", "time limit 30 minutes (launcher.time_minutes)"),
     ("launcher=slurm sweep=playbook sweep.models=[8B] sweep.nodes=[1] measure.partial_steps=off",
      "at 20% or less), time limits "),
     ("sweep.tp=[1,3]", "\nsweep.tp=3 has no candidate: 2 or 4 GPUs are not divisible by tp=3\n")],
)  # fmt: skip
def test_plan_tells_what_its_price_holds_for_and_which_values_fit_nothing(ultrabench, overrides, text):
    assert text in ultrabench("sweep", "plan", *overrides.split())[1]


def test_plan_warns_of_a_results_folder_that_cannot_be_written(ultrabench):
    code, _, err = ultrabench("sweep", "plan", "model=tiny", "results_dir=/proc/r")
    assert code == 0
    assert err.startswith(
        "warning: sweep launch would refuse this plan: cannot write the results folder /proc/r"
    )


def test_plan_warns_of_a_program_that_is_not_here(ultrabench):
    words = ("model=tiny", "kernel=command", "kernel.command=[python,no.py]", "--json")
    code, out, err = ultrabench("sweep", "plan", *words)
    assert (code, json.loads(out)["sweep"]) == (0, "quick-cpu")
    refused = "sweep launch would refuse this plan: kernel.command: no.py does not exist here"
    assert err.startswith(f"warning: {refused}")


def test_plan_prints_the_script_of_a_job_and_does_nothing_else(ultrabench, tmp_path, monkeypatch):
    write_config("cluster/mine", "partition: hopper\naccount: 1234\n")
    monkeypatch.setenv("PATH", str(tmp_path))
    words = ("launcher=slurm", "cluster=mine", "name=my sweep", 'launcher.python=[env,"A=b c",python]')
    code, out, err = ultrabench("sweep", "plan", "--show-script", *words)
    assert (code, err, out.splitlines()[0]) == (0, "", "#!/bin/bash")
    assert {"#SBATCH --partition=hopper", "#SBATCH --account=1234"} <= set(out.splitlines())
    command = f" env 'A=b c' python -P -m ultrabench.agent '{tmp_path}/results/my sweep/allocations/n"
    assert re.search(f"\nsrun .*{re.escape(command)}", out)
    assert [p.name for p in tmp_path.iterdir()] == ["ultrabench"]


def test_status_tells_ooms_failures_and_cancelled_runs_apart(ultrabench, sweep):
    out = ultrabench("sweep", "status")[1]
    assert "of them in failed runs" in out
    assert "in OOMs" not in out
    record(sweep, QUICK.runs[2], status=Status.OOM, reason="no memory", duration_s=9.0)
    record(sweep, QUICK.runs[3], status=Status.CANCELLED, reason="ended by SIGTERM", duration_s=9.0)
    out = " ".join(ultrabench("sweep", "status")[1].split())
    ends = "(1 crash, 1 ok), 1 cancelled, 1 oom to be retried, "
    assert f"2 of {len(QUICK.runs)} runs settled {ends}" in out
    shares = (rf"\d+% of them in {how}" for how in ("OOMs", "cancelled runs", "failed runs"))
    assert re.search(", ".join(shares), out)
    assert "last failures and OOMs" in out
    assert "ended by SIGTERM" not in out


def test_a_damaged_result_counts_as_the_next_launch_will_count_it(ultrabench, sweep):
    (path,) = sweep.journal.iterdir()
    write(sweep, AllocationEnded(allocation="n1", reason="all tasks done", source="agent"))
    path.write_text(path.read_text().replace('"event":"result"', '"event":{result"'))
    _, out, err = ultrabench("sweep", "status")
    assert f"{path}:3: skipped a corrupt line about run {OK}" in err
    assert f"1 of {len(QUICK.runs)} runs settled (1 crash), 1 lost to be retried" in out
    assert " running," not in out
    assert as_json(ultrabench, "sweep", "show", OK)["attempts"][0]["result"]["status"] == "lost"
    assert as_json(ultrabench, "sweep", "retry", "--dry-run", "--only", "lost")[0]["run_id"] == OK
    assert "lost" in ultrabench("sweep", "top")[1]


def test_what_may_not_win_is_told_and_named_as_best_by_no_command(ultrabench, sweep):
    best = QUICK.runs[0]
    odd, impossible, slower, invalid = [run for run in QUICK.runs[2:] if run.nodes == best.nodes][:4]
    record(sweep, odd, step_times_s=(0.09,), rank_step_times_s={"0": 0.1, "1": 0.5})
    record(sweep, impossible, step_times_s=(1e-9,) * 6)
    record(sweep, slower, step_times_s=(0.09,), stopped="slower_than_best")
    record(sweep, invalid, step_times_s=(0.09,), loss_final=9.0)
    status = as_json(ultrabench, "sweep", "status")
    assert status["by_status"] == {"ok": 4, "invalid": 1, "crash": 1, "pending": len(QUICK.runs) - 6}
    assert (status["sweep"], status["attempts"], len(status["suspects"])) == ("quick-cpu", 6, 2)
    reason = status["suspects"][f"{odd.run_id}.0.0"]
    assert reason == "rank 1 took 5.00 x the step time of rank 0"
    out = " ".join(ultrabench("sweep", "status")[1].split())
    assert "2 suspect results, such as " in out
    assert f"{best.spec.tokens_per_step / 0.1 / best.layout.world_size:,.0f}" in out.split("best so far")[1]
    top = as_json(ultrabench, "sweep", "plan", "model=tiny", "--top", "99", "--all")["top"]
    assert [row["run_id"] for row in top if row["why"] == "measured"] == [best.run_id]
    assert not {row["run_id"] for row in top} & {odd.run_id, impossible.run_id, slower.run_id}
    err, differs = ultrabench("collect")[2], "loss 9; the other 4 layouts"
    assert "rows suspect (wins only a cell without other results), such as " in err
    assert f"rows invalid, such as {invalid.run_id}: {differs}" in err
    assert as_json(ultrabench, "sweep", "retry", "--dry-run", "--only", "invalid")[0]["was"] == "invalid"
    shown = as_json(ultrabench, "sweep", "show", invalid.run_id)
    assert shown["attempts"][0]["result"]["reason"].startswith(differs)


def test_retry_names_what_failed_and_leaves_answers_alone(ultrabench, sweep):
    def again(*words):
        return as_json(ultrabench, "sweep", "retry", "--dry-run", *words)

    rows = again()
    assert [(r["run_id"], r["attempt"], r["was"]) for r in rows] == [(CRASHED, 1, "crash")]
    assert again("--only", "hang,timeout") == []
    assert again("--run", CRASHED[:6]) == rows
    sure, unsure = QUICK.runs[2:4]
    hosts = {"hostnames": ("gpu03", "gpu07")}
    record(sweep, sure, status=Status.OOM, cause="cpu_oom", confirmed=True, reason="no memory", **hosts)
    record(sweep, unsure, status=Status.OOM, cause="cpu_oom", confirmed=False, reason="no memory")
    assert {row["run_id"] for row in again()} == {CRASHED}
    oom = {row["run_id"]: row["on"] for row in again("--only", "oom")}
    assert oom == {sure.run_id: "gpu03,gpu07", unsure.run_id: ""}
    assert len(again("--run", sure.run_id)) == 1


def test_show_holds_everything(ultrabench, sweep):
    shown = as_json(ultrabench, "sweep", "show", CRASHED[:10])
    assert (shown["run_id"], shown["spec"]) == (CRASHED, to_dict(QUICK.runs[1].spec))
    assert [a["result"]["status"] for a in shown["attempts"]] == ["crash"]
    plan, out = shown["plan"], ultrabench("sweep", "show", CRASHED)[1]
    ratios = shown["communication_over_compute"]
    assert ratios.keys() == {name for name in ("dp", "tp", "pp") if plan[name] > 1}
    assert min(ratios.values()) > 0
    assert "communication over compute: " in out
    shown_plan = dict(re.findall(r"^(\S+) +(\S.*)$", out.partition("\nplan\n")[2], re.MULTILINE))
    assert shown_plan["predicted_step_time_s"] == f"{plan['predicted_step_time_s']:.4g} s"
    assert shown_plan["predicted_memory_share"].endswith(" %")
    assert shown_plan["predicted_peak_mem_bytes"].endswith("iB")
    assert shown_plan["mbs"] == str(plan["mbs"]) == str(QUICK.runs[1].layout.mbs)
    assert "order" not in shown_plan


@pytest.mark.parametrize(
    ("text", "silent"), [("--- rank 0\n--- rank 1\n", True), ("--- rank 0\nhello\n", False)]
)
def test_logs_of_a_run_that_printed_nothing_say_so(ultrabench, sweep, text, silent):
    logs = sweep.log_folder(AttemptKey(OK, 0, 0))
    logs.mkdir(parents=True)
    (logs / "node0.log").write_text(text)
    code, out, err = ultrabench("sweep", "logs", OK)
    assert (code, out, "has printed nothing" in err) == (0, text, silent)


@pytest.mark.parametrize("group", ["", "sweep", "kernel", "predict"])
def test_help_shows_whole_sentences_at_80_columns(ultrabench, group, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    code, out, _ = ultrabench(*group.split(), "--help")
    assert code == 0
    assert not [line for line in out.splitlines() if line.endswith("...") and "Usage" not in line]


def test_configs_json_names_every_group(ultrabench):
    assert as_json(ultrabench, "configs").keys() == {*CONFIG_GROUPS, "profile", "framework"}
    assert "quick" in as_json(ultrabench, "configs", "sweep")["sweep"]
    knobs_text = ultrabench("configs", "kernel", "megatron")[2]
    assert "layernorm+mla_up_proj+moe_act" in knobs_text
    assert max(map(len, knobs_text.splitlines()[1:])) <= 120


@pytest.mark.parametrize(
    ("command", "shown"),
    [("sweep plan --top 2", "layouts to try first"), ("sweep status", "[bold]no[/bold]"), ("configs", "tiny"),
     (f"sweep show {CRASHED}", "[bold]no[/bold]"), ("sweep retry --dry-run", "[bold]no[/bold]"),
     ("--version", __version__), ("kernel check --help", "Usage: ")],
)  # fmt: skip
def test_tables_go_to_stdout_and_brackets_are_no_markup(ultrabench, sweep, command, shown):
    code, out, err = ultrabench(*command.split())
    assert (code, err) == (0, "")
    assert shown in out


DRAWING = {"torch", "matplotlib", "seaborn", "submitit", *TRACKERS}
LIGHT = {
    "--help": HEAVY, "sweep launch --help": HEAVY, "sweep plan --json -o p.parquet": DRAWING | {"pandas", "scipy"},
    "sweep status --json": DRAWING, "predict model=8B tp=2 --json": DRAWING, f"sweep show {OK} --json": DRAWING,
    "heatmap --json": DRAWING, "collect": DRAWING,
}  # fmt: skip
"""Command -> modules that it must not import; in this order, since what one loads stays loaded."""


def test_commands_import_nothing_heavy_that_they_do_not_need(tmp_path, sweep):
    code = (
        "import contextlib, io, json, sys\n"
        "from ultrabench.cli.main import main\n"
        "for line in json.loads(sys.argv[1]):\n"
        "    sys.argv = ['ultrabench', *line.split()]\n"
        "    said = io.StringIO()\n"
        "    with contextlib.redirect_stdout(said), contextlib.suppress(SystemExit):\n"
        "        main()\n"
        "    print(json.dumps([bool(said.getvalue()), *sys.modules]))\n"
    )
    command = [sys.executable, "-c", code, json.dumps([*LIGHT])]
    process = subprocess.run(command, capture_output=True, text=True, check=True, cwd=tmp_path)
    for words, (printed, *names) in zip(LIGHT, map(json.loads, process.stdout.splitlines()), strict=True):
        assert printed or words == "collect"
        assert not LIGHT[words] & set(names), words
        assert "ultrabench.agent.diagnose.families" not in names, f"{words} reads no log"
    assert (sweep.path / "runs.parquet").is_file()


def test_a_sweep_that_is_named_twice_counts_once(ultrabench, sweep):
    once = ultrabench("collect", "quick-cpu")[2]
    twice = ultrabench("collect", "quick-cpu", str(sweep.path), "-o", "both.parquet")[2]
    assert once.split(" to ")[0] == twice.split(" to ")[0]


def test_a_peak_of_cpus_that_was_measured_too_low_costs_no_run_its_cell_and_gives_no_mfu(ultrabench, sweep):
    usual, fast = as_json(ultrabench, "sweep", "top")[0], QUICK.runs[2]
    step_time_s = fast.spec.tokens_per_step / usual["tokens_per_s_per_gpu"] / fast.layout.world_size
    record(sweep, fast, step_times_s=(step_time_s * usual["mfu"] / 1.41,) * 6)
    best = as_json(ultrabench, "sweep", "top")[0]
    values = [best[name] for name in ("run_id", "mfu", "suspect", "best")]
    assert values == [fast.run_id, None, None, True]
    out = ultrabench("sweep", "status")[1]
    assert fast.layout.label() in out.split("best so far")[1]
    assert "suspect" not in out
    for text in (out, ultrabench("sweep", "top")[2], ultrabench("collect")[2]):
        assert "a run computed 1.41 x as fast as the peak" in " ".join(text.split())
    assert "MFU" not in ultrabench("sweep", "top")[1]
    cells = {cell["shown_column"] for cell in as_json(ultrabench, "heatmap")}
    assert cells == {"tokens_per_s_per_gpu"}


def test_a_peak_that_was_measured_beside_other_programs_gives_no_mfu(ultrabench, sweep):
    text = sweep.sweep_json.read_text()
    for share, is_told in ((0.5, True), (0.95, False)):
        described = json.loads(text)
        described["environment"]["peak_core_share"] = share
        sweep.sweep_json.write_text(json.dumps(described))
        line = "the peak was measured with 50% of the cores, as other programs used the rest; to measure it again"
        for command in (("sweep", "top"), ("collect",), ("sweep", "status")):
            texts = ultrabench(*command)[1:]
            assert (line in " ".join("".join(texts).split())) == is_told
            assert "MFU" in texts[0] or is_told or command == ("collect",)


def test_plan_warns_of_what_a_launch_would_refuse_of_a_sweep_that_has_begun(ultrabench, tmp_path):
    (tmp_path / "train").write_text("#!/bin/sh\n")
    (tmp_path / "train").chmod(0o755)
    program = ("kernel=command", "kernel.command=[./train]")
    words = [*program, "sweep=quick", "model=tiny", "sweep.nodes=[1]", "name=b"]
    flags = "+sweep.flags={q: {a: [-x], b: []}}"
    config = load_config([*words, flags])
    folder = folder_of(config)
    folder.create()
    create_sweep_json(folder, sweep_json_of(config, {"core_flops_per_s": 1e9, "cores": 2}))
    write(folder, Launched(generation=1, config=config.resolved))
    assert "would refuse this plan" not in ultrabench("sweep", "plan", *words, flags)[2]
    line = (
        "sweep launch would refuse this plan: sweep.flags.q.a: ['-x'] -> ['-y'] in a sweep that was "
        "launched before; give these"
    )
    assert line in " ".join(ultrabench("sweep", "plan", *words, flags.replace("-x", "-y"))[2].split())
    assert "plan: sweep.env" not in ultrabench("sweep", "plan", *words, flags, "+sweep.env={A: [null, 1]}")[2]
    changed = " ".join(ultrabench("sweep", "plan", *words, flags, "+kernel.env={A: '1'}")[2].split())
    assert "would refuse this plan: " in changed
    assert "(kernel.env: {} -> {'A': '1'})" in changed
