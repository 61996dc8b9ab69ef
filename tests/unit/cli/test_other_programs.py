"""What commands print about other training programs: their commands for a layout, and what a pattern finds in a log."""

import json
from dataclasses import replace

import pytest

from tests.unit.cli.conftest import QUICK, as_json
from ultrabench.cli.sweep.show_as import not_expressed, with_precision, without_other_models
from ultrabench.run import AttemptKey, fill_in
from ultrabench.sweep.config.load import load_config

OK = QUICK.runs[0].run_id


def test_show_tells_how_another_framework_trains_the_layout(ultrabench, sweep, tmp_path):
    run = QUICK.runs[0]
    shown = as_json(ultrabench, "sweep", "show", run.run_id, "--as", "megatron")
    torchrun = ["torchrun", f"--nnodes={run.nodes}", "--nproc-per-node=2", "--no-python", "bash"]
    assert shown["command"][:5] == torchrun
    assert "pretrain_gpt.py" in shown["command"]
    assert f"--tensor-model-parallel-size={run.layout.tp}" in shown["command"]
    assert "precision=fp32: its command sets precision=bf16" in " ".join(shown["not_expressed"])
    built_on_it = as_json(ultrabench, "sweep", "show", run.run_id, "--as", "megatron-perf")["command"]
    assert {*shown["command"]} - {*built_on_it} < {*shown["command"]}
    assert "--manual-gc" in built_on_it
    out = ultrabench("sweep", "show", OK, "--as", "torchtitan")[1]
    assert out.startswith(
        f"# run {OK}, tiny {run.layout.label()}, as torchtitan\n# written from the sources of torchtitan "
        "0.3.0\n# not expressed: "
    )
    assert "the model, because --config=llama3_8b selects another; register one with hidden_size=64" in out
    assert "None" not in out
    assert "--config=" not in out.partition("\ntorchrun \\\n")[2]
    (tmp_path / "ultrabench/kernel").mkdir(parents=True)
    mine = "kind: command\nprecision: fp32\ncommand: ['./train', '--tp={tp} {pp}']\nenv: {LEVEL: a b}\n"
    (tmp_path / "ultrabench/kernel/mine.yaml").write_text(mine)
    run = next(run for run in QUICK.runs if run.layout.zero_stage == 3)
    out = ultrabench("sweep", "show", run.run_id, "--as", "mine")[1]
    torchrun = f"torchrun \\\n  --nnodes={run.nodes} \\\n  --nproc-per-node=2 \\\n  --no-python"
    command = f"{torchrun} \\\n  ./train \\\n  '--tp={run.layout.tp} {run.layout.pp}'\n"
    assert out.endswith(f"\nLEVEL='a b' \\\n  {command}")
    assert "\n# not expressed: zero_stage=3: its command has no such setting\n" in out


def test_a_file_of_a_framework_goes_to_stdout_and_comments_to_stderr(ultrabench, sweep, tmp_path):
    run = next(run for run in QUICK.runs if run.layout.zero_stage == 3)
    shown = as_json(ultrabench, "sweep", "show", run.run_id, "--as", "deepspeed")
    code, out, err = ultrabench("sweep", "show", run.run_id, "--as", "deepspeed")
    assert (code, out) == (0, shown["text"] + "\n")
    assert (shown["file"], json.loads(out)["zero_optimization"]["stage"]) == ("ds_config.json", 3)
    assert (json.loads(out)["train_batch_size"], json.loads(out)["bf16"]) == (
        run.layout.gbs,
        {"enabled": False},
    )
    assert f"# written from {shown['written_from']}\n# not expressed: " in err
    assert f"seq_len={run.spec.workload.seq_len}: your data loader cuts the sequences" in " ".join(
        shown["not_expressed"]
    )
    (tmp_path / "ultrabench/framework").mkdir(parents=True)
    mine = tmp_path / "ultrabench/framework/mine.yaml"
    mine.write_text("file: mine.yaml\nsettings: ['degrees.tp={tp}']\n")
    assert ultrabench("sweep", "show", run.run_id, "--as", "mine")[1] == f"degrees:\n  tp: {run.layout.tp}\n"
    assert {"mine", "nemo"} <= as_json(ultrabench, "configs", "framework")["framework"].keys()
    for text, line in {
        "settings: [a=1]\nelsewhere: {ppp: none}": "unknown word of elsewhere 'ppp'",
        "file: x.json": "settings is empty",
    }.items():
        mine.write_text(text)
        code, _, err = ultrabench("sweep", "show", run.run_id, "--as", "mine")
        assert (code, err.count("\n"), "mine.yaml: " in err, line in err) == (2, 1, True, True), err


