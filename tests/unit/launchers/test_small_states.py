"""Every order of what two launchers and their jobs can do, each killed at every step: never lost, never twice.

What is left out, and why nothing is lost by it: several steps of a process are taken at once where nobody else
can tell the difference (an agent's lines about its run and its next claim: launchers read the lines, but claims
only of jobs that are over; a launcher's lines about what it is going to submit), each of them is still where
it may die. Worlds that differ only in how they came about and in what a launcher knew before it read again have the
same future and are visited once. Slurm takes two jobs from these launchers; one more launcher then finishes what
is left, where nobody dies. Journals and claims are values here; tests/unit/store has their files.

The runs of every day bound the deaths and, for two launchers at once, let one that has looked before see jobs and
journals at one moment; `--hypothesis-profile=hunt` lets one more die, and takes every look apart (minutes).
"""

from dataclasses import replace
from types import SimpleNamespace

import pytest
from hypothesis import settings

from tests.unit.allocations import CONFIG, open_sweep
from tests.unit.launchers import small_world
from tests.unit.launchers.small_tape import Process
from tests.unit.launchers.small_world import Stage, World
from ultrabench.kernel_config import KernelConfig
from ultrabench.launchers.allocation_ends import AgentWatchdog
from ultrabench.result import Status
from ultrabench.store.allocation import Allocation
from ultrabench.store.jobs_seen import JobsSeen
from ultrabench.store.state import fold
from ultrabench.sweep.plan import make_plan
from ultrabench.sweep.running.blame import blame_of
from ultrabench.sweep.running.decide import decide

HUNT = int(settings.get_current_profile_name() == "hunt")


@pytest.fixture
def stage(monkeypatch, request, tmp_path):
    """A stage of two runs that share an allocation, or of one, without clocks and chance."""
    config = replace(CONFIG, measure=replace(CONFIG.measure, confirm=1))
    sweep = open_sweep(tmp_path, make_plan(config), control=False, preflight=False)
    sweep.folder.create()
    runs = [run for run in sweep.plan.runs if run.nodes == 1]
    sweep.plan = replace(sweep.plan, candidates=tuple(runs[: request.param]))
    for room in ("store.claim", "agent.lead"):
        monkeypatch.setattr(f"ultrabench.{room}.claim", small_world.claim)
        monkeypatch.setattr(f"ultrabench.{room}.claim_content", small_world.claim_content)
    monkeypatch.setattr(AgentWatchdog, "observe", lambda *_: None)
    monkeypatch.setattr(Allocation, "write", lambda self: None)
    monkeypatch.setattr(KernelConfig, "digest", lambda self: "digest")
    small_stage = Stage(sweep)
    clock = SimpleNamespace(time=lambda: 2e9, monotonic=lambda: 0.0)
    names = SimpleNamespace(uuid4=lambda: SimpleNamespace(hex=small_stage.current))
    for module in ("launchers.reconcile", "agent.lead", "agent.ranks.rank_progress"):
        monkeypatch.setattr(f"ultrabench.{module}.time", clock)
    monkeypatch.setattr("ultrabench.launchers.reconcile.uuid", names)
    return small_stage


def explore(stage: Stage) -> int:
    """Visits all worlds, and takes those where nothing moves any more to their end; how many there are."""
    digests, worlds = set[int](), [stage.first()]
    while worlds:
        world = worlds.pop()
        digest = world.digest()
        if digest in digests:
            continue
        digests.add(digest)
        require_once(world, stage.in_turn)
        following = list(stage.after(world))
        if not following or comes_to_nothing(stage, world):
            require_end(stage, world)
        worlds += following
    return len(digests)


def comes_to_nothing(stage: Stage, world: World) -> bool:
    """Whether all jobs are over and launchers, if any, look at them again and again, and nothing changes."""
    busy = any(not launcher.over and launcher.answers for launcher in world.launchers.values())
    if busy or world.agents or any(job.phase != "over" for job in world.jobs.values()):
        return False
    after = world
    for name, process in world.launchers.items():
        for _ in range(0 if process.over or stage.waits(world, name) else 5):
            after, _ = stage.launcher(after, name)
            if not after.launchers[name].answers:
                break
    return after.digest() == world.digest()


def require_once(world: World, in_turn: bool) -> None:
    """Nothing ran twice; with one launcher after another nothing even waits twice."""
    story = "\n".join(world.story)
    assert len(set(world.witness)) == len(world.witness), f"ran twice: {world.witness}\n{story}"
    waiting = {job.allocation.name: job for job in world.jobs.values() if job.phase != "over"}
    # The second job of an allocation, and one that was given up, will run nothing.
    owners = {name: world.claims.get(name, {"job": {"job_id": job.job_id}}) for name, job in waiting.items()}
    tasks = [
        str(task.key) for name, job in waiting.items() for task in job.allocation.tasks
        if owners[name].get("job", {}).get("job_id") == job.job_id
    ]  # fmt: skip
    assert not in_turn or len(set(tasks)) == len(tasks), f"is in two jobs at once: {tasks}\n{story}"


