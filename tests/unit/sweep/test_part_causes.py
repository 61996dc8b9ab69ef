"""Where whole steps contradict parts of steps: when that is sure, and which cause the records name."""

from dataclasses import replace

import pytest

from tests.sweep_folder import ended
from tests.unit.sweep.test_partial_steps import PARTS, RUNS, all_by_parts, confirmed, measured, planned
from ultrabench.result import doubt_text
from ultrabench.store.state import AllocationState
from ultrabench.sweep.running.outliers import contradicted_runs, suspect_attempts
from ultrabench.sweep.running.part_causes import Difference, Program, cause_text

OURS, OTHER = Program(trains_itself=True, num_ranks=8), Program(trains_itself=False, num_ranks=8)
ALONE = Program(trains_itself=True, num_ranks=1)
POSSIBLE = "nothing measured tells the cause; possible: "
LINE = "steps that are on no straight line"
LINKS = {"allreduce_busbw_bytes_per_s": 3e11, "allgather_busbw_bytes_per_s": 3e11}


def in_both(*ratios, repeat=1):
    """The state in which starts with whole steps and parts took these times by whole steps over those by parts."""
    state = all_by_parts()
    for number, ratio in enumerate(ratios):
        confirmed(state, RUNS[0], ratio, 1.0, repeat=repeat + number)
    return state


def sentence(state, device="cuda"):
    texts = {doubt_text(doubts) for doubts in suspect_attempts(state, device=device).values()}
    assert len(texts) <= 1
    return next(iter(texts), None)


@pytest.mark.parametrize(
    ("device", "ratio", "contradicts"),
    [("cuda", 1.03, True), ("cuda", 1.01, False), ("cuda", 0.96, True),
     ("cpu", 1.9, True), ("cpu", 1.2, True), ("cpu", 1.1, False), ("cpu", 0.85, True), ("cpu", 0.95, False)],
)  # fmt: skip
def test_whole_steps_and_parts_of_one_start_meet_the_same_other_programs(device, ratio, contradicts):
    """Other programs may make starts differ by 100 %, but not steps of one start that are seconds apart."""
    assert (sentence(in_both(ratio), device) is not None) == contradicts
    between_starts = measured(all_by_parts(), RUNS[0], ratio, parts=False, repeat=1)
    assert (sentence(between_starts, device) is not None) == (contradicts and device == "cuda")


@pytest.mark.parametrize(
    ("ratios", "is_sure", "ratios_text"),
    [
        ((1.3,), False, "1.30 x"),
        ((1.3, 1.2), True, "1.30 x"),
        ((0.7, 0.8), True, "0.70 x"),
        ((1.3, 0.7), False, "1.30 x and 0.70 x"),
        ((0.7, 1.3), False, "1.30 x and 0.70 x"),
        ((1.3, 1.2, 0.7), True, "1.30 x and 0.70 x"),
        ((0.7, 1.3, 1.2), True, "1.30 x and 0.70 x"),
    ],
)
def test_starts_that_contradict_in_opposite_directions_are_not_sure(ratios, is_sure, ratios_text):
    state = in_both(*ratios)
    assert contradicted_runs(state, "cuda") == {RUNS[0].run_id: is_sure}
    assert f"whole steps of {RUNS[0].run_id} took {ratios_text} the time" in sentence(state)
    assert ("differ in opposite directions, so no cause is named" in sentence(state)) == (
        "and" in ratios_text
    )


def test_starts_of_whole_steps_that_contradict_other_starts_are_sure_in_one_direction():
    """A single start decides nothing, and one that agrees with the parts withdraws the doubt."""
    for others, expected in (
        ((), False),
        ((1.3,), True),
        ((0.7,), False),
        ((1.0,), None),
        ((1.3, 1.0), None),
    ):
        state = measured(all_by_parts(), RUNS[0], 1.25, parts=False, repeat=1)
        for repeat, ratio in enumerate(others, 2):
            measured(state, RUNS[0], ratio, parts=False, repeat=repeat)
        assert contradicted_runs(state, "cuda").get(RUNS[0].run_id) is expected, others


