"""Judges how logs of ranks are classified: `python -m tests.corpus.judge FILE [--kinds K1,K8] [NAME...]`.

FILE is a JSON list of cases. Each has a `name`, a `kind`, the `hosts`, the `ranks` (lines of `text`, exit `code`,
whether the agent killed it: `killed_by_agent`) and what it `must` be: `status`, `cause` (a|b is either, null is any),
`suspect_hosts`, and `also`: what must follow. `addresses` may give the hosts of names or addresses.
`oom_kill_counted_on` lists ranks in whose cgroup Linux killed a process. `then_thread_dump_kib` and `then_frames`
stand for a dump of faulthandler and for C++ frames after the text. Each case is judged with the ranks failing in order
and in reverse. It prints status, cause, hosts, `confirmed` and the next step; the exit code is 1 if a case is
not what it must be.
"""

import argparse
import json
import tempfile
from collections import defaultdict
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tests.configs import measure, retry
from tests.unit.agent.one_node import task
from ultrabench.agent.diagnose.addresses import AddressBook
from ultrabench.agent.diagnose.outcome import classify
from ultrabench.agent.ranks.rank_log import read_log
from ultrabench.agent.ranks.rank_progress import AttemptProgress
from ultrabench.record import to_dict
from ultrabench.result import RunResult
from ultrabench.run import AttemptKey
from ultrabench.store.state import AttemptState, SweepState
from ultrabench.sweep.running.blame import blame_of
from ultrabench.sweep.running.retry import RetryDecision, decide_retry

TASK = replace(task("x.py", "cpu"), measure=measure(warmup_steps=2, loss_step=3))
POLICY = retry()
THREAD = (
    "Thread 0x00007f0000000001 (most recent call first):\n"
    '  File "/opt/env/lib/python3.12/threading.py", line 359 in wait\n\n'
)
FRAME = "frame #7: c10d::ProcessGroupNCCL::watchdogHandler() + 0x233 (0x7f3079fb6f86 in libtorch_cuda.so)\n"
DISK_CAUSES = ("disk_full", "disk_error")
"""What `disk fault` stands for."""


def log_of(rank: dict[str, Any]) -> str:
    """The whole log of a rank."""
    text = "\n".join(rank["text"]) + "\n"
    if dump_kib := rank.get("then_thread_dump_kib"):
        threads = THREAD * (dump_kib * 1024 // len(THREAD))
        text += f"Fatal Python error: Aborted\n\n{threads}Extension modules: numpy._core (total: 1)\n"
    return text + FRAME * (2 * rank.get("then_frames", 0))


def record_of_log(rank: dict[str, Any]) -> dict[str, Any]:
    """What an agent reads in the log of a rank."""
    with tempfile.NamedTemporaryFile() as file:
        file.write(log_of(rank).encode())
        file.flush()
        return to_dict(read_log(Path(file.name)))


def classified(case: dict[str, Any], numbers: list[int]) -> RunResult:
    """The result of a case whose ranks end in this order."""
    names_by_host = defaultdict[str, list[str]](list)
    for name, host in case.get("addresses", {}).items():
        names_by_host[host].append(name)
    book = AddressBook(case["hosts"], names_by_host)
    progress = AttemptProgress(len(case["ranks"]), case["hosts"], address_book=book)
    for second, number in enumerate(numbers, start=1):
        rank = case["ranks"][number]
        progress.ranks[number].killed_by_us = rank["killed_by_agent"]
        was_killed = number in (case.get("oom_kill_counted_on") or ())
        end = {"rank": number, "code": rank["code"], "oom_killed": was_killed, "disk_full": None}
        progress.add([end, {"rank": number, "log": record_of_log(rank)}], now_s=float(second))
    return replace(classify(progress, TASK, None), hostnames=tuple(case["hosts"]))


def next_step(*results: RunResult) -> RetryDecision:
    """What follows from the failures of one run."""
    attempts = [AttemptState(key=AttemptKey("r", 0, n), result=r) for n, r in enumerate(results)]
    state = SweepState(attempts={attempt.key: attempt for attempt in attempts})
    return decide_retry(attempts, POLICY, blame=blame_of(state, POLICY))


@dataclass(frozen=True)
class Verdict:
    """How a case was classified, and what is wrong with it."""

    result: RunResult
    step: RetryDecision
    faults: tuple[str, ...]

    @property
    def text(self) -> str:
        step = f"{'retry' if self.step.retry else 'no retry'} ({self.step.why})"
        hosts = (
            f"suspects {','.join(self.result.suspect_hosts) or '-'}, "
            f"began on {','.join(self.result.began_on) or '-'}"
        )
        head = f"{self.result.status} {self.result.cause}, {hosts}, confirmed {self.result.confirmed}, {step}"
        return f"{head}\n      {(self.result.reason or '')[:160]}"


def verdict(case: dict[str, Any], numbers: list[int]) -> Verdict:
    """Whether a case whose ranks end in this order is what it must be."""
    result, must, faults = classified(case, numbers), case["must"], []
    step = next_step(result)
    for name in ("status", "cause"):
        choices = (must[name] or "").replace("disk fault", "|".join(DISK_CAUSES)).split("|")
        if must[name] is not None and getattr(result, name) not in choices:
            faults.append(f"{name} must be {must[name]}")
    if must["suspect_hosts"] is not None and {*must["suspect_hosts"]} != {*result.suspect_hosts}:
        faults.append(f"suspect_hosts must be {must['suspect_hosts']}")
    also = must.get("also", "")
    avoided = {*step.avoid} & {*(must["suspect_hosts"] or case["hosts"])}
    if "another node" in also and not (step.retry and avoided):
        faults.append(f"must be {also}")
    if "retried once" in also and not (step.retry and not next_step(result, result).retry):
        faults.append(f"must be {also}")
    if "confirmed" in also and not result.confirmed:
        faults.append(f"must be {also}")
    return Verdict(result, step, tuple(faults))


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("file", type=Path)
    parser.add_argument("names", nargs="*", help="names of cases; default: all")
    parser.add_argument("--kinds", help="kinds with commas between them; default: all")
    arguments = parser.parse_args()
    kinds = {*arguments.kinds.split(",")} if arguments.kinds else None
    num_cases = num_wrong = 0
    for case in json.loads(arguments.file.read_text()):
        is_other_kind = kinds is not None and kinds.isdisjoint(case["kind"].split(","))
        if is_other_kind or (arguments.names and case["name"] not in arguments.names):
            continue
        numbers = [*range(len(case["ranks"]))]
        verdicts = [verdict(case, numbers), verdict(case, numbers[::-1])]
        faults = dict.fromkeys(fault for v in verdicts for fault in v.faults)
        num_cases, num_wrong = num_cases + 1, num_wrong + bool(faults)
        print(f"{'WRONG' if faults else 'right'} {case['name']} ({case['kind']}): {'; '.join(faults)}")
        for text in dict.fromkeys(v.text for v in verdicts):
            print(f"   {text}")
    print(f"{num_cases - num_wrong} of {num_cases} right")
    return int(num_wrong > 0)


if __name__ == "__main__":
    raise SystemExit(main())
