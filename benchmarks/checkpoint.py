"""How long a checkpoint pauses training, against Accelerate's and a bare copy.

A model of 160 million weights with AdamW and EMA has 2.6 GB of state in fp32. Ours starts a
checkpoint, computes the next step's gradients while the state is copied, waits for the copy before
AdamW changes the weights, and continues while a thread writes; `accelerator.save_state` (with the
EMA as a registered object) writes before it returns. The lower bound of the pause is one copy of
the same bytes within memory. The variants are interleaved; the output is medians, spread and
ratios; both write to memory (/dev/shm). The first checkpoint, which allocates the buffers, is
listed separately.

The total cost of a checkpoint is the pause and what the steps lose that run while it is copied and
written: their time less that of as many steps alone, right before and after. The goals are a total
of at most three copies in memory, and steps that take at most 20 % longer. Steps run in one thread,
as torchrun sets it for several ranks. The same is also measured in CPU time, which other programs
disturb less: what copying and writing take in their threads, and how much more the training's
thread takes for its steps meanwhile, because memory bandwidth and caches are shared.

At last a file is written to the disk of temporary files, with and without the flush before its
name, which the checkpoint's thread waits for.

    python benchmarks/checkpoint.py [LAYERS]
"""

from __future__ import annotations

import io
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from accelerate import Accelerator
from sm_train.entrypoints.base.atomic_write import durable_replace
from sm_train.entrypoints.checkpoints.async_checkpointer import AsyncCheckpointer, CheckpointRank
from sm_train.entrypoints.checkpoints.background import BackgroundWork
from sm_train.entrypoints.checkpoints.stored_steps import StoredSteps
from sm_train.entrypoints.job_interface.events import EventLog
from sm_train.entrypoints.training.ema import ExponentialMovingAverage
from sm_train.entrypoints.training.state_dict import TrainStateDict
from torch import nn

ROUNDS = 5
FLUSHED_BYTES = 512 * 2**20
LAYERS, WIDTH, BATCH = int((sys.argv[1:] or ["38"])[0]), 2048, 128


@dataclass(frozen=True)
class Seconds:
    """A duration, or a ratio of durations, by the clock and in CPU time of one thread."""

    wall: float
    cpu: float


def mean(values: Sequence[Seconds]) -> Seconds:
    return Seconds(
        statistics.mean(cost.wall for cost in values), statistics.mean(cost.cpu for cost in values)
    )


def median(values: Sequence[Seconds]) -> Seconds:
    return Seconds(
        statistics.median(cost.wall for cost in values),
        statistics.median(cost.cpu for cost in values),
    )


def other_threads() -> float:
    """Return the CPU seconds of this process in all threads but the calling one."""
    return time.process_time() - time.thread_time()


class SavedEma:
    """The EMA as an object that Accelerate saves."""

    def __init__(self, ema: ExponentialMovingAverage) -> None:
        self._ema = ema

    def state_dict(self) -> dict[str, Any]:
        return {"averages": self._ema.averages, "updates": self._ema.updates}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._ema.updates = state["updates"]


def main() -> None:
    """Measure in the memory of this machine."""
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
    accelerator.register_for_checkpointing(SavedEma(ema))
    state = TrainStateDict(module, list(module.parameters()), [optimizer], ema)
    size = sum(shard.tensor.numel() * 4 for shard in state.tensors().values())
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, {size / 1e9:.2f} GB of state")
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        measure(accelerator, state, gradients, size, Path(folder))
    with tempfile.TemporaryDirectory() as folder:  # on a disk: memory has nothing to flush
        measure_flushes(Path(folder))


