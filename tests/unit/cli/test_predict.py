"""`ultrabench predict` and `kernel dryrun`: one layout by part; `validate` and
`calibrate` on measured runs.
"""

import json
import re
from pathlib import Path
from statistics import median

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.configs import write_config
from tests.unit.cli.conftest import QUICK, as_json
from ultrabench.cli.kernel.dryrun import dryrun_spec
from ultrabench.cli.predict.layout import distance
from ultrabench.errors import ConfigError, LayoutError
from ultrabench.model_shape import ModelShape
from ultrabench.record import from_dict
from ultrabench.sweep.arguments import PREDICTION_DEFAULTS, read_run
from ultrabench.sweep.config.files import files
from ultrabench.sweep.config.load import load_config, load_profile
from ultrabench.sweep.plan import make_plan

H100 = Path(__file__).parents[3] / "benchmarks" / "h100"
"""Results of runs on one H100; no constant comes from those of unseen.parquet."""
WORDS = ("model=llama3-70b", "nodes=8", "tp=8", "pp=4", "zero_stage=1", "gas=16")


def test_predict_json_keeps_its_promise(ultrabench):
    document = as_json(ultrabench, "predict", *WORDS)
    assert document["label"].startswith("dp2 tp8 pp4 z1 mbs1 gas16")
    assert sum(document["memory"].values()) == document["peak_mem_bytes"]
    peaks = [stage["peak_bytes"] for stage in document["stages"]]
    assert (len(peaks), max(peaks)) == (4, document["peak_mem_bytes"])
    assert {type(size) for size in (*document["memory"].values(), *peaks)} == {int}
    assert document["p_oom"] == round(document["p_oom"], 6)
    assert sum(document["time"].values()) == pytest.approx(document["step_time_s"])
    assert document["step_time_low_s"] < document["step_time_s"] < document["step_time_high_s"]
    tokens = document["spec"]["workload"]["gbs"] * 4096 / document["step_time_s"] / 64
    assert document["tokens_per_s_per_gpu"] == pytest.approx(tokens)
    assert 0 < document["mfu"] < 1
    assert document["communication_over_compute"].keys() == {"dp", "tp", "pp"}
    assert "communication over compute: dp " in ultrabench("predict", *WORDS)[1]


def test_predict_tells_what_no_run_of_the_fit_had(ultrabench):
    words = ("predict", "model=8B", "profile=nanotron")
    assert as_json(ultrabench, *words, "tp=4", "zero_stage=1")["unmeasured"] == []
    words = (*words, "zero_stage=3", "hardware=b200x8")
    unmeasured = as_json(ultrabench, *words)["unmeasured"]
    assert unmeasured == ["gpu=B200 (H100-SXM)", "zero_stage=3 (0 to 1)"]
    assert (
        f"extrapolated beyond the fitted values (in brackets): {', '.join(unmeasured)}"
        in ultrabench(*words)[1]
    )
    assert "extrapolated" not in ultrabench("predict", "profile=megatron", "zero_stage=1")[1]
    unmeasured = as_json(ultrabench, "predict", "model=mixtral-8x7b", "ep=8")["unmeasured"]
    assert unmeasured == ["experts=some (none)", "ep=8 (1)"]
    sparse = ("predict", "model=mixtral-8x7b", "ep=8", "profile=megatron-perf")
    fact = "no measurement of Megatron (NVIDIA's recipes) with experts on H200-SXM"
    assert as_json(ultrabench, *sparse, "hardware=h200x8")["unproven"] == [fact]
    assert f"unproven: {fact}\n" in ultrabench(*sparse, "hardware=h200x8")[1]
    assert as_json(ultrabench, *sparse)["unproven"] == []


@pytest.mark.parametrize(("value", "dp_shard"), [("all", 0), ("node", 4), ("2", 2)])
def test_predict_takes_the_words_for_dp_shard_that_a_sweep_takes(value, dp_shard):
    arguments = ["nodes=2", "tp=2", "zero_stage=1", f"dp_shard={value}"]
    assert read_run(arguments, PREDICTION_DEFAULTS)[0].layout.dp_shard == dp_shard


