"""What is known of a program's model that is not the model of its sweep."""

import re

import pytest

from tests.configs import refused
from tests.sweep_folder import ended
from ultrabench.kernel.requests import TINY
from ultrabench.kernel_config import KernelConfig
from ultrabench.log_patterns import PRINTED_PARAMS, parse_log_line
from ultrabench.model_flops import is_same_number, model_flops, nearest_number
from ultrabench.sweep.config.load import load_config
from ultrabench.sweep.plan import make_plan

OWN = TINY.flops_per_token(64, "palm")


def kernel(**settings):
    return KernelConfig(name="mine", kind="command", command=("train",), **settings)


def flops(result=None, num_ranks=1, **settings):
    return model_flops(kernel(**settings), TINY, 64, "palm", result, num_ranks)


@pytest.mark.parametrize(
    ("line", "num_params"),
    [
        ("number of parameters: 3.67M", 3_670_000),
        ("num decayed parameter tensors: 50, with 10,740,096 parameters", None),
        (" > number of parameters on (tensor, pipeline) model parallel rank (0, 0): 1234567", None),
        ("  Number of trainable parameters = 124,439,808", 124_439_808),
        ("trainable params: 4,194,304 || all params: 6,742,609,920 || trainable%: 0.0622", 6_742_609_920),
        ("Total number of parameters: 1.04G (1984.00MiB)", 1_040_000_000),
        ("Model llama3 8B size: 8,030,261,248 total parameters", 8_030_261_248),
        ("step=3 loss=1.2 iter_time_s=0.3 params=2400000", 2_400_000),
        ("124 M     Total params", 124_000_000), ("Total params: 1.2e9", 1_200_000_000),
        ("Non-embedding parameters: 85M", None), ("params: None", None), ("iter 4: loss 3.2, time 12.5ms", None),
    ],
)  # fmt: skip
def test_the_lines_by_which_programs_print_their_parameters(line, num_params):
    values = parse_log_line(line, re.compile(PRINTED_PARAMS), "params")
    assert values == (None if num_params is None else {"event": "observed", "params": num_params})


def test_the_model_of_the_sweep_counts_unless_the_program_prints_another_number():
    own = ended(source_num_params=round(0.985 * TINY.num_params))
    assert flops() == flops(ended()) == flops(own) == (OWN, "palm", None)
    other = ended(source_num_params=round(0.97 * TINY.num_params))
    assert flops(other).per_token is None
    assert "set kernel.params" in flops(other).problem
    shard = ended(source_num_params=TINY.num_params // 4)
    assert flops(shard).per_token is None
    assert flops(shard, num_ranks=8) == (OWN, "palm", None)


def test_numbers_and_patterns_of_the_user_give_the_flops():
    pattern = "size (?P<params>.+)"
    assert flops(params="unknown") == (None, None, "kernel.params=unknown")
    assert flops(params=TINY.num_params) == (OWN, "palm", None)
    assert (
        flops(params=124e6)
        == flops(params="124M")
        == flops(params="0.124 b")
        == flops(params="124000000")
        == (6 * 124e6, None, None)
    )
    assert flops(ended(source_num_params=10**6), params=124e6).per_token is None
    assert flops(ended(source_num_params=10**6), params=pattern) == (6e6, None, None)
    assert flops(ended(), params=pattern).problem == "kernel.params matches no line of the log"
    assert flops(params="unknown", flops_per_token=7e9) == (7e9, None, None)
    read = ended(source_flops_per_token=3e9)
    assert flops(read, flops_per_token="(?P<flops_per_token>.+) per token") == (3e9, None, None)
    assert nearest_number([2_000, 5_000_000, 90], 4e6) == 5_000_000
    assert not is_same_number(50, 100)


def test_values_that_say_nothing_are_refused():
    texts = ("12X", "12Q", "3.67 potatoes", "inf", "nan", "12MB", "12 MM")
    for value in ("few", "size (?P<count>.+)", "-3", "0.5", float("inf"), float("nan"), *texts):
        with refused("kernel.params="):
            kernel(params=value)
    for settings in (
        {"flops_per_token": "unknown"},
        {"flops_per_token": "7 GFLOP"},
        {"params": "(?P<params>["},
    ):
        with refused("kernel."):
            kernel(**settings)
    with refused("trains the model of the sweep"):
        KernelConfig(name="embedded", params="unknown")


def test_predictions_follow_the_size_and_an_unknown_one_leaves_nothing_out():
    words = ["kernel=command", "kernel.command=[train]", "hardware=h100x8", "launcher=slurm"]

    def first(*settings):
        return make_plan(load_config([*words, "model=tiny", *settings])).runs[0]

    usual, tenfold = first(), first(f"kernel.params={10 * first().shape.num_params}")
    assert tenfold.run_id == usual.run_id
    ratios = [
        getattr(tenfold.prediction, name) / getattr(usual.prediction, name)
        for name in ("step_time_s", "peak_mem_bytes")
    ]
    assert ratios == [pytest.approx(10), pytest.approx(10)]
    large = "model=llama3-70b", "sweep.nodes=[1]", "max_p_oom=0.9"
    plan, unknown = (make_plan(load_config([*words, *large, *s])) for s in ([], ["kernel.params=unknown"]))
    assert len(unknown.runs) > len(plan.runs)
    assert {run.prediction.p_oom for run in unknown.runs} == {0.0}
