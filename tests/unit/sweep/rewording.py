"""What a sweep decides when all sentences in the code are other ones:
`python -m tests.unit.sweep.rewording [--reword] [--plant]`.

The sources of all rooms that run a sweep are changed as they are imported: every text of several words has other
words. Then many states of a sweep are decided, whose sentences come from the agent itself, and what is decided is
printed without its sentences. With --plant the rule that judges starts reads a sentence of the agent, as it once did.
"""

import ast
import importlib.machinery
import json
import random
import re
import sys
from dataclasses import replace
from types import SimpleNamespace

REWORDED = r"ultrabench\.(sweep\.running|agent|launchers|store|result|run|standing)\b"
"""Modules that write or read sentences while a sweep runs."""
KEPT = (
    "agent.diagnose.families", "agent.diagnose.log_lines", "agent.diagnose.log_record",
    "agent.diagnose.findings", "agent.ranks.cleanup", "agent.ranks.rank_log",
)  # fmt: skip
"""Modules that read texts of others: what programs and drivers print."""
SENTENCE = re.compile(r"[a-z]{2,},? [a-z]{2,}")
PLANTED = (
    r"(\w+)\.end\.code not in ENDS_ALLOWED_WITHOUT_RUN",
    r'not \1.end.reason.startswith(("the sweep is paused", "outside the window"))',
)


class Reworder(ast.NodeTransformer):
    """Replaces the words of sentences, and keeps what an f-string inserts between them.

    A pattern of `re` keeps its words, since it reads a text: where that is a sentence of ours, it no longer matches.
    """

    def visit_Call(self, node):
        reads = isinstance(node.func, ast.Attribute) and ast.unparse(node.func.value) == "re"
        return node if reads else self.generic_visit(node)

    def visit_Constant(self, node):
        if isinstance(node.value, str) and SENTENCE.search(node.value):
            return ast.copy_location(ast.Constant(re.sub(r"[A-Za-z]+", "mot", node.value)), node)
        return node


class Loader(importlib.machinery.SourceFileLoader):
    def source_to_code(self, data, path, *, _optimize=-1):
        text = data.decode()
        if "--plant" in sys.argv and self.name.endswith("running.starts"):
            text, planted = re.subn(*PLANTED, text)
            assert planted == 1
        tree = ast.parse(text)
        # The planted reader has the words of before, as code that reads the words of another module has.
        kept_modules = (*KEPT, "running.starts") if "--plant" in sys.argv else KEPT
        if "--reword" in sys.argv and not self.name.endswith(kept_modules):
            tree = ast.fix_missing_locations(Reworder().visit(tree))
        return compile(tree, path, "exec")

    def get_code(self, fullname):
        return self.source_to_code(self.get_data(self.path), self.path)


class Finder(importlib.machinery.PathFinder):
    @classmethod
    def find_spec(cls, fullname, path=None, target=None):
        spec = super().find_spec(fullname, path, target) if re.match(REWORDED, fullname) else None
        if spec and spec.origin and spec.origin.endswith(".py"):
            spec.loader = Loader(fullname, spec.origin)
        return spec


if __name__ == "__main__":
    sys.meta_path.insert(0, Finder)

from tests.configs import retry  # noqa: E402
from tests.strategies import FAILURES  # noqa: E402
from tests.unit.allocations import CONFIG, PLAN, told  # noqa: E402
from ultrabench.agent.lead import Leader  # noqa: E402
from ultrabench.result import UNMEASURED, RunResult, Status  # noqa: E402
from ultrabench.store.events import AllocationEnded, Start  # noqa: E402
from ultrabench.store.jobs_seen import JobLimits, JobsSeen  # noqa: E402
from ultrabench.store.state import AllocationState, SweepState  # noqa: E402
from ultrabench.sweep.running.attempts import Launch  # noqa: E402
from ultrabench.sweep.running.blame import blame_of  # noqa: E402
from ultrabench.sweep.running.decide import decide  # noqa: E402
from ultrabench.sweep.running.progress import progress_of  # noqa: E402

