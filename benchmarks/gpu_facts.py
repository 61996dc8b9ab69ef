"""What torch says of the GPUs of this machine, for programs that may not run without them."""

from typing import Any

from ultrabench.errors import ConfigError
from ultrabench.sweep.config.files import usable


def require_gpus(facts: dict[str, Any]) -> None:
    """Raises if torch sees no GPU on this machine.

    Raises:
        ConfigError: it tells why, as far as the facts do.
    """
    if facts["gpus"]:
        return
    why = "a driver is loaded, but gives this process no GPU (CUDA_VISIBLE_DEVICES, the job, or another version)"
    if facts["cuda_version"] is None:
        why = f"torch {facts['torch_version']} is built without CUDA"
    elif facts["driver_version"] is None:
        why = "no NVIDIA driver is loaded"
    problem = f"torch sees no GPU here: {why}; nothing was measured or written"
    raise ConfigError(f"{problem}. Run it on a machine with GPUs, or add --cpu for two processes of this one")


def hardware_name(facts: dict[str, Any]) -> str:
    """The file of configs/hardware/ that names this GPU.

    Raises:
        ConfigError: no file does.
    """
    for path, values in usable("hardware").items():
        if facts["gpu_name"] in values.get("reported_as", []):
            return path.stem
    unknown = f"no file in configs/hardware/ names {facts['gpu_name']!r} in reported_as"
    raise ConfigError(f"{unknown}; nothing was measured or written. Give --hardware NAME")
