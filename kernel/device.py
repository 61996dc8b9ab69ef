"""What distinguishes a torch device from others; the kernel asks for these properties, not for the name of its type."""

import torch

from ultrabench.hardware import DEVICE_KINDS, DeviceKind


def kind_of(device: torch.device) -> DeviceKind:
    """The properties of the type of `device`, which is a value of hardware.device."""
    return DEVICE_KINDS[device.type]