def difference(ratio=1.3, whole=None, parts=({},), **words):
    """Whole steps and parts with these fields of their results."""
    return Difference(
        ratio, 0.02, whole=ended(**whole or {}), parts=[ended(**values) for values in parts], **words
    )


def clocks(whole_hz, part_hz):
    return {"whole": {"sm_clock_hz": whole_hz}, "parts": ({"sm_clock_hz": part_hz},)}


HEAT, NETWORK, LOAD, DATA = "heat or the power cap", "the network", "other programs", "the data loader"
PAUSED = {"step_times_s": (1.0, 1.01, 1.0, 0.99, 1.0, 4.0, 1.01, 4.0, 1.0, 1.0, 1.01, 0.99)}
RANKS_LATE = {"rank_step_times_s": {"0": 1.3, "3": 1.0}}
RANKS_ALIKE = {"rank_step_times_s": {"0": 1.01, "3": 1.0}}


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (clocks(1.41e9, 1.98e9), f"{HEAT} (one start): whole steps ran at a lower clock: 1.41 GHz of 1.98 GHz"),
        ({"ratio": 0.8, **clocks(1.98e9, 1.5e9)},
         f"{HEAT} (one start): parts ran at a lower clock: 1.5 GHz of 1.98 GHz"),
        ({"whole": {"throttled": "software thermal slowdown"}},
         f"{HEAT} (one start): GPUs were throttled in the start with whole steps: software thermal slowdown"),
        ({"whole": RANKS_LATE, "parts": (RANKS_ALIKE,)},
         f"{DATA} (one start): rank 3 was late between steps: its own took 0.77 x the time of those of rank 0, which"
         " waited"),
        ({"parts": (PAUSED,)}, "pauses of a rank (one start): 2 of 12 turns of its parts had a pause"),
        ({"whole_links": {**LINKS, "allgather_busbw_bytes_per_s": 1.5e11}, "part_links": LINKS},
         f"{NETWORK} (one start): allgather_busbw_bytes_per_s before whole steps was 0.50 x that before parts,"
         " in the preflights of their jobs"),
        ({"whole": {"foreign_load": 0.42}, "parts": ({"foreign_load": 0.03},)},
         f"{LOAD} (one start): they used 42.0 % of the cores of a node during whole steps, else 3.0 %"),
    ],
)  # fmt: skip
def test_the_cause_follows_from_what_was_measured_of_the_start(words, text):
    """The evidence of one start may be chance; of two it decides."""
    one_start = difference(**words)
    assert cause_text([one_start], OURS) == f"maybe {text}"
    assert cause_text([one_start, one_start], OURS) == f"maybe {text}", "it is the same start"
    assert cause_text([one_start, difference(**words)], OURS) == text.replace("(one start)", "(2 starts)")
    other_start = replace(one_start, whole=ended(), parts=(), whole_links={})
    assert cause_text([one_start, other_start], OURS) == f"maybe {text}"
    # On the faster side it explains nothing.
    in_reverse = replace(one_start, ratio=1 / one_start.ratio)
    assert cause_text([in_reverse], OURS).startswith(POSSIBLE)


@pytest.mark.parametrize(
    ("words", "program", "possible"),
    [
        ({"parts": ()}, OTHER, [HEAT, DATA, "the garbage collector or other pauses", NETWORK, LOAD]),
        ({}, OURS, [HEAT, DATA, NETWORK, LOAD]),  # its turns had no pause
        ({"parts": ()}, OURS, [HEAT, DATA, "pauses of a rank", NETWORK, LOAD]),
        ({}, ALONE, [HEAT, LOAD]),
        # A clock that is 2 % lower does not explain 30 %.
        (clocks(1.94e9, 1.98e9), OURS, [DATA, NETWORK, LOAD]),
        ({"whole": RANKS_ALIKE, "parts": (RANKS_ALIKE,)}, OURS, [HEAT, NETWORK, LOAD]),
        ({"whole": RANKS_ALIKE, "parts": (RANKS_ALIKE,)}, OTHER, [HEAT, DATA, NETWORK, LOAD]),
        ({"whole": {"foreign_load": 0.02}, "parts": ({"foreign_load": 0.03},)}, OURS, [HEAT, DATA, NETWORK]),
        ({"whole": {"foreign_load": 0.4}, "in_one_start": True}, OURS, [HEAT, DATA, NETWORK, LOAD]),
        ({"whole": {"foreign_load": 0.0}, "in_one_start": True}, OURS, [HEAT, DATA, NETWORK]),
        # One start has one preflight, so that its links explain nothing.
        ({"in_one_start": True, "whole_links": {"a": 1.0}, "part_links": {"a": 2.0}},
         OURS, [HEAT, DATA, NETWORK, LOAD]),
        ({"ratio": 1.03, "whole_links": {"a": 1.0}, "part_links": {"a": 1.1}}, OURS, [HEAT, DATA, NETWORK, LOAD]),
    ],
)  # fmt: skip
def test_causes_that_remain_possible_are_named_where_nothing_tells_them_apart(words, program, possible):
    assert cause_text([difference(**words)], program) == f"{POSSIBLE}{', '.join(possible)} or {LINE}"