def require_end(stage: Stage, world: World) -> None:
    """Another launch brings each run to one ok, after which it was not tried again."""
    names = ("launcher-c", *(("launcher-d",) if stage.stranger else ()))
    world = replace(world, launchers={name: Process(name) for name in names})
    most_jobs, stage.most_jobs = stage.most_jobs, 99
    for _ in range(60):
        jobs_are_over = all(job.phase == "over" for job in world.jobs.values())
        if jobs_are_over and all(launcher.over for launcher in world.launchers.values()):
            break
        for name in names:
            if not world.launchers[name].over:
                world, _ = stage.launcher(world, name)
        for name, job in world.jobs.items():
            if job.phase == "pending":
                world = stage.start(world, name)
            elif name in world.agents:
                world, _ = stage.agent(world, name)
        require_once(world, in_turn=False)
    stage.most_jobs = most_jobs
    lines = world.journal.values()
    state = fold(lines)
    assert state == fold(reversed(lines)), "the order of events matters"
    for run in stage.sweep.plan.runs:
        attempts = [a for k, a in sorted(state.attempts.items()) if k.run_id == run.run_id]
        statuses = [a.result and a.result.status for a in attempts]
        story = "\n".join([f"{run.run_id} has ended {statuses}", *world.story])
        assert (statuses.count(Status.OK), statuses[-1:]) == (1, [Status.OK]), story
    assert set(world.witness) <= {str(key) for key in state.attempts}, "ran and is not recorded"
    # Agents died here, and no node and no Slurm says that a node is broken.
    assert blame_of(replace(state, launched=None), stage.sweep.config.retry).excluded == {}


AT_ONCE = {"coarse": True, "most_kills": 0}
IN_TURN = {"in_turn": True, "most_kills": 1}
DOUBLE = {"double": True, "most_jobs": 3}
STRANGER = {"stranger": True}
HUNTED = {
    "two launchers at once, of which one dies": (2, {"coarse": True, "most_kills": 1}, 1000),
    "two launchers at once, look by look": (2, {"coarse": False, "most_kills": 0}, 1000),
}
WORLDS = {
    "two launchers run at once": (2, AT_ONCE, 1000),
    "launchers and jobs may die at every step": (2, IN_TURN | {"most_kills": 1 + HUNT}, 1000),
    "of two jobs of one allocation one runs": (1, IN_TURN | DOUBLE, 500),
    "who sees no jobs of others does not take them for dead": (2, AT_ONCE | STRANGER | {"most_kills": HUNT}, 50),
    "the last line of an agent may come late": (1, IN_TURN | {"late": True}, 1000),
    **(HUNTED if HUNT else {}),
}  # fmt: skip


@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("stage", "words", "least"), WORLDS.values(), ids=WORLDS, indirect=["stage"])
def test_nothing_is_lost_and_nothing_runs_twice_where(stage, words, least):
    vars(stage).update(words)
    assert explore(stage) > least


def always(*_):
    return True


def without_jobs(plan, state, jobs_seen, *rest):
    """A decision that is told nothing of what is under way."""
    return decide(plan, state, JobsSeen(), *rest)


def submitted_only(state):
    return {n: a for n, a in state.allocations.items() if not a.ended and a.job}


FAULTS = {
    "a claim that everybody wins": (
        2, AT_ONCE, {"agent.lead.claim": always, "agent.lead.owns": always}, r"ran twice|has ended"),
    "lost answers are not looked for": (
        2, IN_TURN, {"launchers.allocation_ends.open_allocations": submitted_only}, r"in two jobs at once|has ended"),
    "a second job that does not leave": (1, IN_TURN | DOUBLE, {"agent.lead.owns": always}, "has ended"),
    "what is not seen is taken for dead": (2, AT_ONCE | STRANGER, {"launchers.allocation_ends.sees": always},
        "has ended"),
    "the dead are not buried": (2, IN_TURN, {"launchers.allocation_ends.EndRecorder.record_end": lambda *_: None},
        "has ended"),
    "jobs are given up without being told": (2, {"most_kills": 0},
        {"launchers.allocation_ends.EndRecorder.give_up": always}, "has ended"),
    "what is under way is forgotten": (
        1, IN_TURN | {"most_kills": 0}, {"launchers.reconcile.decide": without_jobs}, "in two jobs at once"),
}  # fmt: skip


@pytest.mark.parametrize(
    ("stage", "words", "planted", "message"), FAULTS.values(), ids=FAULTS, indirect=["stage"]
)
def test_a_planted_fault_is_found_out(stage, words, planted, message, monkeypatch):
    vars(stage).update(words)
    for name, value in planted.items():
        monkeypatch.setattr(f"ultrabench.{name}", value)
    with pytest.raises(AssertionError, match=message):
        explore(stage)
