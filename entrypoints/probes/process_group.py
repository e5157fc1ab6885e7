"""Times collectives in a group of ranks, with NCCL on GPUs or with Gloo on CPUs.

Every group has its own connections and its own prefix in the store, so a broken link breaks only
the groups that use it; subgroups of one process group would not guarantee that. Groups are never
destroyed: the process ends instead, because Gloo's destructor can wait forever.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, cast

import torch
from sm_train.cost.network import Collective
from sm_train.entrypoints.distributed.messages import KeyValueStore
from torch import Tensor
from torch.distributed import distributed_c10d as c10d

_ELEMENT_BYTES = 4  # fp32, as gradients are reduced


class BenchmarkGroup:
    """The group of global ``ranks``, in the process of global rank ``rank``.

    Raises:
        RuntimeError: a rank did not answer within ``timeout`` seconds; so does every method.
    """

    def __init__(
        self,
        store: KeyValueStore,
        name: str,
        ranks: Sequence[int],
        rank: int,
        device: torch.device,
        timeout: float,
    ) -> None:
        self.size, self.group_rank = len(ranks), ranks.index(rank)
        self._device = device
        wait = timedelta(seconds=timeout)
        prefixed = c10d.PrefixStore(name, cast("c10d.Store", store))
        if device.type == "cuda":
            torch.cuda.set_device(device)  # each thread has its own current device
            options = c10d.ProcessGroupNCCL.Options()
            options._timeout = wait
            self._group: Any = c10d.ProcessGroupNCCL(prefixed, self.group_rank, self.size, options)
        else:
            self._group = c10d.ProcessGroupGloo(prefixed, self.group_rank, self.size, wait)

    def measure(self, collective: Collective, size: int, repeats: int) -> float:
        """Return the slowest rank's mean seconds of ``repeats`` collectives of ``size`` bytes.

        The size is defined as in nccl-tests: an all-gather's output, a reduce-scatter's input.
        """
        shard_elements = max(1, size // _ELEMENT_BYTES // self.size)
        # float32 (shard_elements * size,) and (shard_elements,)
        full = torch.ones(shard_elements * self.size, device=self._device)
        shard = torch.ones(shard_elements, device=self._device)
        self.max_over_ranks(0.0)  # a barrier: all ranks start together
        seconds = self._time(collective, full, shard, repeats)
        return self.max_over_ranks(seconds)

    def _time(self, collective: Collective, full: Tensor, shard: Tensor, repeats: int) -> float:
        if self._device.type != "cuda":
            started = time.perf_counter()
            for _ in range(repeats):
                self._start(collective, full, shard).wait()
            return (time.perf_counter() - started) / repeats
        event: Any = torch.cuda.Event
        begin, end = event(enable_timing=True), event(enable_timing=True)
        begin.record()
        # NCCL runs the calls in order on its stream; wait() makes the current stream, on which
        # `end` is recorded, wait for the last one.
        for _ in range(repeats):
            work = self._start(collective, full, shard)
        work.wait()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1000 / repeats

    def _start(self, collective: Collective, full: Tensor, shard: Tensor) -> Any:
        if collective == "all_reduce":
            return self._group.allreduce([full])
        if collective == "all_gather":
            return self._group._allgather_base(full, shard)
        return self._group._reduce_scatter_base(shard, full)

    def max_over_ranks(self, seconds: float) -> float:
        """Return the largest value of all ranks."""
        value = torch.tensor([seconds], dtype=torch.float64, device=self._device)
        options: Any = c10d.AllreduceOptions()
        options.reduceOp = c10d.ReduceOp.MAX
        self._group.allreduce([value], options).wait()
        return float(value.item())

    def exchange(self, value: float) -> list[float]:
        """Return all ranks' values, in rank order."""
        own = torch.tensor([value], dtype=torch.float64, device=self._device)
        gathered = torch.empty(self.size, dtype=torch.float64, device=self._device)
        self._group._allgather_base(gathered, own).wait()
        return [float(value) for value in gathered.tolist()]
