"""Two launchers, their jobs and the agents in them as values: every step of each can be taken, or cut short."""

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

from tests.unit.launchers.small_slurm import OTHERS, OURS, SmallJob, SmallSlurm
from tests.unit.launchers.small_tape import WHOLE, Halt, Journal, Process, Tape, TapedJournal, TapedSweep
from ultrabench.agent import lead
from ultrabench.agent.node_identity import NodeIdentity
from ultrabench.agent.ranks.rank_progress import AttemptProgress, RankProgress
from ultrabench.errors import ClusterError
from ultrabench.launchers.open_sweep import OpenSweep
from ultrabench.launchers.reconcile import Reconciler
from ultrabench.run import Task
from ultrabench.store.events import AllocationEnded, AllocationStarted, LeadingAgent, Result, Start
from ultrabench.store.state import SweepState

UNSEEN = (lambda state, alive: None), (lambda note: None)
"""Arguments of a reconciler that shows and says nothing."""
MAX_BLOCKS = 200_000
"""Largest number of blocks of steps that are remembered."""


Claims = dict[str, dict[str, Any]]
"""Attempt or allocation -> its owner."""


@dataclass(frozen=True, slots=True)
class World:
    """Everything there is at one moment."""

    journal: Journal
    claims: Claims
    jobs: dict[str, SmallJob]
    launchers: dict[str, Process]
    agents: dict[str, Process]
    witness: tuple[str, ...] = ()
    """Attempts in the order they ran."""
    kills: int = 0
    """How often somebody has died so far."""
    story: tuple[str, ...] = ()
    """How it came to this; worlds with different stories can be the same."""

    def digest(self) -> int:
        """Equal for worlds with the same future."""
        processes = tuple(p.key for group in (self.launchers, self.agents) for _, p in sorted(group.items()))
        return hash((self.visible, processes, tuple(sorted(self.witness)), self.kills))

    @property
    def visible(self) -> tuple[Any, ...]:
        """What a launcher can see: the journal, the claims, and what Slurm knows of its jobs."""
        queue = frozenset((name, job.phase, job.restart) for name, job in self.jobs.items())
        return frozenset(self.journal), self.owners, queue

    @property
    def owners(self) -> frozenset[tuple[str, str]]:
        """Who has claimed what."""
        return frozenset((name, repr(owner)) for name, owner in self.claims.items())


def claim(claims: Claims, key: str, owner: dict[str, Any]) -> bool:
    """What ultrabench.store.claim.claim does."""
    free = key not in claims
    claims.setdefault(key, owner)
    return free


def claim_content(claims: Claims, key: str) -> dict[str, Any] | None:
    """What ultrabench.store.claim.claim_content does."""
    return claims.get(key)


class TapedDisk:
    """The results folder as the agents of an allocation access it: every access to a claim is a step."""

    def __init__(self, claims: Claims, tape: Tape) -> None:
        self._claims, self._tape = claims, tape

    def retry(self, act: Callable[[], Any], free_space: Callable[[], Any] | None = None) -> Any:
        """Does what `act` does; nothing is ever full, so that no space is freed."""
        arguments = getattr(act, "args", ())
        if not arguments or arguments[0] is not self._claims:
            return act()
        key, owner = arguments[1], arguments[2:]
        action, kind = (f"claims {key}", key) if owner else ("reads a claim", "")
        return self._tape.step(act, action=action, kind=kind)


class TapedRanks:
    """All agents of an allocation as its leader sees them: nothing is foreign or full, and every run goes well."""

    hosts, end_reason, outage = ("gpu01",), None, None
    node_facts = ({"host": "gpu01", "foreign": (), "short_of_space": None, "kernel_digest": "digest"},)

    def __init__(self, tape: Tape, witness: list[str]) -> None:
        self._tape, self._witness = tape, witness
        step = {"event": "step", "seconds": 1.0, "loss": 1.0, "measured": True}
        self.progress = AttemptProgress(1, self.hosts)
        self.progress.ranks = [
            RankProgress(host="gpu01", steps=[step] * 9, done_line={"event": "done"}, code=0)
        ]

    def start(self, task: Task, index: int) -> None:
        self._tape.step(lambda: self._witness.append(str(task.key)), action="runs")

    def listen(self, seconds: float) -> float:
        return 0.0

    def end_ranks(self) -> None: ...

    def finish(self, keep_all: bool) -> None: ...

    def measured_fields(self) -> dict[str, Any]:
        return {}