def test_a_plan_marks_predictions_that_are_extrapolated_or_above_what_others_published(ultrabench):
    words = [
        "sweep", "plan", "model=llama3-8b", "sweep.nodes=[1]", "sweep.seq_len=8192", "sweep.gbs=64", "--top", "2",
    ]  # fmt: skip
    plan = as_json(ultrabench, *words, "hardware=h100x8")
    assert plan["unmeasured"][0] == "zero_stage=1, 2, 3 (0)"
    assert plan["top"][0]["unmeasured"] == ["zero_stage=3 (0)"]
    assert plan["unproven"] == ["no measurement of our kernel with a pipeline"]
    assert not any(row["above_published"] or row["unproven"] for row in plan["top"])
    none = ultrabench(*words, "hardware=b200x8")[1]
    assert "no published rate for B200 in bf16 is known" in none
    assert "gpu=B200 (H100-SXM)" in none
    write_config(
        "published/low",
        "gpu: B200\nbest: {bf16: {mfu: 0.3, flops_formula: palm, what: our own 8B, source: https://x.org}}\n",
    )
    above = ultrabench(*words, "hardware=b200x8")[1]
    assert re.search(
        r"MFU is \d+(\.\d+)? % above the best published for B200 in bf16, with FLOPs counted alike: "
        r"our own 8B .*https://x\.org",
        above,
    )
    assert "extrapolated, unproven, above published" in above
    assert "unproven: no measurement of our kernel on B200\n" in above
    assert above.count("FLOPs formula") == 1, "all MFUs of an output are by the same formula"
    assert "MFU uses the FLOPs formula palm\n" in above


def test_predict_draws_bars_and_says_what_limits_the_layout(ultrabench):
    assert ", sequences of 1 token\n" in ultrabench("predict", "seq_len=1")[1]
    out = ultrabench("predict", *WORDS)[1]
    assert out.startswith("llama3-70b (70.6 G parameters), dp2 tp8 pp4")
    assert "peak memory (pipeline rank 0, " in out
    assert re.search("\ngemm .*\u2588{40}\n", out)
    assert re.search(r"P\(OOM\) [^|]*tokens/s/GPU, MFU [^|]*; limited by ", out)


def test_predict_shows_measured_runs_that_are_like_the_layout(ultrabench, sweep):
    measured = QUICK.runs[0]
    words = [f"{n}={getattr(measured.layout, n)}" for n in ("tp", "pp", "mbs", "gas", "zero_stage")]
    command = ("predict", "model=tiny", "hardware=cpu", f"nodes={measured.nodes}", "seq_len=64", *words)
    (run,) = as_json(ultrabench, *command)["nearest"]
    assert (run["run_id"], run["step_time_s"]) == (measured.run_id, pytest.approx(0.1))
    assert (run["seq_len"], run["predicted_step_time_s"]) == (64, measured.prediction.step_time_s)
    text = ultrabench(*command)[1]
    assert "most similar measured runs" in text
    assert "assumes 50 GFLOP/s per core; a sweep measures its cores first" in text
    assert distance(measured.spec, measured.spec) == 0 < distance(measured.spec, QUICK.runs[1].spec)


@pytest.mark.parametrize(
    ("words", "label", "precision"),
    [("", "dp8 tp1 pp1 z0 mbs1 gas1", "bf16"),
     ("nodes=8 pp=4 mbs=2", "dp16 tp1 pp4 z0 mbs2 gas4", "bf16"),
     ("pp=4 pp_schedule=zbv", "dp2 tp1 pp4 z0 mbs1 gas4 zbv x2", "bf16"),
     ("pp=2 pp_schedule=interleaved virtual_stages=4", "dp4 tp1 pp2 z0 mbs1 gas2 interleaved x4", "bf16"),
     ("hardware=cpu model=tiny nodes=2 cp=2", "dp2 tp1 pp1 cp2 z0 mbs1 gas1", "fp32")],
)  # fmt: skip
def test_what_is_not_said_follows(words, label, precision):
    spec, _ = dryrun_spec(words.split())
    assert (spec.layout.label(), spec.kernel.precision) == (label, precision)


@pytest.fixture
def runs(tmp_path):
    """Writes a file of results with other step times."""

    def write(*factors):
        table = pq.read_table(H100 / "unseen.parquet").slice(0, len(factors))
        column = table.schema.get_field_index("step_time_s")
        times = pa.array([t * by for t, by in zip(table["step_time_s"].to_pylist(), factors, strict=True)])
        pq.write_table(table.set_column(column, table.schema.field(column), times), tmp_path / "runs.parquet")

    return write


@pytest.mark.parametrize("name", ["runs", "unseen"])
def test_our_kernel_is_predicted_as_it_ran_on_a_gpu(ultrabench, name):
    """Compiled runs of that day still made a softmax of the logits in fp32, up to 0.8 GB that the form leaves out."""
    document = as_json(ultrabench, "predict", "validate", str(H100 / f"{name}.parquet"))["all"]
    assert document["step_time"]["median_error"] < 0.05
    assert document["memory"]["median_error"] < 0.015
    assert document["memory"]["p90_error"] < 0.035
    assert document["oom"]["accuracy"] == 1


