"""Faults of one node that no list of texts knows: everything fails there for a while, or no agent starts."""

import time
from typing import TYPE_CHECKING

from tests.chaos.fault import Fault
from tests.chaos.target import Hit, jobs, nodes_at_work, one_of

if TYPE_CHECKING:
    from tests.chaos.campaign import Campaign

BAD_S = 40.0
"""Seconds for which a node is bad; many jobs begin meanwhile."""
TEXTS = (
    "RuntimeError: the frobnicator of device 3 is in state 0x1f", "Fatal: unexpected mode 12", "",
    "NCCL WARN something went wrong", "panic: runtime error", "OSError: [Errno 71] Protocol error: '/opt/data'",
)  # fmt: skip
"""The last words of ranks on a bad node."""


def _bad_node(campaign: "Campaign", fault: Fault) -> Hit:
    """All ranks of a node fail at their start, with words that say nothing."""
    node = one_of(lambda: nodes_at_work(campaign.sweep), fault)
    order = campaign.bench.folder / "bad" / node
    order.write_text(TEXTS[fault.share % len(TEXTS)])
    _wait(campaign)
    order.unlink()
    return {"target": f"all ranks on {node}", "node": node}


def _no_agent(campaign: "Campaign", fault: Fault) -> Hit:
    """No agent starts on a node, as where a container or a Python environment is broken."""
    node = one_of(lambda: nodes_at_work(campaign.sweep), fault)
    order = campaign.nodes.folder / f"{node}.no_agent"
    seen = set[str]()
    order.touch()
    end = time.monotonic() + BAD_S
    while time.monotonic() < end and campaign.living():
        seen |= {job.job_id for job in jobs(campaign.sweep, f"--nodelist={node}")}
        time.sleep(0.2)
    order.unlink()
    return {"target": f"the agents on {node}, {len(seen)} jobs", "node": node, "costs": len(seen) + 8}


def _wait(campaign: "Campaign") -> None:
    """Waits until the node is repaired, or the sweep is over."""
    end = time.monotonic() + BAD_S
    while time.monotonic() < end and campaign.living():
        time.sleep(0.2)


STRIKES = {"bad_node": _bad_node, "no_agent": _no_agent}
"""Kind of fault -> the function that injects it, like the table of failures.py."""