@pytest.mark.parametrize(
    ("framework", "flags", "line"),
    [
        ("megatron", {"--fp8-format=hybrid", "--fp8-recipe=tensorwise"}, "the scale per row of precision=fp8"),
        ("torchtitan", set(), "precision=fp8: its command sets precision=bf16"),
        ("nanotron", set(), "precision=fp8: its command sets precision=bf16"),
    ],
)  # fmt: skip
def test_a_framework_is_told_of_fp8_or_the_command_says_that_it_is_not(framework, flags, line):
    config, run = load_config([f"kernel={framework}"]), QUICK.runs[0].spec
    run = replace(run, kernel=replace(run.kernel, precision="fp8"))
    kernel = with_precision(config.kernel, "fp8")
    framework_spec = replace(run, kernel=without_other_models(run, kernel))
    assert set(fill_in(framework_spec, AttemptKey(OK, 0, 0), config.measure)) >= flags
    assert line in "; ".join(not_expressed(run, kernel))


def test_try_log_shows_what_the_patterns_of_a_kernel_find(ultrabench, tmp_path):
    log = tmp_path / "train.log"
    log.write_text(
        "starts\nstep 1 took 0.5 s, memory 1.5GiB, mfu 40%\nstep 2 took 0.25 s, memory 2GiB, mfu 41%\n"
    )
    (tmp_path / "ultrabench/kernel").mkdir(parents=True)
    patterns = {
        "step": r"took (?P<seconds>\S+) s",
        "memory": r"memory (?P<allocated_gib>[\d.]+)GiB",
        "mfu": r"mfu (?P<percent>\d+)%",
    }
    lines = (f"{name}_line: '{pattern}'" for name, pattern in patterns.items())
    (tmp_path / "ultrabench/kernel/mine.yaml").write_text("\n".join(["kind: command", *lines]))
    (tmp_path / "ultrabench/kernel/built_on_it.yaml").write_text("defaults: [mine, _self_]\n")
    matches = as_json(ultrabench, "kernel", "try-log", "built_on_it", "train.log")
    assert matches == as_json(ultrabench, "kernel", "try-log", "mine", "train.log")
    assert [[row["line"] for row in matches[name]["lines"]] for name in matches] == [[2, 3]] * 3
    assert matches["memory_line"]["lines"][0]["allocated_bytes"] == 1.5 * 2**30
    assert matches["mfu_line"]["lines"][0]["mfu"] == pytest.approx(0.4)
    code, out, _ = ultrabench("kernel", "try-log", patterns["step"], "train.log")
    assert (code, "kernel.step_line: 2 steps in train.log" in out, "0.25" in out) == (0, True, True)
    assert "the number is divided by 100" in matches["mfu_line"]["form"]
    log.write_text("".join(f"took {n} s\n" for n in range(1, 9)))
    out = ultrabench("kernel", "try-log", patterns["step"], "train.log")[1]
    assert "kernel.step_line: 8 steps in train.log, the first 5:" in out
    log.write_text("mfu 0.40%\n mfu 0.41\n")
    for group, form in {
        "0.4(?P<fraction>0)": "the number is read as a fraction of 1, but a % follows it: "
        "name the group (?P<percent>...)",
        "(?P<fraction>0.41)": "the number is read as a fraction of 1; for percent, name the group (?P<percent>...)",
        "(?P<percent>0.40)": "the number is divided by 100; for a fraction of 1, name the group (?P<fraction>...)",
        "(?P<percent>0.41)": "every number is below 1 percent; for a fraction of 1, name the group (?P<fraction>...)",
    }.items():
        assert f"kernel.mfu_line: {form}\n" in ultrabench("kernel", "try-log", f"mfu {group}", "train.log")[2]
    log.write_text("\nmfu 40%\n")
    code, out, err = ultrabench("kernel", "try-log", r"mfu (?P<fraction>\d+)%", "train.log")
    assert (code, out) == (1, "")
    assert "kernel.mfu_line: no MFU value found in train.log; nearest lines:" in err
    assert "line 2 matches, but MFU 40 is above 1; for a percentage, use the group (?P<percent>...)" in err
    code, _, err = ultrabench("kernel", "try-log", "took (?P<secs>.)", "train.log")
    assert (code, "is not a kernel, and has no group" in err, err.count("\n")) == (2, True, 1)


