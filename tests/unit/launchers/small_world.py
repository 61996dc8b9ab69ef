"""Two launchers, their jobs and the agents in them as values: every step of each can be taken, or cut short."""

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

from tests.unit.launchers.small_slurm import OTHERS, OURS, SmallJob, SmallSlurm
from tests.unit.launchers.small_tape import (
    PLAIN,
    WHOLE,
    Halt,
    Journal,
    Process,
    Tape,
    TapedJournal,
    TapedSweep,
)
from ultrabench.agent.lead import owns
from ultrabench.errors import ClusterError
from ultrabench.launchers.open_sweep import OpenSweep
from ultrabench.launchers.reconcile import Reconciler
from ultrabench.launchers.settle import Settler
from ultrabench.record import to_dict
from ultrabench.result import RunResult, Status
from ultrabench.run import Task
from ultrabench.store import events
from ultrabench.store.events import Start
from ultrabench.store.state import SweepState

UNSEEN = (lambda state, alive: None), (lambda note: None)
"""Arguments of a reconciler that shows and says nothing."""
MOST_BLOCKS = 200_000
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
        return hash((self.seen, processes, tuple(sorted(self.witness)), self.kills))

    @property
    def seen(self) -> tuple[Any, ...]:
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


def owner(claims: Claims, key: str) -> dict[str, Any] | None:
    """What ultrabench.store.claim.owner does."""
    return claims.get(key)