def measure(
    accelerator: Accelerator,
    state: TrainStateDict,
    gradients: Callable[[], None],
    size: int,
    folder: Path,
) -> None:
    background = BackgroundWork(accelerator.device)
    checkpointer = AsyncCheckpointer(
        folder / "ours",
        CheckpointRank(0, 1, 0, 0, 1),
        fingerprint="",
        keep=1,
        events=EventLog(node=0, rank=0, stream=io.StringIO()),
        all_gather=lambda value: [value],
        background=background,
        stored=StoredSteps(folder / "ours", uploads=False),
    )
    complete_seconds: list[float] = []
    alone: list[Seconds] = []
    slowdowns: list[Seconds] = []
    totals: list[Seconds] = []
    background_seconds: list[float] = []
    source, target = (torch.ones(size // 4) for _ in range(2))

    def step() -> Seconds:
        started, cpu_started = time.perf_counter(), time.thread_time()
        gradients()
        return Seconds(time.perf_counter() - started, time.thread_time() - cpu_started)

    def ours(number: int) -> float:
        alone.append(step())
        started = time.perf_counter()
        cpu_started, others_started = time.thread_time(), other_threads()
        checkpointer.save_async(number, state.tensors(), {}, {})
        blocked = time.perf_counter() - started
        blocked_cpu = time.thread_time() - cpu_started
        meanwhile = [step()]
        copied = time.perf_counter()
        background.join()
        blocked += time.perf_counter() - copied
        while checkpointer.writing:
            meanwhile.append(step())
        background_seconds.append(other_threads() - others_started)
        checkpointer.commit()
        complete_seconds.append(time.perf_counter() - started)
        alone.append(step())
        usual = mean(alone[-2:])
        slower = mean(meanwhile)
        slowdowns.append(Seconds(slower.wall / usual.wall - 1, slower.cpu / usual.cpu - 1))
        lost = Seconds(slower.wall - usual.wall, slower.cpu - usual.cpu)
        totals.append(
            Seconds(
                blocked + len(meanwhile) * lost.wall,
                blocked_cpu + len(meanwhile) * lost.cpu,
            )
        )
        return blocked

    def accelerate_save_state(_: int) -> float:
        started = time.perf_counter()
        accelerator.save_state(str(folder / "accelerate"), safe_serialization=True)
        blocked = time.perf_counter() - started
        shutil.rmtree(folder / "accelerate")
        return blocked

    copy_cpu: list[float] = []

    def copy(_: int) -> float:
        started, cpu_started = time.perf_counter(), time.thread_time()
        target.copy_(source)
        copy_cpu.append(time.thread_time() - cpu_started)
        return time.perf_counter() - started

    print(f"first checkpoint: {ours(0):.2f} s")
    variants: dict[str, Callable[[int], float]] = {
        "sm-train": ours,
        "accelerator.save_state": accelerate_save_state,
        "one copy in memory": copy,
    }
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    for number in range(1, ROUNDS + 2):
        for name, variant in variants.items():
            pause = variant(number)
            if number > 1:  # the first one warms up
                seconds[name].append(pause)
    print_pauses(seconds)
    print(f"sm-train, until complete: {statistics.median(complete_seconds):.2f} s")
    copies = Seconds(statistics.median(seconds["one copy in memory"]), statistics.median(copy_cpu))
    total, slowdown = median(totals[2:]), median(slowdowns[2:])
    print(
        f"total cost of a checkpoint: {total.wall:.2f} s, {total.wall / copies.wall:.1f} × one "
        f"copy in memory (goal: 3.0); in CPU time of the training's thread {total.cpu:.2f} s, "
        f"{total.cpu / copies.cpu:.1f} × one copy"
    )
    print(
        f"a step of {median(alone).wall:.2f} s takes {slowdown.wall:+.0%} while a checkpoint is "
        f"copied and written (goal: +20%), in CPU time {slowdown.cpu:+.0%}"
    )
    print(
        f"copying and writing take {statistics.median(background_seconds[2:]):.2f} s of CPU time "
        f"in their own threads, {statistics.median(background_seconds[2:]) / copies.cpu:.1f} × one "
        "copy"
    )


def measure_flushes(folder: Path) -> None:
    """Print what it costs the checkpoint's thread that a file is on the disk before its name."""
    content = os.urandom(2**20)
    seconds: dict[bool, list[float]] = {False: [], True: []}
    for number in range(2 * ROUNDS):
        is_durable = number % 2 == 1
        temporary, final = folder / ".file", folder / "file"
        started = time.perf_counter()
        with temporary.open("wb") as file:
            for _ in range(FLUSHED_BYTES // len(content)):
                file.write(content)
        if is_durable:
            durable_replace(temporary, final)
        else:
            temporary.rename(final)
        seconds[is_durable].append(time.perf_counter() - started)
        os.sync()  # what one leaves is not written during the next
    named, durable = (statistics.median(seconds[key]) for key in (False, True))
    print(
        f"a file of {FLUSHED_BYTES / 1e6:.0f} MB in {folder.parent}: written and named in "
        f"{named:.2f} s, flushed before its name in {durable:.2f} s, {durable / named:.1f}×, in "
        f"the checkpoint's thread ({FLUSHED_BYTES / durable / 1e6:.0f} MB/s)"
    )


def print_pauses(seconds: dict[str, list[float]]) -> None:
    print(f"{'training pauses for':<28}{'s':>8}{'min':>8}{'max':>8}")
    for name, values in seconds.items():
        median = statistics.median(values)
        print(f"{name:<28}{median:>8.3f}{min(values):>8.3f}{max(values):>8.3f}")
    ours, accelerate, copy = (statistics.median(values) for values in seconds.values())
    print(f"accelerator.save_state / sm-train: {accelerate / ours:.1f}×")
    print(f"sm-train / one copy in memory: {ours / copy:.2f}×")


if __name__ == "__main__":
    main()