def test_validate_prints_metrics_rows_and_a_figure(ultrabench):
    words = ("predict", "validate", str(H100 / "unseen.parquet"))
    document = as_json(ultrabench, *words, "--rows", "r.parquet", "-o", "f.svg")
    assert document["healthy"]["rows"] == document["all"]["rows"] == 9
    by_factor = document["errors_by_factor"]
    assert (by_factor["rows"], by_factor["by"]["gpu"]["H100-SXM"]["rows"]) == (9, 9)
    assert by_factor["median_error"] == pytest.approx(document["all"]["step_time"]["median_error"])
    assert 0 <= by_factor["settings_left_out"] <= 1
    columns = {"predicted_step_time_s", "predicted_low_s", "predicted_high_s", "p_oom", "regime"}
    assert columns <= set(pq.read_table("r.parquet").column_names)
    assert Path("f.svg").read_text().startswith("<?xml")
    code, out, err = ultrabench(*words)
    assert code == 0
    assert "9 runs; excluded: none" in err
    assert "step time of healthy rows, profile ultrabench: 9 runs (0 excluded)" in out
    assert out.count("memory (reserved 9) and OOM of all rows") == 1
    written = pq.read_table("r.parquet").to_pylist()
    errors = [row["predicted_step_time_s"] / row["step_time_s"] - 1 for row in written]
    assert [row["step_time_error"] for row in document["rows"]] == pytest.approx(errors)
    assert median(map(abs, errors)) == pytest.approx(document["all"]["step_time"]["median_error"])
    assert re.search(r"tokens/s/GPU of each run *\n.* step time error", out)
    assert re.search(r"step time of healthy rows by factor.*\n.* setting left out.*\nall  *9 ", out)


@pytest.mark.parametrize("profile", sorted(files("profiles")))
def test_every_profile_predicts_a_layout(ultrabench, profile):
    document = as_json(ultrabench, "predict", "model=1B", "hardware=h100x8", "tp=2", f"profile={profile}")
    assert 0 < document["peak_mem_bytes"] < 80 * 2**30


def test_calibrate_writes_a_profile_that_validate_uses(ultrabench, runs):
    runs(*[2.0] * 9)
    document = as_json(ultrabench, "predict", "calibrate", "runs.parquet", "--write", "next")
    assert (document["runs"], document["prior"], document["fitted"]["step_time"]) == (9, "ultrabench", 9)
    sweep = load_config(["sweep=next"])
    assert [run["layout"] for run in document["next"]] == [spec.label() for spec in listed_specs(sweep)]
    assert sweep.profile.name == "mine"
    assert all(run["teaches"] for run in document["next"])
    assert document["after"]["median_error"] < document["before"]["median_error"]
    assert load_profile("mine").prior == "ultrabench"
    words = ("predict", "validate", "runs.parquet", "profile=mine")
    used = as_json(ultrabench, *words)
    assert used["all"]["step_time"]["median_error"] < document["before"]["median_error"] / 2
    err = ultrabench(*words)[2]
    assert used["profiles"][0]["source"] in err
    assert "the errors are fit errors" in err


def listed_specs(sweep):
    """The runs of a sweep that lists its layouts."""
    plan = make_plan(sweep)
    return [candidate.spec for candidate in plan.candidates if candidate.runs]


def test_calibrate_begins_with_rows_of_others(ultrabench, runs):
    """Imported rows that take twice as long as predicted, and own runs that take thrice as long."""
    runs(*[2.0] * 9)
    Path("runs.parquet").rename("published.parquet")
    words = ("predict", "calibrate", "--from", "published.parquet", "kernel=embedded", "hardware=h100x8")
    begun = as_json(ultrabench, *words)
    assert (begun["runs"], begun["prior"]) == (9, "ultrabench")
    runs(*[3.0] * 9)
    both = as_json(ultrabench, "predict", "calibrate", "runs.parquet", "--from", "published.parquet")
    assert both["before"]["median_error"] < 0.5, "the rows of others are the start"
    assert both["after"]["median_error"] < 0.1
    assert load_profile("mine").prior == "ultrabench"


