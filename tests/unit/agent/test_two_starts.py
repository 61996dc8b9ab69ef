"""A program that starts twice: what its ranks get in each start, and the result that both have."""

import json
from dataclasses import replace

import pytest

from tests.configs import measure
from tests.unit.agent.one_node import allocation, task
from ultrabench.agent import lead
from ultrabench.agent.diagnose.outcome import step_times_of
from ultrabench.agent.lead import Leader
from ultrabench.agent.node_identity import NodeIdentity
from ultrabench.agent.ranks.node import Node
from ultrabench.agent.ranks.rank_progress import AttemptProgress, RankProgress
from ultrabench.agent.ranks.sources import report_sources
from ultrabench.partial_step import DEPARTURE_SD, PartStart, Slice
from ultrabench.result import SLOWER, RunResult, Status

GAS, EACH_S, CONSTANT_S = 64, 0.5, 3.0
WHOLE_S = CONSTANT_S + EACH_S * GAS
MEASURE = measure(warmup_steps=1, min_steps=6, max_steps=8, loss_step=1, race=1.3)


def task_of_two_starts():
    """A task of 64 micro-batches that two starts with 4 and 8 measure."""
    plain = task("x.py", "cpu")
    spec = plain.spec.with_gas(GAS)
    kernel = replace(
        spec.kernel, command=("python", "x.py", "{gas}", "{gbs}", "{step_tokens}"), files={"a.json": '{"gas": {gas}}'}
    )  # fmt: skip
    spec = replace(spec, kernel=kernel)
    slice_ = Slice(g1=4, g2=8, two_starts=True)
    return replace(plain, spec=spec, run_id=spec.run_id, measure=MEASURE, slice=slice_)


TWO = task_of_two_starts()


def steps(gas, num=9, factor=1.0):
    return [{"seconds": factor * (CONSTANT_S + EACH_S * gas), "loss": 1.0} for _ in range(num)]


def test_each_start_gets_the_values_of_its_part(tmp_path, monkeypatch):
    node = Node(allocation(tmp_path, TWO), NodeIdentity(node_index=0, host="local-0"))
    commands = []
    monkeypatch.setattr(
        node._fork_server, "fork", lambda *args, **program: commands.append(program["command"])
    )
    try:
        for gas in (4, 8, None):
            node.start(0, "127.0.0.1", 29500, gas=gas)
            size = gas or GAS
            assert commands[-1][2:] == [str(size), str(size), str(64 * size)]
            document = json.loads((node._run_folder / "spec.json").read_text())
            assert (document["spec"]["layout"]["gas"], document["spec"]["workload"]["gbs"]) == (size, size)
            assert document["run_id"] == TWO.run_id, "the run stays the same"
            assert (node._files_folder / "a.json").read_text() == f'{{"gas": {size}}}'
            (node._run_folder / "rank0.log").write_text("x")
            node.finish(keep_all=True)
            folder = node.folder.log_folder(TWO.key)
            assert (folder / (f"gas{gas}/rank0.log" if gas else "rank0.log")).is_file()
    finally:
        node.close()


def test_a_rate_in_a_log_counts_for_the_tokens_of_the_part(tmp_path):
    kernel = replace(TWO.spec.kernel, step_line=r"tokens/s (?P<tokens_per_s>\S+)")
    of_log = replace(TWO, spec=replace(TWO.spec, kernel=kernel)).in_start(PartStart(gas=4))
    (tmp_path / "rank0.log").write_text("tokens/s 128\ntokens/s 128\n")
    lines = [
        line for source in report_sources(of_log, range(1), tmp_path) for line in source.read(is_last=True)
    ]
    assert [line["seconds"] for line in lines if line["event"] == "step"] == [64 * 4 / 128] * 2


class FakeGroup:
    """What the leader needs of its agents: each start has the ranks of its number of micro-batches."""

    outage = end_reason = None
    hosts = ("local-0",)
    compiler_locks = ()

    def __init__(self, rank_by_gas):
        self.rank_by_gas, self.started, self.num_finished = rank_by_gas, [], 0

    def start(self, started, index):
        self.started.append(started)
        self.progress = AttemptProgress(1, self.hosts)
        gas = started.started_spec.layout.gas
        self.progress.ranks = [self.rank_by_gas.get(gas) or rank(gas)]
        self.progress.first_step_s = 2.0

    def end_ranks(self):
        pass

    def finish(self, keep_all):
        self.num_finished += 1

    def measured_fields(self):
        return {
            "throttled": "heat" if len(self.started) == 1 else None,
            "foreign_load": 0.1 * len(self.started),
        }


def measured(rank_by_gas, end=None):
    """The result of the leader of these ranks, and the group of its agents."""
    leader = Leader.__new__(Leader)
    leader._group, leader._task_results = FakeGroup(rank_by_gas), []
    leader._allocation = allocation("/tmp", TWO)
    leader.watch = lambda started: end if len(leader._group.started) == 2 else None
    return leader._measure(TWO, 0), leader._group


