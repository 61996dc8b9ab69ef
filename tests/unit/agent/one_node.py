"""One node of an agent, told by lines on stdin what to do: `python -m tests.unit.agent.one_node FOLDER CODE [DEVICE]`.

CODE is the Python file that its one rank runs. Lines are expressions about `node` and `gpus`;
what they give comes back as JSON.
"""

import json
import sys
from dataclasses import replace
from pathlib import Path

import yaml

import ultrabench
from ultrabench.agent.node_identity import NodeIdentity
from ultrabench.agent.ranks import gpus
from ultrabench.agent.ranks.node import Node, NodeAfterRun
from ultrabench.kernel.requests import TINY
from ultrabench.kernel_config import KernelConfig
from ultrabench.layout import Layout
from ultrabench.measure import Measure
from ultrabench.partial_step import Slice
from ultrabench.processes import become_subreaper
from ultrabench.record import to_dict
from ultrabench.run import RunSpec, Task, Workload
from ultrabench.store.allocation import Allocation

# Composing the configuration would take longer than all else that this process does.
AUTO = ("warmup_s", "min_s", "max_foreign_load")
"""Settings whose usual value is that of the hardware."""
_VALUES = yaml.safe_load((Path(ultrabench.__file__).parent / "configs/measure/default.yaml").read_text())
# null stands for what the hardware says, which for programs of the user is the neutral value.
MEASURE = Measure(**{key: value for key, value in _VALUES.items() if key not in AUTO})


def task(code: str, device: str) -> Task:
    """A task whose one rank runs a Python file."""
    spec = RunSpec(
        shape=TINY, workload=Workload(seq_len=64, gbs=1), layout=Layout(dp=1, tp=1, pp=1, mbs=1, gas=1, zero_stage=0),
        kernel=KernelConfig(name="code", kind="command", command=("python", code)), nodes=1, gpus_per_node=1,
    )  # fmt: skip
    return Task(
        run_id=spec.run_id, repeat=0, attempt=0, spec=spec, measure=MEASURE, device=device, rank_mem_bytes=2**30,
        predicted_step_time_s=0.01, predicted_duration_s=1.0, limit_s=60.0,
    )  # fmt: skip


def allocation(folder: Path, *tasks: Task) -> Allocation:
    """An allocation of simulated nodes for these tasks, whose sweep and programs are in `folder`."""
    spec = tasks[0].spec
    return Allocation(
        name="n1-clean.0", sweep_dir=str(folder), work_dir=str(folder), nodes=spec.nodes,
        gpus_per_node=spec.gpus_per_node, simulated=True, threads=1, heartbeat_s=5.0, limit_s=600.0, kernel_digest="",
        tasks=tasks,
    )  # fmt: skip


def slice_of_ranks(node: Node, departure: float | None) -> dict[str, object]:
    """The slice that the ranks of a task read, if the leader orders its start with this departure."""
    by_parts = replace(node.allocation.tasks[0], attempt=1, slice=Slice(g1=2, g2=4, third=6))
    node.allocation = replace(node.allocation, tasks=(by_parts,))
    node.obey({"do": "start", "task_index": 0, "address": "127.0.0.1", "port": 0, "departure": departure})
    sizes: dict[str, object] = json.loads((node.scratch / str(by_parts.key) / "spec.json").read_text())[
        "slice"
    ]
    return sizes


def main() -> None:
    folder, code, device = Path(sys.argv[1]), sys.argv[2], (*sys.argv[3:], "cpu")[0]
    become_subreaper()
    node = Node(allocation(folder, task(code, device)), NodeIdentity(node_index=0, host="local-0"))
    node.start(0, "127.0.0.1", 0)
    for line in sys.stdin:
        answer = eval(line, {"node": node, "gpus": gpus, "slice_of_ranks": slice_of_ranks})
        print(json.dumps(to_dict(answer) if isinstance(answer, NodeAfterRun) else answer), flush=True)
    node.close()


if __name__ == "__main__":
    main()
