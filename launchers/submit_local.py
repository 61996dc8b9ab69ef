"""Starts one allocation on this machine: `python -P -m ultrabench.launchers.submit_local FOLDER`.

Run as a process of its own, in a session of its own, so that the agents outlive the launcher.
Prints the controller's pid.
"""

import os
import shlex
import sys
from pathlib import Path

from submitit import LocalExecutor

from ultrabench.store.allocation import read_allocation


class AgentExecutor(LocalExecutor):
    """submitit's local executor, running our agent instead of a pickled function."""

    agent_folder = Path()

    @property
    def _submitit_command_str(self) -> str:
        return f"{self.python} -P -m ultrabench.agent {shlex.quote(str(self.agent_folder))}"


def main() -> None:
    """Submits the allocation of the folder that is given as argument; each simulated node is one task."""
    folder = Path(sys.argv[1])
    allocation = read_allocation(folder)
    pickles = folder / "submitit"
    pickles.mkdir(mode=0o700, exist_ok=True)
    executor = AgentExecutor(folder=pickles)
    executor.agent_folder = folder
    on_gpus = allocation.tasks[0].device == "cuda"
    executor.update_parameters(
        tasks_per_node=allocation.nodes,
        timeout_min=allocation.limit_s / 60 + 2,
        gpus_per_node=allocation.gpus_per_node if on_gpus else 0,
        signal_delay_s=30,
    )
    # The controller inherits stdout; kept open there, the launcher would wait for its end.
    answer = os.dup(1)
    os.dup2(2, 1)
    # What is submitted is never called: the command above is what runs.
    job = executor.submit(print)
    os.write(answer, f"{job.job_id}\n".encode())


if __name__ == "__main__":
    main()