RUNS = PLAN.runs[:6]
POLICY = retry(breaker=3)
LIMITS = JobLimits(max_jobs=2, max_nodes=8, max_gpu_hours=None)


def ending(*, paused=False, window=None, late=False, unmeasured=False, interrupted=None):
    """How an allocation ends, in the words of the agent."""
    limits = {"limit_s": 0.0 if late else float("inf"), "warning_s": 0.0}
    allocation = SimpleNamespace(
        name="n1", window=window, utc_offset_s=None, kernel_digest="digest", **limits
    )
    identity = SimpleNamespace(host="gpu01", job=None, owner_facts=lambda name: {})
    node = SimpleNamespace(allocation=allocation, identity=identity, kernel_digest=lambda: "other")
    node.disk = SimpleNamespace(retry=lambda action: action())
    node.folder = SimpleNamespace(pause=SimpleNamespace(exists=lambda: paused))
    group = SimpleNamespace(listen=lambda seconds: None, end_reason=interrupted)
    leader = Leader(node, group, journal=None)
    leader._task_results = [(None, RunResult(status=Status.INVALID, cause=UNMEASURED))] if unmeasured else []
    return leader._why_not_now(SimpleNamespace(limit_s=60.0, predicted_duration_s=1.0))


ENDINGS = [
    {"paused": True},
    {"paused": True},
    {"paused": True},
    {"late": True},
    {"unmeasured": True},
    {"interrupted": "SIGTERM"},
    {},
]


HOSTS = ((), ("gpu01",), ("gpu02",))
THROTTLED = (None, None, "power")


def state_of(results, endings):
    """A state of a sweep in which runs and allocations ended like this."""
    state = SweepState()
    for run, repeat, attempt, status, cause, hosts, allocation, throttled in results:
        told(
            state, run, status, repeat, attempt, cause=cause, suspect_hosts=hosts, hostnames=hosts,
            allocation=allocation, reason=f"{status} on {hosts}", throttled=throttled,
        )  # fmt: skip
    for n, why in enumerate(endings):
        name, end = f"n1-{n}", AllocationEnded(allocation=f"n1-{n}", **why._asdict())
        state.allocations[name] = AllocationState(name=name, submission=("launch", n), ends={Start(): end})
    return state


def drawn_state(seed):
    """A state in which runs ended in many ways, and allocations in the words of the agent."""
    draw = random.Random(seed)
    choices = RUNS, range(2), range(3), (Status.OK, *FAILURES), (None, UNMEASURED), HOSTS, "xyz", THROTTLED
    results = [[*map(draw.choice, choices)] for _ in range(draw.randrange(12))]
    return state_of(results, [ending(**draw.choice(ENDINGS)) for _ in range(draw.randrange(8))])


def decided(state):
    """All that is decided about a state, without its words."""
    plan = replace(PLAN, config=replace(CONFIG, retry=POLICY), candidates=RUNS)
    launch = Launch(name="launch", since_end_s={key: float(n) for n, key in enumerate(state.attempts)})
    actions = decide(plan, state, JobsSeen(), LIMITS, launch, 0.0)
    now = progress_of("s", RUNS, state, "cuda").as_json()
    dead, blame = actions.dead_end, blame_of(state, POLICY)
    return (
        actions.submit, [*actions.bad_nodes], actions.end_jobs, actions.wait,
        bool(actions.stop_reason), dead and dead.num_allocations, [*blame.excluded], sorted(blame.program_failures),
        now["by_status"], now["settled"], now["best"], sorted(now["suspects"]),
    )  # fmt: skip


def decisions():
    """What is decided about many states, as texts."""
    return [[*map(repr, decided(drawn_state(seed)))] for seed in range(150)]


if __name__ == "__main__":
    print(json.dumps(decisions()))
