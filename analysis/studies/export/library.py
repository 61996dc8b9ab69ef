"""Imports the libraries of trackers, which are installed only where they are asked for."""

import importlib
import importlib.util
from typing import Any

from ultrabench.errors import ConfigError

PACKAGES = {
    "wandb": ("wandb",),
    "mlflow": ("mlflow", "sqlalchemy", "alembic"),
    "tensorboard": ("tensorboard",),
}
"""Extra of ultrabench -> the packages that it installs and that its tracker imports."""


def require_library(extra: str) -> None:
    """Raises ConfigError with the command of pip if a package of this extra is not installed; imports nothing.

    A folder of that name without code, such as `wandb` with its offline runs, does not count as a package.
    """
    for package in PACKAGES[extra]:
        spec = importlib.util.find_spec(package)
        if spec is None or spec.origin is None:
            raise ConfigError(f"{package} is not installed; run: pip install 'ultrabench[{extra}]'")


def tracker_module(module_name: str) -> Any:
    """A module of a tracker's package.

    Raises:
        ConfigError: it cannot be imported.
    """
    try:
        return importlib.import_module(module_name)
    except ImportError as error:
        extra = module_name.partition(".")[0]
        raise ConfigError(
            f"cannot import {module_name} ({error}); run: pip install -U 'ultrabench[{extra}]'"
        ) from error
