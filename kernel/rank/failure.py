"""Names the kind of failure that an exception is, in the words of a report."""

import torch
import torch.distributed as dist


class NonFiniteLossError(RuntimeError):
    """The loss is infinite or not a number: training diverged, or computes wrong values."""


class ReplicasDifferError(RuntimeError):
    """Ranks that must hold the same parameters hold different ones."""


class IgnoredOptionError(RuntimeError):
    """A step ran with another option than the one that was asked for."""


ERRORS_BY_KIND: dict[str, tuple[tuple[type[BaseException], ...], tuple[str, ...]]] = {
    "non_finite": ((NonFiniteLossError,), ()),
    "replicas": ((ReplicasDifferError,), ()),
    "option": ((IgnoredOptionError,), ()),
    "oom": ((torch.OutOfMemoryError, MemoryError),
            ("can't allocate memory", "not enough memory", "out of memory", "bad_alloc")),
    "comm": ((dist.DistError, ConnectionError),
             ("Connection closed by peer", "Connection reset by peer", "Connection refused",
              "Broken pipe", "gloo/transport", "Timed out waiting", "NCCL error")),
}  # fmt: skip
"""Kind of failure -> the types of its exceptions, and parts of the messages of others."""


def kind_of(error: BaseException) -> str:
    """The kind of a failure: oom, comm, non_finite, replicas, option or exception.

    The causes of the exception are searched too, since the pipeline wraps what a stage raises.
    """
    cause: BaseException | None = error
    while cause is not None:
        for kind, (error_types, message_parts) in ERRORS_BY_KIND.items():
            if isinstance(cause, error_types) or any(text in str(cause) for text in message_parts):
                return kind
        cause = cause.__cause__
    return "exception"


def error_line(error: BaseException) -> str:
    """The first line of the innermost cause, as `Type: text`."""
    while error.__cause__ is not None:
        error = error.__cause__
    first_line = str(error).strip().partition("\n")[0]
    return f"{type(error).__name__}: {first_line}" if first_line else type(error).__name__
