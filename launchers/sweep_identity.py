"""Describes a sweep for sweep.json, and tells whether a later launch may continue it."""

import os
import platform
import sys
import time
from pathlib import Path
from typing import Any

import ultrabench
from ultrabench import checkout
from ultrabench.errors import ConfigError
from ultrabench.kernel_env import hide
from ultrabench.record import to_dict
from ultrabench.store.sweep_json import SweepJson
from ultrabench.sweep.config.sweep_config import SweepConfig


def sweep_json_of(config: SweepConfig, environment: dict[str, Any]) -> SweepJson:
    """The content of sweep.json for a new sweep.

    Args:
        environment: what the kernel's environment probe said of this machine, with the measured
            rate of a core where the hardware has no rate of its own.
    """
    return SweepJson(
        sweep=config.name, cluster=config.cluster, hardware=config.hardware, kernel=config.kernel,
        kernel_digest=config.kernel.digest(), models=config.models, workload=config.workload,
        core_flops_per_s=environment.get("core_flops_per_s"), cores=environment.get("cores"),
        environment=environment, provenance=provenance(config), config=config.resolved,
    )  # fmt: skip


def require_same(known: SweepJson, config: SweepConfig, where: Path) -> None:
    """Returns when `config` describes the sweep that is in the folder `where`.

    Axes and models may change (the plan grows or shrinks); hardware, kernel and workload may not.

    Raises:
        ConfigError: they differ; the message shows how.
    """
    for group in ("hardware", "kernel", "workload"):
        was, now = to_dict(getattr(known, group)), to_dict(getattr(config, group))
        changed = [f"{group}.{k}: {was[k]!r} -> {now[k]!r}" for k in sorted(now) if was[k] != now[k]]
        if changed:
            raise ConfigError(
                f"{where} is a sweep with another {group} ({', '.join(changed)}); start a new one with name=NAME"
            )


def provenance(config: SweepConfig) -> dict[str, Any]:
    """Who launched what from where."""
    commit = checkout.commit()
    return {
        "git_commit": commit,
        "git_dirty": bool(checkout.difference()) if commit else None,
        "version": ultrabench.__version__,
        "python": platform.python_version(),
        "argv": hide(sys.argv[1:], config.secrets),
        "user": os.environ.get("USER") or str(os.getuid()),
        "host": platform.node(),
        "created_at": time.time(),
    }
