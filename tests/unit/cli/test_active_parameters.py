"""Where MFU of a model with experts is read, its active parameters and what its MFU counts are said."""

import re
from dataclasses import replace

import pytest

from tests.sweep_folder import write
from tests.unit.analysis.sweeps import OK, SPECS, TINY, attempted, make_sweep
from ultrabench.analysis.page.rows import document
from ultrabench.analysis.results.collect import collect

COUNTED = "MFU uses the FLOPs formula palm, counting only the experts that a token passes through"
MOE = replace(TINY, name="moe", num_experts=8, num_experts_per_tok=2, moe_intermediate_size=32)
SIZES = "165 k parameters, 91.5 k active"


@pytest.fixture
def swept(tmp_path):
    """A sweep of a model with experts, of which one run is ok."""
    spec = replace(SPECS[0], shape=MOE)
    folder = make_sweep(tmp_path / "results" / "s", [spec], models=(MOE,))
    write(folder, *attempted(spec, OK))
    return folder


def test_status_show_and_top_say_what_mfu_counts(ultrabench, swept):
    status, shown, top = (ultrabench("sweep", *words) for words in (["status"], ["show", "1"], ["top"]))
    assert COUNTED in status[1]
    assert COUNTED in shown[1]
    assert f"\nmodel         {SIZES}\n" in shown[1]
    assert COUNTED in top[2]


def test_status_of_a_dense_model_has_no_such_line(ultrabench, sweep):
    assert "FLOPs formula" not in ultrabench("sweep", "status")[1]


def test_the_page_has_active_parameters_beside_all(swept):
    page = document(collect([swept], pytest.fail), public=True)
    assert page["formula"] == COUNTED
    (cell,) = page["cells"]
    assert (cell["num_params"], cell["num_active_params"]) == (MOE.num_params, MOE.num_active_params)


def test_predict_says_what_mfu_counts(ultrabench):
    words = ("predict", "nodes=1", "hardware=h100x8", "ep=8")
    sparse, dense = (
        ultrabench(*words[:3], *options)[1] for options in (["model=mixtral-8x7b", "ep=8"], ["model=8B"])
    )
    assert sparse.startswith("mixtral-8x7b (46.7 G parameters, 12.9 G active), ")
    assert COUNTED in sparse
    assert re.match(r"8B \([\d.]+ G parameters\), ", dense)
    assert COUNTED not in dense
