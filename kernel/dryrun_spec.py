"""The result of a dry run, and the call for one; it needs no torch, so that the CLI can import it."""

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
    """The cost of one optimizer step for the first rank of a pipeline stage, once optimizer states exist."""

    pp_rank: int
    rank: int
    static_bytes: int
    """Bytes that stay allocated from step to step."""
    peak_bytes: int
    """Largest number of live bytes; its parts are parameter, gradient, optimizer and activation bytes."""
    parameter_bytes: int
    """Bytes of this rank's shards, and of shards gathered from other ranks, at the peak."""
    gradient_bytes: int
    optimizer_bytes: int
    activation_bytes: int
    """Bytes that are kept for backward, are temporary, or are being sent to other ranks, at the peak."""
    hardware_flops: int
    """FLOPs of the matrix products and attention that were executed."""
    collectives: dict[str, tuple[int, ...]]
    """Axis and operation, such as `tp all_gather` -> number of calls, payload in bytes."""


def ask(spec: RunSpec) -> Iterator[RankCost]:
    """Yields the cost of each pipeline stage of `spec` as soon as it is known.

    Raises:
        ConfigError: the kernel cannot build or train this layout.
    """
    with subprocess.Popen(
        COMMAND,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, **thread_variables(1)},
        process_group=0,  # only this process gets Ctrl-C; children end with the server
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
