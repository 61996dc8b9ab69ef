import pytest

from ultrabench.cli.kernel.dryrun import dryrun_spec


@pytest.mark.parametrize(
    ("words", "label", "precision"),
    [("", "dp8 tp1 pp1 z0 mbs1 gas1", "bf16"),
     ("nodes=8 tp=8 zero_stage=3", "dp8 tp8 pp1 z3 mbs1 gas1", "bf16"),
     ("pp=4 mbs=2", "dp2 tp1 pp4 z0 mbs2 gas4", "bf16"),
     ("pp=4 pp_schedule=zbv", "dp2 tp1 pp4 z0 mbs1 gas4 zbv x2", "bf16"),
     ("pp=2 pp_schedule=interleaved virtual_stages=4", "dp4 tp1 pp2 z0 mbs1 gas2 interleaved x4", "bf16"),
     ("hardware=cpu model=tiny nodes=2 cp=2", "dp2 tp1 pp1 cp2 z0 mbs1 gas1", "fp32")],
)  # fmt: skip
def test_what_is_not_said_follows(words, label, precision):
    spec, _ = dryrun_spec(words.split())
    assert (spec.layout.label(), spec.kernel.precision) == (label, precision)
