"""A plan says when early stopping will leave too few pairs for the effect of an option, and what gives enough."""

import pytest

from tests.unit.cli.conftest import as_json
from ultrabench.analysis.results.planned import predicted_results
from ultrabench.analysis.studies.effects.effects import competing, pairs
from ultrabench.sweep.config.load import load_config
from ultrabench.sweep.plan import make_plan
from ultrabench.sweep.plan_table import FIRST_VALUES_KEY, HARDWARE_KEY, first_values, plan_table
from ultrabench.sweep.running.early_stopping import num_option_pairs

WORDS = ("model=llama3-8b", "hardware=h100x8", "launcher=slurm", "sweep.nodes=[1]")
FEW_LAYOUTS = ("sweep.tp=[1,2,4,8]", "sweep.pp=[1]", "sweep.zero_stage=[3]", "sweep.mbs=[1,2]")
ALGO = "+sweep.env.NCCL_ALGO=[null,Ring]"


@pytest.mark.parametrize(
    ("words", "value", "pairs_of", "settings"),
    [
        ((ALGO, *FEW_LAYOUTS), None, None, None),
        ((ALGO, *FEW_LAYOUTS, "measure.race=1.01"), "Ring", (1, 6), ["measure.race=null"]),
        ((ALGO, *FEW_LAYOUTS, "measure.race=1.01", "repeats=3"), None, None, None),
        ((ALGO, *FEW_LAYOUTS, "sweep.strategy=adaptive"), "Ring", (3, 6), ["sweep.strategy=exhaustive"]),
        (("sweep.seq_len=[2048,16384]", "sweep.gbs=64", "sweep.strategy=adaptive"), 16384, (0, 19),
         ["sweep.strategy=exhaustive", "measure.race=null"]),
    ],
)  # fmt: skip
def test_a_plan_names_options_with_too_few_pairs_and_what_gives_enough(
    ultrabench, words, value, pairs_of, settings
):
    words = [*WORDS, *words]
    document = as_json(ultrabench, "sweep", "plan", *words)
    if value is None:
        assert (document["too_few_pairs"], [n for n in document["notes"] if "early" in n]) == ([], [])
        return
    (lack,) = document["too_few_pairs"]
    assert (lack["value"], (lack["pairs"], lack["possible_pairs"]), lack["settings"]) == (
        value,
        pairs_of,
        settings,
    )
    verb = "may" if pairs_of[0] >= 3 else "will"
    (note,) = (note for note in document["notes"] if f"early stopping {verb} leave too few" in note)
    assert note.endswith(
        f"{lack['axis']}={value} ({pairs_of[0]} of {pairs_of[1]}); to have enough, plan again with {' '.join(settings)}"
    )
    assert ("and an adaptive search 1 more" in note) == ("sweep.strategy=adaptive" in words)
    replaced = {setting.partition("=")[0] for setting in settings}
    again = [word for word in words if word.partition("=")[0] not in replaced]
    assert as_json(ultrabench, "sweep", "plan", *again, *settings)["too_few_pairs"] == []


@pytest.mark.usefixtures("alone")
def test_a_plan_counts_the_pairs_that_effects_compares():
    """Also where the schedule of a small batch is afab, and that of a large one 1f1b."""
    options = ["+sweep.env.NCCL_ALGO=[null,Ring,Tree]", "sweep.gbs=[16,32]", "kernel.precision=[bf16,fp8]"]
    config = load_config([*WORDS, "sweep.tp=[1,2]", "sweep.pp=[1,4]", "sweep.mbs=[1]", *options])
    runs = [
        run
        for run in make_plan(config).runs
        if run.prediction.p_oom <= 0.1 and run.prediction.memory_share <= 1
    ]
    metadata = {
        HARDWARE_KEY: "h100x8",
        FIRST_VALUES_KEY: str(first_values(config)).replace("'", '"').replace("None", "null"),
    }
    predicted = competing(predicted_results(plan_table(runs).replace_schema_metadata(metadata), "plan"))
    counts = num_option_pairs(runs, config.options)
    assert {axis for axis, _ in counts} == {"env.NCCL_ALGO", "gbs", "precision"}
    for axis, value in counts:
        rows = pairs(predicted, axis)
        assert counts[axis, value] == rows[rows["value"] == value]["block"].nunique() > 0, (axis, value)
