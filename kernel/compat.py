"""Every touch of torch that is private or differs between the versions we support."""

from typing import Any

import torch
import torch.distributed as dist


def group_name(argument: Any) -> str | None:
    """Name of the process group an operator's argument is, None for any other argument.

    Functional collectives carry the name as text; c10d operators carry the boxed group.
    """
    if isinstance(argument, str):
        return argument
    if isinstance(argument, torch.ScriptObject):
        try:
            return str(dist.ProcessGroup.unbox(argument).group_name)
        except (RuntimeError, TypeError):
            return None
    return None