def rank(gas, **change):
    return RankProgress(
        **{"steps": steps(gas), "code": 0, "memory_report": {"reserved_bytes": gas}, **change}
    )


def test_both_starts_make_one_result():
    result, group = measured({4: rank(4), 8: rank(8)})
    assert [t.started_spec.layout.gas for t in group.started] == [4, 8]
    assert all(t.spec == TWO.spec for t in group.started), "the run stays the same"
    assert (result.status, result.measured_gas, result.screened, result.stopped) == (
        Status.OK, "4,8", True, "program",
    )  # fmt: skip
    assert result.step_times_s == pytest.approx([WHOLE_S] * 8)
    assert result.peak_mem_reserved_bytes == 8, "memory is that of the larger start"
    assert (result.loss_final, result.source_mfu, result.departure) == (None, None, None)
    assert (result.throttled, result.foreign_load) == ("heat", 0.2)
    assert (result.part_times_s, group.num_finished) == ({"4": 5.0, "8": 7.0}, 1)
    # Starts differ by 1 % (2 % at 95 %): 15 T(8) - 14 T(4). The departure from the line is unknown.
    starts, line = 0.02 * (15 * 7) / WHOLE_S, 1.96 * DEPARTURE_SD * 28 / WHOLE_S
    starts = (starts**2 + (0.02 * 14 * 5 / WHOLE_S) ** 2) ** 0.5
    assert result.step_time_ci95_rel == pytest.approx((starts**2 + line**2) ** 0.5, rel=1e-3)
    assert result.ci_reached is False


@pytest.mark.parametrize("gas", [4, 8])
def test_a_start_that_fails_is_the_end_of_the_attempt(gas):
    ranks = {4: rank(4), 8: rank(8)} | {gas: rank(gas, code=1, tail="boom\n", steps=steps(gas, 3))}
    result, group = measured(ranks)
    assert (result.status, result.screened, len(group.started)) == (Status.CRASH, True, gas // 4)
    assert result.reason.endswith(f"boom; in the start with {gas} micro-batches a step")
    assert result.step_times_s == () or gas == 8
    assert result.measured_gas is None or gas == 8


def test_the_race_begins_with_the_first_turn():
    """Step times of the first start say nothing about the whole step; those of the second do with them."""
    first, second = PartStart(gas=4), PartStart(gas=8, first_times_s=(5.0,) * 8)
    assert step_times_of(rank(4), TWO.in_start(first)) == []
    assert step_times_of(rank(8, steps=steps(8, 2)), TWO.in_start(second)) == pytest.approx([WHOLE_S])
    leader = Leader.__new__(Leader)
    leader._task_results, leader._allocation = [], allocation("/tmp", TWO)
    for best_s, is_slow in ((WHOLE_S / 1.4, True), (WHOLE_S / 1.2, False)):
        timed = replace(TWO, best_step_time_s=best_s)
        assert leader._result_if_too_slow(timed.in_start(first), rank(4)) is None
        end = leader._result_if_too_slow(timed.in_start(second), rank(8, steps=steps(8, 2)))
        assert (end is not None and end.stopped == SLOWER) == is_slow
    slow, _ = measured({4: rank(4), 8: rank(8, steps=steps(8, 2), code=None, killed_by_us=True)},
                       RunResult(status=Status.OK, reason="slow", stopped=SLOWER))  # fmt: skip
    assert (slow.status, slow.stopped, slow.step_times_s) == (Status.OK, SLOWER, pytest.approx((WHOLE_S,)))


def test_the_first_start_may_take_half_of_the_time_limit(monkeypatch):
    clock = iter((0.0, *(20.0,) * 9))
    monkeypatch.setattr(lead.time, "monotonic", lambda: next(clock))
    _, group = measured({4: rank(4), 8: rank(8)})
    assert [t.limit_s for t in group.started] == [30.0, 40.0]


def test_the_interval_holds_the_errors_of_lines_that_are_timed_by_arrival():
    """An error of each time counts as often as the time does: 15 T(8) - 14 T(4)."""
    exact, late = ({4: rank(4, steps=of_4), 8: rank(8, steps=of_8)} for of_4, of_8 in (
        (steps(4), steps(8)),
        ([{**step, "arrival_error_s": 0.02} for step in steps(4)],
         [{**step, "arrival_error_s": 0.01} for step in steps(8)]),
    ))  # fmt: skip
    (first, _), (second, _) = measured(exact), measured(late)
    error_s = 15 * 0.01 + 14 * 0.02
    assert second.arrival_error_s == pytest.approx(error_s)
    wider = (
        (error_s / WHOLE_S + (first.parts_ci95_rel or 0.0)) ** 2 + first.extrapolation_error_rel**2
    ) ** 0.5
    assert second.step_time_ci95_rel == pytest.approx(wider)
