"""Keeps the CPU part of a script's process groups until its process ends.

Destroying Gloo's part joins its threads. When a script ends and its model is freed, DDP's reducer
does so with the GIL held, and a thread that is about to release the last collective waits for the
GIL: the process hangs (seen with PyTorch 2.13, stack by py-spy). ``run_entry.py`` exits without
destructors, so a part that is kept is never destroyed.
"""

from __future__ import annotations

import sys
from typing import Any

_kept: list[Any] = []


def keep_cpu_backends() -> None:
    """Keep the CPU backends of all process groups of this process, if it has any."""
    import torch

    distributed: Any = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return
    for group in list(distributed.distributed_c10d._world.pg_map):
        try:
            backend = group._get_backend(torch.device("cpu"))
        except RuntimeError:  # a group for GPUs only
            continue
        if not any(backend is kept for kept in _kept):
            _kept.append(backend)
