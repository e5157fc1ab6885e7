"""A stub of AWS's SMDDP for tests: registers the backend ``smddp`` for CUDA, on top of Gloo.

torch's object collectives ask for the backend's devices and move their bytes there, so they fail
without a GPU. All other collectives accept the tests' CPU tensors. SMDDP_STUB selects a fault:
``raise`` or ``wrong`` results or a collective that ``hang``s.
"""

from __future__ import annotations

import os
import threading
from typing import Any

import torch.distributed
from torch.distributed import distributed_c10d as c10d

_FAULT = os.environ.get("SMDDP_STUB")


class StubProcessGroup(c10d.ProcessGroup):  # type: ignore[misc, unused-ignore]
    """Forwards the collectives that SMDDP documents for data parallelism to Gloo."""

    def __init__(self, store: Any, rank: int, size: int, timeout: Any) -> None:
        super().__init__(rank, size)
        self._gloo: Any = c10d.ProcessGroupGloo(store, rank, size, timeout)

    def getBackendName(self) -> str:  # noqa: N802  overrides torch
        return "smddp"

    def allreduce(self, tensors: Any, options: Any = None) -> Any:
        if _FAULT == "raise":
            raise RuntimeError("SMDDP does not support: stub")
        if _FAULT == "hang" and self.rank() == 0:
            threading.Event().wait()
        work = self._gloo.allreduce(tensors, options or c10d.AllreduceOptions())
        if _FAULT == "wrong":
            work.wait()
            tensors[0].mul_(2)
        return work

    def allgather(self, outputs: Any, inputs: Any, options: Any = None) -> Any:
        return self._gloo.allgather(outputs, inputs, options or c10d.AllgatherOptions())

    def broadcast(self, tensors: Any, options: Any) -> Any:
        return self._gloo.broadcast(tensors, options)

    def barrier(self, opts: Any = None) -> Any:
        return self._gloo.barrier()


torch.distributed.Backend.register_backend("smddp", StubProcessGroup, devices=["cuda"])