LOGS = {
    "comma": (
        r"time (?P<seconds>[\d.,]+) s loss (?P<loss>[\d.,]+)",
        "time 1,25 s loss 3,5\ntime 0,750 s loss 3,125\n",
        "1  1.25 s  3.5\n 2  0.75 s  3.125",
        "median 1 s a step, from 0.75 s to 1.25 s",
    ),
    "nan": (
        r"time (?P<seconds>\S+) loss (?P<loss>\S+)",
        "time 0.4 loss 3.0\ntime 0.5 loss N/A\n",
        "1  0.4 s  3\n 2  0.5 s  nan",
        "the loss of 1 line is not finite or not a number, first of line 2: such a run is invalid",
    ),
    "bar": (
        r"(?P<seconds>[\d.]+)s/it",
        "\r1/9 [00:01, 0.5s/it]\rloss 2.9 1/9 [00:01, 0.5s/it]\r2/9 [00:01, 0.6s/it]\n",
        "2  0.5 s\n 4  0.6 s",
        "1 matching line ignored:\nline 3 matches, but step 1 has counted already: loss 2.9 1/9",
    ),
    "rate": (
        r"(?P<samples_per_s>[\d.,]+) samples/s",
        "1,234 samples/s\n1,235 samples/s\n",
        "1  1234 samples/s\n 2  1235 samples/s",
        "a run computes the time of a step from samples_per_s: gbs / samples_per_s",
    ),
    "arrival": (
        r"'loss': (?P<loss>[\d.]+)",
        "{'loss': 9.5}\n{'loss': 9.25}\n{'eval_loss': 9.1}\n",
        "1  9.5  1\n 2  9.25  1",
        "a run times steps by the arrival of these lines: 2 lines give 1 time",
    ),
    "micro-batches": (
        r"took (?P<milliseconds>[\d.]+)",
        "".join(f"micro {n} iter {n // 2} took 50{n} ms\n" for n in range(4)),
        "1  0.5 s\n 2  0.501 s",
        "2 lines show the same step: they are those of micro-batches or of several ranks",
    ),
    "evaluation": (
        r"step: (?P<step>\d+) .*tps: (?P<tokens_per_s_per_gpu>\S+)",
        "step: 1 tps: 10\nvalidate step: 2 tps: 99\nstep: 3 tps: 11\n",
        "1  1  10 tokens/s/GPU\n 2  2  99 tokens/s/GPU",
        "1 of 3 lines that count contain a word for evaluation; let the pattern match lines of training only",
    ),
    "elapsed": (
        r"elapsed (?P<seconds>\S+)",
        "".join(f"step {n} elapsed {n}.5 s\n" for n in range(1, 8)),
        "1  1.5 s\n 2  2.5 s",
        "each time is about 1 s longer than the one before: they are probably those since the start",
    ),
}  # fmt: skip
"""Name of a log -> a pattern, the log, the beginning of the table's rows, and a part of what is said."""


@pytest.mark.parametrize("name", LOGS)
def test_try_log_shows_values_with_units_and_what_it_drops(ultrabench, tmp_path, name):
    pattern, log, rows, line = LOGS[name]
    (tmp_path / "train.log").write_text(log)
    code, out, err = ultrabench("kernel", "try-log", pattern, "train.log")
    assert (code, line in err) == (0, True), err
    squeezed = [" ".join(text.split()) for text in out.splitlines()]
    start = squeezed.index(" ".join(rows.splitlines()[0].split()))
    assert squeezed[start : start + 2] == [" ".join(text.split()) for text in rows.splitlines()]


def test_try_log_refuses_a_rate_as_a_time(ultrabench, tmp_path):
    (tmp_path / "train.log").write_text("\r1/9 [00:01, 2.5it/s]\r2/9 [00:01, 2.6it/s]\n")
    code, out, err = ultrabench("kernel", "try-log", r"(?P<seconds>[\d.]+)it/s", "train.log")
    assert (code, out) == (1, "")
    assert (
        "the unit of '2.5' is step/s, which the group seconds does not read; use the group (?P<steps_per_s>...)"
        in err
    )
    found = as_json(ultrabench, "kernel", "try-log", r"(?P<steps_per_s>[\d.]+)it/s", "train.log")
    assert [row["steps_per_s"] for row in found["step_line"]["lines"]] == [2.5, 2.6]


def test_a_pattern_without_groups_is_not_taken_for_the_name_of_a_kernel(ultrabench, tmp_path):
    (tmp_path / "train.log").write_text("iter 1\niter 2\niter 3\n")
    assert len(as_json(ultrabench, "kernel", "try-log", r"iter \d", "train.log")["step_line"]["lines"]) == 3
    code, _, err = ultrabench("kernel", "try-log", "torchtitn", "train.log")
    assert (code, "did you mean torchtitan?" in err) == (2, True)
