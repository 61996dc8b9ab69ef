"""Whether a variant or a node is at fault when jobs start nothing, from what allocations of a launch did."""

import pytest

from tests.sweep_folder import ended
from ultrabench.launchers.launcher import own_origin
from ultrabench.result import NOT_STARTED, Status
from ultrabench.run import AttemptKey
from ultrabench.store.events import AllocationEnded, Start
from ultrabench.store.jobs_seen import JobLimits
from ultrabench.store.state import AllocationState, AttemptState, SweepState
from ultrabench.sweep.running.attempts import Launch
from ultrabench.sweep.running.starts import starts_of

PLACES = {"a": ("a.sif", None), "b": ("b.sif", None), "c": ("c.sif", None)}
LAUNCH = Launch(name="launch", by=own_origin("big"))


def starts_after(jobs, max_jobs=1, earlier=""):
    """The places at fault, and whether the launch is a dead end while a and b are open.

    Jobs are words such as `a1`, a job of a.sif that started nothing on gpu01, and `A1`, one that ran something there.
    `earlier` are those of an earlier launch.
    """
    state = SweepState()
    all_jobs = [("earlier", word) for word in earlier.split()] + [("launch", word) for word in jobs.split()]
    for number, (launch, (place, node)) in enumerate(all_jobs):
        name, host = f"n1-{number}", f"gpu0{node}"
        key = AttemptKey(f"{number:016x}", 0, 0)
        allocation = AllocationState(
            name=name,
            tasks=(key,),
            submission=(launch, number),
            variant={"container": f"{place.lower()}.sif"},
        )
        result = ended(Status.OK, hostnames=(host,))
        if place.islower():
            result = ended(Status.LOST, cause=NOT_STARTED)
        failed_on = (host,) if place.islower() else ()
        end = AllocationEnded(
            allocation=name, reason="FATAL: no image", source="launcher", failed_on=failed_on
        )
        allocation.ends[Start()] = end
        state.allocations[name] = allocation
        state.attempts[key] = AttemptState(key=key, allocation=name, result=result)
    starts, limits = starts_of(state, LAUNCH), JobLimits(max_jobs=max_jobs)
    names = {place: name for name, place in PLACES.items()}
    at_fault = "".join(sorted(names[place] for place in starts.unstartable(limits)))
    return at_fault, bool(starts.dead_end(limits, [PLACES["a"], PLACES["b"]]))


@pytest.mark.parametrize(
    ("jobs", "at_fault"),
    [
        # On disjoint nodes it is the variant's, once others have run something.
        ("a1 B1 a2 a3", "a"), ("a1 B1 a2", ""), ("B1 a1 a2 a3", "a"), ("B1 B2 a1 a2 a3", "a"),
        ("a1 a2 a3 B4", "a"), ("a1 c2 B1 a2 c3 a4 c5", "ac"),
        # One node is bad, until others run something there.
        ("a1 B2 a1 a1", ""), ("a1 B1 a1 B1 a1", "a"), ("B1 a1 a1 a1", "a"),
        ("A1 B1 a2 a2 a2", ""), ("A1 B1 a2 a2 B2 a2 B2 a2", "a"), ("A3 a2 a2 a2 a2 B1", "a"),
        # A start that works ends the row.
        ("a1 a2 B1 A3 a4 a5", ""), ("a1 a2 B1 A3 a4 a5 B1 a6", "a"),
        # Nothing starts any more, whatever its variant.
        ("A1 B2 a3 b4 a5 b6 a7", ""), ("A1 B1 a2 a3 a4 a5", ""),
    ],
)  # fmt: skip
def test_a_variant_is_at_fault_if_it_starts_nowhere_while_others_do(jobs, at_fault):
    assert starts_after(jobs)[0] == at_fault


def test_a_variant_that_never_started_is_judged_by_the_jobs_of_earlier_launches():
    assert starts_after("a1 a2 a3", earlier="B1 B2") == ("a", False)
    assert starts_after("a1 a2 a3", earlier="A1 B2")[0] == ""
    assert starts_after("a1 b2 a3 a4", earlier="B1")[0] == ""


@pytest.mark.parametrize(
    ("jobs", "is_dead_end"),
    [
        ("a1 a2 a3", False), ("a1 a2 a3 b4", True), ("a1 b2 a3", True), ("a1 b1 a1", False), ("a1 b1 a1 b1", True),
        ("a1 b2 B3 a4 b5", False), ("A1 B2 a3 b4 a5", True),
    ],
)  # fmt: skip
def test_nothing_starts_only_if_each_open_variant_was_tried(jobs, is_dead_end):
    assert starts_after(jobs)[1] == is_dead_end


def test_the_reason_names_the_variant_its_nodes_and_what_its_latest_job_said():
    state_words = "b1 A1 b2 b3"
    state = SweepState()
    for number, (place, node) in enumerate(state_words.split()):
        name, key = f"n1-{number}", AttemptKey(f"{number:016x}", 0, 0)
        allocation = AllocationState(
            name=name, tasks=(key,), submission=("launch", number), variant={"container": place.lower()}
        )
        failed_on = (f"gpu0{node}",) if place.islower() else ()
        allocation.ends[Start()] = AllocationEnded(
            allocation=name, reason="FATAL: no image", failed_on=failed_on
        )
        state.allocations[name] = allocation
        result = ended(Status.OK) if place.isupper() else ended(Status.LOST, cause=NOT_STARTED)
        state.attempts[key] = AttemptState(key=key, allocation=name, result=result)
    [reason] = starts_of(state, LAUNCH).unstartable(JobLimits(max_jobs=1)).values()
    assert reason == (
        "container=b: 3 jobs in a row ran nothing on gpu01,gpu02,gpu03, while those of other variants "
        "did (FATAL: no image)"
    )