class Block(NamedTuple):
    """What a block of steps of one process has changed."""

    journal: Journal
    claims: Claims
    process: Process
    summary: str
    steps: int
    jobs: dict[str, SmallJob]
    witness: tuple[str, ...] = ()


class Stage:
    """Where worlds come to life: the plan, and the programs of launchers and agents."""

    def __init__(self, sweep: OpenSweep, *, in_turn: bool = False, most_kills: int = 2) -> None:
        """`in_turn`: the second launcher starts when the first one is gone."""
        self.sweep, self.in_turn, self.most_kills = sweep, in_turn, most_kills
        self.coarse = False
        """A launcher that has looked once sees jobs and journals at one moment."""
        self.most_jobs = 2
        """That Slurm takes before everybody starts anew."""
        self.double = False
        """Every submission makes two jobs."""
        self.stranger = False
        """The second launcher is another user's, who sees no jobs but his own."""
        self.late = False
        """Slurm may call a job over before the last line of its agent is there."""
        self.current = ""
        """Names the next allocation: whose it is and how many there were."""
        self._folds: dict[frozenset[tuple[str, int, int]], SweepState] = {}
        self._blocks: dict[Any, Block] = {}
        """All that a process can see, and how far it goes -> what it does then: worlds differ in little."""
        attributes = ("plan", "reader", "environment", "accepts", "kernel_digest", "git_commit")
        self._open = {name: getattr(sweep, name) for name in attributes}

    def first(self) -> World:
        return World({}, {}, {}, {n: Process(n) for n in ("launcher-a", "launcher-b")}, {})

    def after(self, world: World) -> Iterator[World]:
        """Every world that one block of steps of somebody, or his death in it, can make of this one."""
        mortal = world.kills < self.most_kills
        for name, process in world.launchers.items():
            if process.over or self.waits(world, name):
                continue
            untouched = world.launchers["launcher-a"] == Process("launcher-a")
            if name == "launcher-b" and untouched and not self.stranger:
                continue  # two launchers of one user are alike, so that the first one may begin
            whole, steps = self.launcher(world, name)
            yield whole
            for max_steps in range(steps if mortal else 0):
                yield replace(self.launcher(world, name, max_steps)[0], kills=world.kills + 1)
        for name, job in world.jobs.items():
            if job.phase == "pending":
                yield self.start(world, name)
                if mortal:
                    yield self._end(world, name, replace(job, phase="over"))
            elif name in world.agents:
                whole, steps = self.agent(world, name)
                yield whole
                if job.phase == "over":
                    yield from [self._end(world, name, job)] * mortal
                    continue
                if self.late and "done" in world.agents[name].latest:
                    story = (*world.story, f"Slurm calls {name} over")
                    yield replace(world, jobs=world.jobs | {name: replace(job, phase="over")}, story=story)
                for max_steps in range(steps if mortal else 0):
                    cut, _ = self.agent(world, name, max_steps)
                    yield self._end(cut, name, replace(job, phase="over"))
                    yield self._end(cut, name, job.requeued())

    def waits(self, world: World, name: str) -> bool:
        """Whether this launcher starts only when the first one is gone, which it is not yet."""
        return self.in_turn and name == "launcher-b" and not world.launchers["launcher-a"].over

    def start(self, world: World, name: str) -> World:
        """Slurm starts a job, with an agent in it."""
        job = replace(world.jobs[name], phase="running")
        agent = Process(f"agent-{name}-{job.restart}".replace("+", "_"))
        story = (*world.story, f"Slurm starts {name}")
        return replace(world, jobs=world.jobs | {name: job}, agents=world.agents | {name: agent}, story=story)

    def _end(self, world: World, name: str, job: SmallJob) -> World:
        """A job loses its nodes: its agent died where it stood."""
        agents = {n: a for n, a in world.agents.items() if n != name}
        story = (*world.story, f"Slurm ends {name}: {job.phase}")
        return replace(
            world, jobs=world.jobs | {name: job}, agents=agents, kills=world.kills + 1, story=story
        )

    def launcher(self, world: World, name: str, max_steps: int = WHOLE) -> tuple[World, int]:
        """A launcher's next block of steps, at most `max_steps` before it dies; and how many they were."""
        process = world.launchers[name]
        view = (process.key, max_steps, self.most_jobs, self.coarse, world.visible)
        block = self._block(view, lambda: self._launch(world, process, max_steps))
        return _changed(world, block, launchers=world.launchers | {name: block.process}), block.steps

    def _block(self, view: Any, take: Callable[[], Block]) -> Block:
        """The block of a process that sees this; it is taken once."""
        if len(self._blocks) > MAX_BLOCKS:
            self._blocks.clear()
        if view not in self._blocks:
            self._blocks[view] = take()
        return self._blocks[view]

    def _launch(self, world: World, process: Process, max_steps: int) -> Block:
        """Runs a launcher in a world, until it has to wait for others or dies."""
        name, lines, claims, jobs = process.name, dict(world.journal), dict(world.claims), dict(world.jobs)
        tape = Tape(process, max_steps)
        tape.coarse = self.coarse and process.memory is not None
        journal = TapedJournal(lines, process, tape)
        folder = SimpleNamespace(
            path=Path("t"), allocations=Path("t/allocations"), claims=claims, leases=Path("t/leases")
        )
        taped = {"folder": folder, "journal": journal, "tape": tape, "lines": lines, "folds": self._folds}
        sweep = TapedSweep(**self._open, **taped)
        try:
            by = OTHERS if self.stranger and name in ("launcher-b", "launcher-d") else OURS
            slurm = SmallSlurm(jobs, tape, self.most_jobs, by, self.double)
            reconciler = Reconciler(sweep, slurm, *UNSEEN, copy.deepcopy(process.memory))
            memory = reconciler.memory
            self.current = f"{name[-1]}{memory.num_submitted}"
            _, busy = reconciler.run_once()
            process = Process(name, seq=journal.seq, memory=memory) if busy else Process(name, over=True)
        except Halt:
            process = replace(process, answers=tuple(tape.answers), latest=tape.latest)
        except ClusterError:
            process = Process(name, over=True)
        if max_steps != WHOLE:
            process = Process(name, over=True)
        return Block(lines, claims, process, tape.summary(name), tape.new, jobs)

    def agent(self, world: World, name: str, max_steps: int = WHOLE) -> tuple[World, int]:
        """The same for the leading agent of a job, which sees the claims only."""
        process, job = world.agents[name], world.jobs[name]
        view = (process.key, max_steps, name, job.restart, world.owners)
        block = self._block(view, lambda: self._run(world, process, job, max_steps))
        agents = world.agents | {name: block.process}
        return _changed(world, block, agents={n: a for n, a in agents.items() if not a.over}), block.steps

    def _run(self, world: World, process: Process, job: SmallJob, max_steps: int) -> Block:
        """Runs an agent in a world, until it has to wait for others or dies."""
        lines, claims = Journal(), dict(world.claims)
        tape, witness, jobs = Tape(process, max_steps), list[str](), dict[str, SmallJob]()
        try:
            waits = (Result, AllocationEnded) if self.late else (Result,)
            self._lead(job, TapedJournal(lines, process, tape, waits), claims, tape, witness)
            jobs, process = {job.job_id: replace(job, phase="over")}, replace(process, over=True)
        except Halt:
            process = replace(process, answers=tuple(tape.answers), latest=tape.latest)
        story = tape.summary(f"agent of {job.job_id}")
        return Block(lines, claims, process, story, tape.new, jobs, tuple(witness))

    def _lead(
        self, job: SmallJob, journal: TapedJournal, claims: Claims, tape: Tape, witness: list[str]
    ) -> None:
        """The agent that leads an allocation: what ultrabench.agent does around the Leader, and the Leader."""
        start, name = Start(job_id=job.job_id, restart=job.restart), job.allocation.name
        identity, disk = NodeIdentity(node_index=0, host="gpu01", job=start), TapedDisk(claims, tape)
        if not disk.retry(partial(lead.owns, claims, name, identity.owner_facts(name))):
            return
        journal.write(AllocationStarted(allocation=name, agent=LeadingAgent(job=start)))
        folder = SimpleNamespace(claims=claims, pause=SimpleNamespace(exists=lambda: False))
        node = SimpleNamespace(allocation=job.allocation, identity=identity, disk=disk, folder=folder)
        node.scratch, node.kernel_digest, node.remove_state = "", lambda: "digest", lambda: None
        ending = lead.Leader(node, TapedRanks(tape, witness), journal).run()
        tape.step(lambda: None, action="is done", kind="done")
        journal.write(AllocationEnded(allocation=name, job=start, **ending._asdict(), source="agent"))


def _changed(world: World, block: Block, **processes: dict[str, Process]) -> World:
    """The world after a block of steps."""
    return replace(
        world, journal=world.journal | block.journal, claims=world.claims | block.claims, jobs=world.jobs | block.jobs,
        witness=(*world.witness, *block.witness), story=(*world.story, block.summary), **processes,
    )  # fmt: skip