def test_only_what_enough_starts_show_is_named():
    """Both starts had a lower clock; the links were slower before one of them."""
    hot, also_hot = (difference(**clocks(1.41e9, 1.98e9)) for _ in range(2))
    slow_links = replace(also_hot, whole_links={"a": 1.0}, part_links={"a": 2.0})
    assert cause_text([slow_links], OURS).count("maybe") == 2
    assert NETWORK not in cause_text([hot, slow_links], OURS)


@pytest.mark.parametrize(
    ("num_parts", "starts_text"), [(1, "maybe heat or the power cap (one start)"), (2, f"{HEAT} (2 starts)")]
)
def test_one_start_by_parts_beside_two_with_whole_steps_is_one_observation(num_parts, starts_text):
    parts = [ended(sm_clock_hz=1.5e9) for _ in range(num_parts)]
    starts = [
        replace(difference(0.8, {"sm_clock_hz": 1.98e9}), parts=parts, in_one_start=True) for _ in range(2)
    ]
    assert cause_text(starts, OURS).startswith(f"{starts_text}: parts ran at a lower clock")


def test_a_doubt_about_parts_names_the_clock_of_whole_steps():
    state = all_by_parts()
    for attempt in state.attempts.values():
        attempt.result = replace(attempt.result, sm_clock_hz=1.98e9)
    for repeat, starts_text in ((1, "maybe heat or the power cap (one start)"), (2, f"{HEAT} (2 starts)")):
        confirmed(state, RUNS[0], 1.31, 1.0, repeat)
        attempt = next(a for key, a in state.attempts.items() if key.repeat == repeat)
        attempt.result = replace(attempt.result, sm_clock_hz=1.41e9)
        fact = f"whole steps of {RUNS[0].run_id} took 1.31 x the time by its parts, interval 2.0%"
        cause = "whole steps ran at a lower clock: 1.41 GHz of 1.98 GHz"
        assert sentence(state) == f"{fact}: {starts_text}: {cause}"


def test_a_doubt_about_parts_names_links_that_were_slower_before_whole_steps():
    state = measured(all_by_parts(), RUNS[0], 1.25, parts=False, repeat=1)
    for name, busbw in (("parts", 3e11), ("whole", 1.5e11)):
        links = {"allreduce": {"all": [{"bytes": 8, "busbw_bytes_per_s": busbw}]}}
        state.allocations[name] = AllocationState(
            name=name, nodes=1, preflight={"probe": {"collectives": links}}
        )
    for key, attempt in state.attempts.items():
        attempt.allocation = "whole" if key.repeat else "parts"
    fact = "allreduce_busbw_bytes_per_s before whole steps was 0.50 x that before parts"
    assert f"maybe the network (one start): {fact}" in sentence(state)


def test_a_third_start_decides_where_two_contradict_in_opposite_directions():
    assert planned(in_both(1.3), PARTS) == [(0, 2, True)]
    assert planned(in_both(1.3, 0.7), PARTS) == [(0, 3, True)]
    others = {number for number, _, _ in planned(in_both(1.3, 0.7, 1.2), PARTS)}
    assert others == {*range(1, len(RUNS))}, "all others are measured whole"
    withdrawn = in_both(1.3, 0.7, 1.01)
    assert (sentence(withdrawn), planned(withdrawn, PARTS)) == (None, [(1, 1, True)])
