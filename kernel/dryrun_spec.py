"""What a dry run answers, and how to ask; no torch in here, so anybody may."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass

from ultrabench.errors import ConfigError
from ultrabench.processes import thread_variables
from ultrabench.record import from_dict, to_dict
from ultrabench.run import RunSpec

COMMAND = (sys.executable, "-P", "-m", "ultrabench.kernel.dryrun")


@dataclass(frozen=True, slots=True, kw_only=True)
class RankCost:
    """What one optimizer step costs the first rank of a pipeline stage, its optimizer states made."""

    pp_rank: int
    rank: int
    static_bytes: int
    """What stays from step to step."""
    peak_bytes: int
    """The most that lives at a time; parameter, gradient, optimizer and activation are its parts."""
    parameter_bytes: int
    """Shards, and what is gathered of other ranks' at the peak."""
    gradient_bytes: int
    optimizer_bytes: int
    activation_bytes: int
    """Kept for backward, temporary, or on its way to other ranks."""
    hardware_flops: int
    """Of matrix products and attention, as executed."""
    collectives: dict[str, tuple[int, ...]]
    """`tp all_gather` -> calls, payload bytes."""


def ask(spec: RunSpec) -> Iterator[RankCost]:
    """The cost of each pipeline stage of `spec`, as soon as it is known.

    Raises:
        ConfigError: the kernel cannot build or train this layout.
    """
    with subprocess.Popen(
        COMMAND,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, **thread_variables(1)},
        process_group=0,  # Ctrl-C is for us; the end of the server ends its children
    ) as server:
        assert server.stdin is not None
        assert server.stdout is not None
        server.stdin.write(json.dumps(to_dict(spec)))
        server.stdin.close()
        try:
            for line in server.stdout:
                answer = json.loads(line)
                if "error" in answer:
                    raise ConfigError(f"{spec.layout.label()} cannot be dry-run: {answer['error']}")
                yield from_dict(RankCost, answer)
        except KeyboardInterrupt:
            server.kill()
            raise
    if server.returncode:
        raise ConfigError(f"{spec.layout.label()}: the dry run ended with exit code {server.returncode}")
