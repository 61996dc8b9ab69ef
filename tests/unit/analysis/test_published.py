"""`ultrabench compare SWEEP published`: shares of published rates where all that counts is equal, else what differs."""

import json

import pytest

from tests.configs import refused, write_config
from tests.unit.analysis.tables import row, table_of
from tests.unit.cli.conftest import one_line, ultrabench  # noqa: F401
from ultrabench.analysis.results.collect import parquet
from ultrabench.analysis.results.published import beside_published, published_rates
from ultrabench.sweep.config.load import load_model

PLAYBOOK = {"model": "1B", "seq_len": 4096, "gbs": 256, "precision": "bf16", "hardware": "h100x8"}


def beside(**columns):
    (entry,) = beside_published(table_of(row("a", 38945.0, **PLAYBOOK | columns)))
    return entry


def test_a_share_of_the_published_rate_of_as_many_nodes():
    entry = beside()
    share = "38,945 tokens/s/GPU, 97% of the published rate (40,150, nanotron; https://huggingface.co/"
    assert share in entry.text
    assert beside(nodes=2).share == pytest.approx(38945 / 38839.82)
    assert "40,150" in beside(nodes=1, hardware="h100x8", model_id=load_model("1B").model_id).text
    assert "38,840, nanotron, on 2 instead of 4 nodes;" in beside(nodes=4).text


@pytest.mark.parametrize(
    ("columns", "differing"),
    [
        ({"gbs": 128}, {"gbs": (128, 256)}),
        ({"precision": "fp8"}, {"precision": ("fp8", "bf16")}),
        ({"hardware": "a100-80x8"}, {"gpu": ("A100-SXM-80GB", "H100-SXM")}),
        ({"model_id": "other"}, {"model": ("1B of another shape", "1B")}),
        ({"model": "llama3.1-8b", "precision": "fp8", "seq_len": 8192}, {"gbs": (256, None)}),
    ],
)
def test_the_nearest_rate_says_what_differs(columns, differing):
    entry = beside(**columns)
    assert (entry.differing, entry.share) == (differing, None)
    assert "no published rate matches" in entry.text
    assert ("(not stated)" in entry.text) == (None in next(iter(differing.values())))


def test_rates_of_the_user_and_their_mistakes(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = (
        "gpu: H100-SXM\nruns: [{model: mine, precision: bf16, seq_len: 4096, gbs: 256, nodes: 1, "
        "tokens_per_s_per_gpu: 77890, what: we, source: x}]"
    )
    write_config("mine", text, "ultrabench/published")
    assert beside(model="mine").share == pytest.approx(0.5)
    write_config("mine", text.replace("gbs: 256, ", ""), "ultrabench/published")
    with refused("gbs"):
        published_rates()


def test_the_command_prints_and_tells_programs(ultrabench, tmp_path, monkeypatch):  # noqa: F811
    monkeypatch.chdir(tmp_path)
    rows = row("a", 38945.0, **PLAYBOOK), row("b", nodes=2, status="oom", **PLAYBOOK)
    odd = row("c", model="odd", flops_formula="megatron")
    (tmp_path / "a.parquet").write_bytes(parquet(table_of(*rows, odd)))
    code, out, _ = ultrabench("compare", "a.parquet", "published")
    assert code == 0
    assert out.startswith("a: 1 of 2 cells with a rate match a published rate\n  1B on 1 x h100x8, dp8 ")
    document = json.loads(ultrabench("compare", "a.parquet", "published", "--json")[1])
    assert [entry["share"] and round(entry["share"], 2) for entry in document["rows"]] == [0.97, None]
    assert document["rows"][0]["published"]["tokens_per_s_per_gpu"] == 40149.94
    (tmp_path / "b.parquet").write_bytes(parquet(table_of(row("a", suspect="throttled", **PLAYBOOK))))
    refusal = one_line(ultrabench, "compare", "b.parquet", "published")
    assert "b: no cell has a rate to compare: 1 run, none can be compared: 1 suspect (throttled)" in refusal
    (tmp_path / "c.parquet").write_bytes(parquet(table_of(row("a", 38945.0, **PLAYBOOK | {"seq_len": 100}))))
    code, out, err = ultrabench("compare", "c.parquet", "published")
    assert (code, "c: 0 of 1 cell with a rate match a published rate\n" in out) == (2, True)
    assert "c: no published rate matches; only rates of equal model, GPU" in err
    assert "published must come second" in one_line(ultrabench, "compare", "published", "a.parquet")
    assert "-o x.png" in one_line(ultrabench, "compare", "a.parquet", "published", "-o", "x.png")