class Block(NamedTuple):
    """What a block of steps of one process has changed."""

    journal: Journal
    claims: Claims
    process: Process
    told: str
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
        self.claim: Callable[..., bool] = claim
        self.owns: Callable[..., bool] = owns
        self.current = ""
        """Names the next allocation: whose it is and how many there were."""
        self._folds: dict[frozenset[tuple[str, int, int]], SweepState] = {}
        self._blocks: dict[Any, Block] = {}
        """All that a process can see, and how far it goes -> what it does then: worlds differ in little."""
        kept = ("plan", "reader", "environment", "accepts", "kernel_digest", "git_commit")
        self._open = {name: getattr(sweep, name) for name in kept}
        self._template = vars(Reconciler(sweep, SmallSlurm({}, Tape(Process(""), 0)), *UNSEEN))
        self.settler = vars(self._template["settler"])

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
            for most in range(steps if mortal else 0):
                yield replace(self.launcher(world, name, most)[0], kills=world.kills + 1)
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
                if self.late and "done" in world.agents[name].known:
                    told = (*world.story, f"Slurm calls {name} over")
                    yield replace(world, jobs=world.jobs | {name: replace(job, phase="over")}, story=told)
                for most in range(steps if mortal else 0):
                    cut, _ = self.agent(world, name, most)
                    yield self._end(cut, name, replace(job, phase="over"))
                    yield self._end(cut, name, job.requeued())

    def waits(self, world: World, name: str) -> bool:
        """Whether this launcher starts only when the first one is gone, which it is not yet."""
        return self.in_turn and name == "launcher-b" and not world.launchers["launcher-a"].over

    def start(self, world: World, name: str) -> World:
        """Slurm starts a job, with an agent in it."""
        job = replace(world.jobs[name], phase="running")
        agent = Process(f"agent-{name}-{job.restart}".replace("+", "_"))
        told = (*world.story, f"Slurm starts {name}")
        return replace(world, jobs=world.jobs | {name: job}, agents=world.agents | {name: agent}, story=told)

    def _end(self, world: World, name: str, job: SmallJob) -> World:
        """A job loses its nodes: its agent died where it stood."""
        agents = {n: a for n, a in world.agents.items() if n != name}
        told = (*world.story, f"Slurm ends {name}: {job.phase}")
        return replace(world, jobs=world.jobs | {name: job}, agents=agents, kills=world.kills + 1, story=told)

    def launcher(self, world: World, name: str, most: int = WHOLE) -> tuple[World, int]:
        """A launcher's next block of steps, at most `most` of them before it dies; and how many they were."""
        process = world.launchers[name]
        seen = (process.key, most, self.most_jobs, self.coarse, world.seen)
        made = self._block(seen, lambda: self._launch(world, process, most))
        return _changed(world, made, launchers=world.launchers | {name: made.process}), made.steps

    def _block(self, seen: Any, take: Callable[[], Block]) -> Block:
        """The block of a process that sees this; it is taken once."""
        if len(self._blocks) > MOST_BLOCKS:
            self._blocks.clear()
        if seen not in self._blocks:
            self._blocks[seen] = take()
        return self._blocks[seen]

    def _launch(self, world: World, process: Process, most: int) -> Block:
        """Runs a launcher in a world, until it has to wait for others or dies."""
        name, lines, claims, jobs = process.name, dict(world.journal), dict(world.claims), dict(world.jobs)
        tape = Tape(process, most)
        tape.coarse = self.coarse and bool(process.memory)
        journal = TapedJournal(lines, process, tape)
        folder = SimpleNamespace(path=Path("t"), allocations=Path("t/allocations"), claims=claims)
        taped = {"folder": folder, "journal": journal, "tape": tape, "lines": lines, "folds": self._folds}
        sweep = TapedSweep(**self._open, **taped)
        try:
            by = OTHERS if self.stranger and name in ("launcher-b", "launcher-d") else OURS
            reconciler = self._born(sweep, process, SmallSlurm(jobs, tape, self.most_jobs, by, self.double))
            self.current = f"{name[-1]}{reconciler.submitted}"
            _, busy = reconciler.once()
            memory = {k: v for k, v in vars(reconciler).items() if isinstance(v, PLAIN)}
            settler = vars(reconciler.settler).items()
            memory["settler"] = {k: v for k, v in settler if isinstance(v, PLAIN) and k != "_runs"}
            process = Process(name, seq=journal.seq, memory=memory) if busy else Process(name, over=True)
        except Halt:
            process = replace(process, answers=tuple(tape.answers), known=tape.known)
        except ClusterError:
            process = Process(name, over=True)
        if most != WHOLE:
            process = Process(name, over=True)
        return Block(lines, claims, process, tape.told(name), tape.new, jobs)

    def _born(self, sweep: TapedSweep, process: Process, slurm: SmallSlurm) -> Reconciler:
        """The reconciler of a launcher that has just started, or of one that begins to look again."""
        if not process.memory:
            return Reconciler(sweep, slurm, *UNSEEN)
        made, settler = object.__new__(Reconciler), object.__new__(Settler)
        memory = copy.deepcopy(process.memory)
        vars(settler).update(self.settler, _sweep=sweep, _launcher=slurm, **memory.pop("settler"))
        vars(made).update(self._template, sweep=sweep, launcher=slurm, settler=settler, **memory)
        return made

    def agent(self, world: World, name: str, most: int = WHOLE) -> tuple[World, int]:
        """The same for the leading agent of a job, which sees the claims only."""
        process, job = world.agents[name], world.jobs[name]
        seen = (process.key, most, name, job.restart, world.owners)
        made = self._block(seen, lambda: self._run(world, process, job, most))
        agents = world.agents | {name: made.process}
        return _changed(world, made, agents={n: a for n, a in agents.items() if not a.over}), made.steps

    def _run(self, world: World, process: Process, job: SmallJob, most: int) -> Block:
        """Runs an agent in a world, until it has to wait for others or dies."""
        lines, claims = Journal(), dict(world.claims)
        tape, witness, jobs = Tape(process, most), list[str](), dict[str, SmallJob]()
        try:
            self._lead(job, TapedJournal(lines, process, tape), claims, tape, witness)
            jobs, process = {job.job_id: replace(job, phase="over")}, replace(process, over=True)
        except Halt:
            process = replace(process, answers=tuple(tape.answers), known=tape.known)
        told = tape.told(f"agent of {job.job_id}")
        return Block(lines, claims, process, told, tape.new, jobs, tuple(witness))

    def _lead(
        self, job: SmallJob, journal: TapedJournal, claims: Claims, tape: Tape, witness: list[str]
    ) -> None:
        """What ultrabench.agent.lead does, as far as others can see it."""
        allocation = job.allocation
        start = Start(job_id=job.job_id, restart=job.restart)
        me, name = {"allocation": allocation.name, "job": to_dict(start)}, {"allocation": allocation.name}
        if not tape.step(lambda: self.owns(claims, allocation.name, me), word="claims itself"):
            return
        journal.write(events.AllocationStarted(**name, agent=events.LeadingAgent(job=start)))
        for task in allocation.tasks if job.restart else ():
            held = tape.step(lambda task=task: owner(claims, str(task.key)), word="reads a claim") or {}
            if held.get("allocation") == allocation.name and held.get("job") != me["job"]:
                journal.write(events.Failed(**_end_of(task, Status.LOST), **name, source="slurm"))
        for task in allocation.tasks:
            key = str(task.key)
            if tape.step(lambda key=key: self.claim(claims, key, me), word=f"claims {key}", kind=key):
                journal.write(events.Claimed(**task.key._asdict(), **name, spec={"nodes": 1}))
                journal.write(events.Started(**task.key._asdict(), **name))
                tape.step(lambda key=key: witness.append(key), word="runs")
                journal.write(events.Result(**_end_of(task, Status.OK), **name), wait=True)
        tape.step(lambda: None, word="is done", kind="done")
        end = events.AllocationEnded(**name, job=start, reason="all tasks done", source="agent")
        journal.write(end, wait=self.late)


def _end_of(task: Task, status: Status) -> dict[str, Any]:
    return {**task.key._asdict(), "result": RunResult(status=status, step_times_s=(1.0,))}


def _changed(world: World, made: Block, **processes: dict[str, Process]) -> World:
    """The world after a block of steps."""
    return replace(
        world, journal=world.journal | made.journal, claims=world.claims | made.claims, jobs=world.jobs | made.jobs,
        witness=(*world.witness, *made.witness), story=(*world.story, made.told), **processes,
    )  # fmt: skip
