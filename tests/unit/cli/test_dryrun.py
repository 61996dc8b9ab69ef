import pytest

from tests.unit.cli.conftest import one_line
from ultrabench.cli.kernel.dryrun import dryrun_spec


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["tp"], "'tp' is no WORD=VALUE; write for example model=llama3-8b nodes=8 tp=8"),
        (["tpp=2"], "unknown word 'tpp'; did you mean tp?"),
        (["model=tny"], "unknown model 'tny'; did you mean tiny?"),
        (["hardware=h100"], "unknown hardware 'h100'; did you mean h100x8?"),
        (["nodes=0"], "nodes=0; must be >= 1"),
        (["nodes=two"], "nodes='two' is no whole number"),
        (["tp=0"], "tp=0; must be >= 1"),
        (["seq_len=0"], "seq_len=0, gbs=8; both must be >= 1"),
        (["nodes=2", "tp=3"], "tp*pp*cp=3 does not divide the 16 GPUs of 2 nodes of 8"),
        (["dp=3"], "dp3 tp1 pp1 z0 mbs1 gas1 has 3 ranks; 1 node of 8 have 8"),
        (["precision=int8"], "kernel.precision='int8'; must be fp32, bf16 or fp64"),
        (["recompute=some"], "kernel.recompute='some'; must be one of none, selective, full"),
        (["nodes=2", "tp=16"], "cannot run: tp=16 does not divide num_key_value_heads=8; choose another"),
        (["pp=4", "zero_stage=2"], "cannot run: zero_stage=2 with pp=4 would run as zero_stage=1"),
        (["cp=8", "seq_len=4100"], "cannot run: 2*cp=16 does not divide seq_len=4100"),
    ],
)
def test_words_that_cannot_be_used(ultrabench, words, line):
    assert line in one_line(ultrabench, "kernel", "dryrun", *words)


@pytest.mark.parametrize(
    ("words", "label", "precision"),
    [
        ([], "dp8 tp1 pp1 z0 mbs1 gas1", "bf16"),
        (["nodes=8", "tp=8", "zero_stage=3"], "dp8 tp8 pp1 z3 mbs1 gas1", "bf16"),
        (["pp=4", "mbs=2"], "dp2 tp1 pp4 z0 mbs2 gas4", "bf16"),
        (["pp=4", "pp_schedule=zbv"], "dp2 tp1 pp4 z0 mbs1 gas4 zbv x2", "bf16"),
        (
            ["pp=2", "pp_schedule=interleaved", "virtual_stages=4"],
            "dp4 tp1 pp2 z0 mbs1 gas2 interleaved x4",
            "bf16",
        ),
        (["hardware=cpu", "model=tiny", "nodes=2", "cp=2"], "dp2 tp1 pp1 cp2 z0 mbs1 gas1", "fp32"),
    ],
)
def test_what_is_not_said_follows(words, label, precision):
    spec, _ = dryrun_spec(words)
    assert spec.layout.label() == label
    assert spec.kernel.precision == precision
