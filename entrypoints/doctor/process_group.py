"""A group of ranks that times collectives, on GPUs by NCCL or on CPUs by Gloo.

Every group has its own connections and its own name in the store. So a group that a broken link
spoils spoils no other, which one process group with subgroups could not promise. None is ever
destroyed: the process ends instead (Gloo's destructor can wait for ever).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
from sm_train.entrypoints.doctor.bus_bandwidth import Collective
from torch import Tensor
from torch.distributed import distributed_c10d as c10d

_WIDTH = 4  # bytes of an element: gradients are summed in fp32


class Group:
    """``ranks`` are the members' global ranks, ``rank`` is this process's own among them.

    Raises:
        RuntimeError: the others did not come within ``timeout`` seconds; so does every method.
    """

    def __init__(
        self,
        store: Any,
        name: str,
        ranks: Sequence[int],
        rank: int,
        device: torch.device,
        timeout: float,
    ) -> None:
        self.size, self.place = len(ranks), ranks.index(rank)
        self._device = device
        wait = timedelta(seconds=timeout)
        prefixed = c10d.PrefixStore(name, store)
        if device.type == "cuda":
            torch.cuda.set_device(device)  # each thread has one of its own
            options = c10d.ProcessGroupNCCL.Options()
            options._timeout = wait
            self._group: Any = c10d.ProcessGroupNCCL(prefixed, self.place, self.size, options)
        else:
            self._group = c10d.ProcessGroupGloo(prefixed, self.place, self.size, wait)

    def measure(self, collective: Collective, size: int, times: int) -> float:
        """Mean seconds of ``times`` collectives of ``size`` bytes, of the slowest rank.

        The size is nccl-tests': of an all-gather's result and of what a reduce-scatter begins with.
        """
        each = max(1, size // _WIDTH // self.size)
        whole = torch.ones(each * self.size, device=self._device)
        part = torch.ones(each, device=self._device)
        self.slowest(0.0)  # all begin together
        seconds = self._timed(collective, whole, part, times)
        return self.slowest(seconds)

    def _timed(self, collective: Collective, whole: Tensor, part: Tensor, times: int) -> float:
        if self._device.type != "cuda":
            started = time.perf_counter()
            for _ in range(times):
                self._start(collective, whole, part).wait()
            return (time.perf_counter() - started) / times
        event: Any = torch.cuda.Event
        begin, end = event(enable_timing=True), event(enable_timing=True)
        begin.record()
        for _ in range(times):
            work = self._start(collective, whole, part)
        work.wait()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1000 / times

    def _start(self, collective: Collective, whole: Tensor, part: Tensor) -> Any:
        if collective == "all_reduce":
            return self._group.allreduce([whole])
        if collective == "all_gather":
            return self._group._allgather_base(whole, part)
        return self._group._reduce_scatter_base(part, whole)

    def slowest(self, seconds: float) -> float:
        """The largest of what the ranks give."""
        value = torch.tensor([seconds], dtype=torch.float64, device=self._device)
        options: Any = c10d.AllreduceOptions()
        options.reduceOp = c10d.ReduceOp.MAX
        self._group.allreduce([value], options).wait()
        return float(value.item())

    def exchange(self, value: float) -> list[float]:
        """What every rank gives, in their order."""
        own = torch.tensor([value], dtype=torch.float64, device=self._device)
        all_ = torch.empty(self.size, dtype=torch.float64, device=self._device)
        self._group._allgather_base(all_, own).wait()
        return [float(one) for one in all_.tolist()]
