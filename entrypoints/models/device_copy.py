"""Copies from host to device that the CPU does not wait for."""

from __future__ import annotations

import torch
from torch import Tensor


def copy_to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Return ``tensor`` on ``device``; the CPU continues before the copy is done.

    A tensor of that device is returned as it is. A GPU copies page-locked memory only; for
    any other the driver may first wait until all earlier work is done (CUDA Runtime API 12.2, "API
    synchronization behavior"). PyTorch keeps page-locked memory that it has allocated once, and
    reuses a block after its copy is done.
    """
    if tensor.device.type == device.type:
        return tensor
    if device.type == "cuda" and not tensor.is_pinned():
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)
