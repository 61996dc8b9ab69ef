"""sweep.json: what a sweep is, written once, and whether a later launch may continue it."""

import os
import platform
import sys
import time
from pathlib import Path
from typing import Any

import ultrabench
from ultrabench import checkout
from ultrabench.errors import ConfigError, SweepFolderError
from ultrabench.kernel_env import hide, redacted
from ultrabench.record import to_dict
from ultrabench.sweep.config import SweepConfig, read_hardware


def make_head(config: SweepConfig, environment: dict[str, Any]) -> dict[str, Any]:
    """The content of sweep.json for a new sweep.

    Args:
        environment: what the kernel's environment probe said of this machine, with the measured
            rate of a core where the hardware has no rate of its own.
    """
    return {
        "sweep": config.name,
        "cluster": config.cluster,
        "hardware": to_dict(config.hardware),
        "kernel": to_dict(config.kernel),
        "kernel_digest": config.kernel.digest(),
        "models": [to_dict(m) for m in config.models],
        "workload": to_dict(config.workload),
        "peak": {k: environment.get(k) for k in ("core_flops_per_s", "cores")},
        "environment": environment,
        "provenance": provenance(config),
        "config": config.resolved,
    }


def require_same(head: dict[str, Any], config: SweepConfig, where: Path) -> None:
    """Raises when `config` describes another sweep than the one in the folder.

    Axes and models may change (the plan grows or shrinks); hardware, kernel and workload may not.

    Raises:
        ConfigError: they differ; the message shows how.
    """
    for group in ("hardware", "kernel", "workload"):
        if not isinstance(head.get(group), dict):
            raise SweepFolderError(f"{where}/sweep.json lacks {group}; is it a sweep folder?")
        was, now = head[group], to_dict(getattr(config, group))
        was = to_dict(read_hardware(was)) if group == "hardware" else was
        if isinstance(was.get("env"), dict):  # an older head may hold what is now redacted
            was = was | {"env": redacted(was["env"])[0]}
        changed = [k for k in sorted({*was, *now}) if was.get(k) != now.get(k)]
        if changed:
            shown = ", ".join(f"{group}.{k}: {was.get(k)!r} -> {now.get(k)!r}" for k in changed)
            raise ConfigError(
                f"{where} is a sweep with another {group} ({shown}); start a new one with name=NAME"
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
