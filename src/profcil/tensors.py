"""From the host to a device without waiting for it."""

from __future__ import annotations

import torch
from torch import Tensor


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """A tensor on a device. Out of the host's ordinary memory a GPU would first finish all that is under way."""
    if device.type == "cuda" and tensor.device.type == "cpu" and tensor.numel():
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)
