"""Between two log events, no training step makes the CPU wait for the GPU.

The product's loop runs on a fake CUDA device (:mod:`tests.support.fake_gpu`): with CUDA's autocast,
fused AdamW, EMA, clipping, metrics and a checkpoint, on fake tensors. A shape that depends on a
tensor's content ends the program.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from tests.support.deadline import DEADLINE
from tests.support.fake_gpu import FakeGpuResult, FakeReport, FakeRun, run_on_fake_gpu

pytestmark = pytest.mark.integration

STEPS, LOG_EVERY = 2, 2
SMALL = {
    "a trained text encoder": FakeRun("digits", 28, 2, steps=STEPS),
    "a U-Net": FakeRun("tiny-sd2", 64, 2, 2, steps=STEPS),
    "activation checkpointing": FakeRun(
        "tiny-mmdit", 64, 2, 2, steps=STEPS, activation_checkpointing=True
    ),
    "precomputed latents": FakeRun("tiny-mmdit", 64, 2, steps=STEPS, latents=True),
    "text encoders on the CPU": FakeRun("tiny-mmdit", 64, 2, 2, STEPS, text_encoders="cpu"),
    "sharded text encoders": FakeRun(
        "tiny-mmdit", 64, 2, 2, STEPS, world_size=128, text_encoders="sharded"
    ),
    "DDP": FakeRun("tiny-mmdit", 64, 2, 2, steps=STEPS, world_size=128),
    "FSDP2": FakeRun("tiny-mmdit", 64, 2, 2, STEPS, "full_shard", world_size=128),
    "FSDP2 of an adapter": FakeRun(
        "tiny-mmdit", 64, 2, 2, STEPS, "full_shard", world_size=128, lora_rank=4
    ),
}
MORE = {
    "size conditioning": FakeRun("tiny-sdxl", 64, 2, steps=STEPS),
    "PixArt": FakeRun("tiny-dit", 64, 2, steps=STEPS),
    "an adapter": FakeRun("tiny-sdxl", 64, 2, 2, steps=STEPS, lora_rank=4),
    "sd2": FakeRun("sd2", 512, 16),
    "sdxl": FakeRun("sdxl", 1024, 4, activation_checkpointing=True),
    "dit-xl": FakeRun("dit-xl", 512, 16),
    "mmdit-2b": FakeRun("mmdit-2b", 512, 8, latents=True),
    "mmdit-8b": FakeRun("mmdit-8b", 512, 4, 2, sharding="full_shard", world_size=128),
    "mmdit-20b": FakeRun("mmdit-20b", 1024, 1, 2, sharding="hybrid_shard", world_size=128),
}


@pytest.fixture(scope="module")
def small_runs() -> FakeGpuResult:
    return run_on_fake_gpu([*SMALL.values()], timeout=4 * DEADLINE)


def report(result: FakeGpuResult, name: str) -> FakeReport:
    return result.reports[[*SMALL].index(name)]


def waits(report: FakeReport) -> set[str]:
    """Return the product's functions that made the CPU wait."""
    return {sync.function for sync in report.syncs}


def reads(report: FakeReport, function: str) -> int:
    """Return how many scalars ``function`` read from the GPU."""
    found = [sync.count for sync in report.syncs if sync.function == function]
    return sum(found)


ALLOWED = {
    # Means of a log interval (`log_every`), read when it ends.
    "log_steps",
    "sums",
    # Whether any rank received a stop, every five seconds.
    "_exchange_status",
    # The checkpoint's thread waits for its copies; training continues.
    "tensors",
}


@pytest.mark.slow
def test_recorder_reports_what_blocks(small_runs: FakeGpuResult) -> None:
    """Without this the tests below would pass if the recorder saw nothing."""
    assert small_runs.probes == {
        "item": "scalar read",
        "bool": "scalar read",
        "tolist": "scalar read",
        "equal": "comparison",
        "cpu": "copy to the host",
        "to the host, pageable": "copy to the host",
        "to the host, pinned": "asynchronous",
        "tensor": "blocking copy",
        "new_tensor": "blocking copy",
        "full": "asynchronous",
        "from pageable": "copy from pageable memory",
        "from pinned": "asynchronous",
        "from pinned, blocking": "blocking copy",
        "from pin_memory": "asynchronous",
        "pin_memory of the GPU's": "RuntimeError",
        "pin_memory of an expanded": "RuntimeError",
        "synchronize": "torch.cuda.synchronize",
        "event": "Event.synchronize",
        "nonzero": "DynamicOutputShapeException",
        "mask": "DynamicOutputShapeException",
    }


@pytest.mark.parametrize("name", SMALL)
def test_steps_of_small_models_do_not_wait(small_runs: FakeGpuResult, name: str) -> None:
    assert waits(report(small_runs, name)) <= ALLOWED


def test_metrics_are_read_once_per_log_interval(small_runs: FakeGpuResult) -> None:
    """Seven numbers are read at once.

    The means of loss, norm, seconds, wait for data and skipped steps, and the numbers of skipped
    steps in succession and among the latest 1,000.
    """
    for name in SMALL:
        assert reads(report(small_runs, name), "log_steps") == 7 * STEPS // LOG_EVERY


@pytest.mark.slow
@pytest.mark.parametrize("name", MORE)
def test_steps_of_other_and_of_large_models_do_not_wait(name: str) -> None:
    [full_size] = run_on_fake_gpu([MORE[name]], timeout=4 * DEADLINE).reports
    assert waits(full_size) <= ALLOWED


def sent(report: FakeReport, names: Sequence[str]) -> dict[str, int]:
    """Return the bytes of a run's collectives by name."""
    return {
        name: sum(
            collective.bytes * collective.count
            for collective in report.collectives
            if collective.name == name
        )
        for name in names
    }


def test_ddp_sends_nothing_but_gradients(small_runs: FakeGpuResult) -> None:
    """Buffers, such as position embeddings, are not broadcast."""
    ddp = report(small_runs, "DDP")
    assert {collective.name for collective in ddp.collectives} == {"allreduce"}
    assert sent(ddp, ["broadcast"]) == {"broadcast": 0}
