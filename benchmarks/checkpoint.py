"""How long training stands still for a checkpoint, against Accelerate's and a bare copy.

A model of 160 million weights with AdamW and an average: 2.6 GB of state in fp32. Ours begins a
checkpoint, computes the next step's gradients while the state is copied, waits for the copy before
AdamW would change the weights, and goes on while a thread writes; `accelerator.save_state` (with
the average as a registered object) writes before it returns. The physical limit of standing still
is one copy of the same bytes within memory. Interleaved; printed are medians, spread, and ratios;
both write to memory (/dev/shm). The first checkpoint, which allocates the buffers, is printed
apart. By how much the gradients take longer while the copy goes on is printed too: it shares the
memory's bandwidth with them.

    python benchmarks/checkpoint.py
"""

from __future__ import annotations

import io
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from sm_train.entrypoints.checkpointing.async_checkpointer import AsyncCheckpointer, CheckpointRank
from sm_train.entrypoints.common.background import BackgroundWork
from sm_train.entrypoints.common.events import EventLog
from sm_train.entrypoints.training.ema import ExponentialMovingAverage
from sm_train.entrypoints.training.state_dict import TrainStateDict
from torch import nn

ROUNDS = 5
LAYERS, WIDTH, BATCH = 38, 2048, 128


class Average:
    """The average, as Accelerate saves any object of one's own."""

    def __init__(self, ema: ExponentialMovingAverage) -> None:
        self._ema = ema

    def state_dict(self) -> dict[str, Any]:
        return {"averages": self._ema.averages, "updates": self._ema.updates}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._ema.updates = state["updates"]


def main() -> None:
    """Measure on this machine's memory."""
    accelerator = Accelerator(cpu=True)
    module = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-4)
    inputs = torch.randn(BATCH, WIDTH)

    def gradients() -> None:
        module(inputs).square().mean().backward()

    gradients()
    optimizer.step()
    ema = ExponentialMovingAverage(module.parameters(), 0.999)
    accelerator.prepare(module, optimizer)
    accelerator.register_for_checkpointing(Average(ema))
    state = TrainStateDict(module, list(module.parameters()), optimizer, ema)
    size = sum(one.part.numel() * 4 for one in state.tensors().values())
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, {size / 1e9:.2f} GB of state")
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        measure(accelerator, state, gradients, size, Path(folder))


def measure(
    accelerator: Accelerator,
    state: TrainStateDict,
    gradients: Callable[[], None],
    size: int,
    folder: Path,
) -> None:
    beside = BackgroundWork(accelerator.device)
    saver = AsyncCheckpointer(
        folder / "ours",
        CheckpointRank(0, 1, True),
        fingerprint="",
        keep=1,
        events=EventLog(node=0, rank=0, stream=io.StringIO()),
        gather=lambda one: one,
        beside=beside,
    )
    written: list[float] = []
    alone: list[float] = []
    together: list[float] = []
    source, target = (torch.ones(size // 4) for _ in range(2))

    def ours(number: int) -> float:
        started = time.perf_counter()
        saver.begin(number, state.tensors(), {})
        begun = time.perf_counter()
        gradients()
        computed = time.perf_counter()
        beside.join()
        blocked = time.perf_counter() - computed + begun - started
        together.append(computed - begun)
        saver.wait()
        saver.conclude()
        written.append(time.perf_counter() - started)
        started = time.perf_counter()
        gradients()
        alone.append(time.perf_counter() - started)
        return blocked

    def accelerates(_: int) -> float:
        started = time.perf_counter()
        accelerator.save_state(str(folder / "theirs"), safe_serialization=True)
        blocked = time.perf_counter() - started
        shutil.rmtree(folder / "theirs")
        return blocked

    def copy(_: int) -> float:
        started = time.perf_counter()
        target.copy_(source)
        return time.perf_counter() - started

    print(f"the first: {ours(0):.2f} s")
    variants: dict[str, Callable[[int], float]] = {
        "sm-train": ours,
        "accelerator.save_state": accelerates,
        "one copy in memory": copy,
    }
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    for number in range(1, ROUNDS + 2):
        for name, variant in variants.items():
            taken = variant(number)
            if number > 1:  # the first warms
                seconds[name].append(taken)
    show(seconds)
    print(f"sm-train, until it is complete: {statistics.median(written):.2f} s")
    both, one = statistics.median(together), statistics.median(alone)
    print(f"gradients: {one:.2f} s alone, {both:.2f} s beside the copy")


def show(seconds: dict[str, list[float]]) -> None:
    print(f"{'training stands still for':<28}{'s':>8}{'least':>8}{'most':>8}")
    for name, values in seconds.items():
        median = statistics.median(values)
        print(f"{name:<28}{median:>8.3f}{min(values):>8.3f}{max(values):>8.3f}")
    ours, theirs, copy = (statistics.median(values) for values in seconds.values())
    print(f"accelerator.save_state / sm-train: {theirs / ours:.1f}×")
    print(f"sm-train / one copy in memory: {ours / copy:.2f}×")


if __name__ == "__main__":
    main()