@pytest.mark.parametrize("command", ["calibrate", "validate"])
def test_rows_without_a_time_above_0_are_counted(ultrabench, runs, command):
    runs(-1.0, 0.0, -2.0)
    code, _, err = ultrabench("predict", command, "runs.parquet")
    assert code == 2
    assert "0 runs; excluded: 3 with a step time that is not above 0 s" in err


@pytest.mark.parametrize(("words", "line"), [
    ("validate runs.parquet --leave-out kernel", "unknown group for --leave-out 'kernel'"),
    ("calibrate runs.parquet -o mine.yml", "mine.yml: a profile is a YAML file; give a name that ends in .yaml"),
    ("validate runs.parquet --leave-out nodes", "--leave-out nodes needs healthy runs with at least 2 values of "
    "nodes; these have nodes=1; give"),
    ("calibrate runs.parquet", "3 healthy runs with a step time; a fit needs at least 5"),
    ("calibrate --from runs.parquet kernel=embedded hardware=h200x8", "--from: no row of embedded on H200-SXM; "
    "did you mean embedded on H100-SXM? (known: embedded on H100-SXM); name one of them with kernel= and hardware="),
    ("calibrate runs.parquet --force", "--force replaces the file of --write"),
])  # fmt: skip
def test_a_mistake_is_one_line(ultrabench, runs, words, line):
    runs(1.0, 1.0, 1.0)
    code, _, err = ultrabench("predict", *words.split())
    assert code == 2
    assert line in err.splitlines()[-1]


PREDICTING = {
    "model_type": "glm4_moe", "architectures": ["Glm4MoeForCausalLM"], "hidden_size": 64, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 96, "vocab_size": 512,
    "n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "n_shared_experts": 1,
    "num_nextn_predict_layers": 1,
}  # fmt: skip
"""A config.json with a module for multi-token prediction."""


def test_predict_says_that_a_file_has_modules_which_are_left_out(ultrabench, tmp_path):
    (tmp_path / "mine.json").write_text(json.dumps(PREDICTING))
    assert as_json(ultrabench, "predict", "model=./mine.json")["modules_left_out"] == 1
    assert (
        "left out: 1 module for multi-token prediction in this"
        in ultrabench("predict", "model=./mine.json")[1]
    )
    (tmp_path / "mine.json").write_text(json.dumps(PREDICTING | {"num_nextn_predict_layers": 0}))
    assert "left out" not in ultrabench("predict", "model=./mine.json")[1]


def test_the_rows_of_a_prediction_have_all_parameters(ultrabench):
    """Modules for multi-token prediction of a YAML file have a row of their own."""
    tiny = files("model")["tiny"].read_text()
    write_config("model/mine", f"{tiny}\nnum_nextn_predict_layers: 2\n")
    document = as_json(ultrabench, "predict", "model=mine")
    assert document["modules_left_out"] == 0
    *_, modules, _ = document["layer_types"]
    assert (modules["name"], modules["num_layers"]) == ("module for multi-token prediction", 2)
    for size in ("num_params", "num_active_params"):
        assert document[size] == sum((row["num_layers"] or 1) * row[size] for row in document["layer_types"])
    shape = from_dict(ModelShape, document["spec"]["shape"])
    flops = sum((row["num_layers"] or 1) * row["flops_per_token"] for row in document["layer_types"])
    assert flops == pytest.approx(shape.flops_per_token(document["spec"]["workload"]["seq_len"]), rel=1e-6)


@pytest.mark.parametrize(
    ("arguments", "advice"),
    [
        ("kernel=torchtitan zero_stage=0", "add zero_stage=3"), ("kernel=nanotron zero_stage=3", "add zero_stage=0"),
        ("kernel=megatron cp=8 seq_len=4", "choose another layout"),
        ("kernel=megatron model=qwen3-30b-a3b zero_stage=1 routing=skew=2", "use routing=balanced or routing=learned"),
    ],
)  # fmt: skip
def test_a_refused_value_names_one_that_the_program_supports(arguments, advice):
    with pytest.raises(LayoutError, match=f"; {advice}$"):
        read_run(arguments.split(), PREDICTION_DEFAULTS, any_model=True)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("kernel=megatron cuda_graph=xx", "unknown value of cuda_graph: 'xx'"),
        ("precision=fp9", "precision='fp9'; must be"), ("compile=xx", "compile='xx'; must be"),
        ("routing=xx", "routing='xx'; must be"),
    ],
)  # fmt: skip
def test_a_refused_value_is_named_as_it_was_typed(arguments, message):
    with pytest.raises(ConfigError, match=f"^{message}"):
        read_run(arguments.split(), PREDICTION_DEFAULTS, any_model=True)
