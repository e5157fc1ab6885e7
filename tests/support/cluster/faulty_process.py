"""A training process without a model: it sends heartbeats, then fails as real ones do.

Run as ``python -m tests.support.cluster.faulty_process DOCUMENT FAULT``.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import sys
import time
from pathlib import Path

from sm_train.entrypoints.base.signals import exit_with_parent
from sm_train.entrypoints.monitoring.heartbeat import HeartbeatWriter, Phase, heartbeat_folder
from sm_train.entrypoints.monitoring.start_monitoring import heartbeat, watchdog

HEALTHY = 70
"""Steps before the fault: enough to learn timeouts."""


def read_forever(path: str) -> None:
    """Read like a loader worker on a file system that does not respond."""
    exit_with_parent()
    with open(path, "rb") as file:  # noqa: PTH123
        file.read()


def train(writer: HeartbeatWriter, steps: range) -> None:
    for step in steps:
        writer.enter(Phase.DATA, step)
        time.sleep(0.001)
        writer.enter(Phase.STEP, step)
        time.sleep(0.01)


def fail(fault: str, writer: HeartbeatWriter) -> None:
    if fault == "gil":
        # A call through PyDLL keeps the GIL: no other Python thread of this process runs.
        ctypes.PyDLL(None).sleep(1000)
    if fault == "read":
        writer.enter(Phase.DATA, HEALTHY)
        worker = multiprocessing.get_context("spawn").Process(
            target=read_forever, args=(os.environ["READ"],), daemon=True
        )
        worker.start()
        worker.join()
    if fault == "raise":
        raise RuntimeError("the loss went through the roof")
    train(writer, range(HEALTHY, 10**9))


def reduce_forever(writer: HeartbeatWriter) -> None:
    """Run steps that end with an all-reduce, as in training."""
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    for step in range(10**9):
        writer.enter(Phase.DATA, step)
        time.sleep(0.01)
        writer.enter(Phase.STEP, step)
        dist.all_reduce(torch.zeros(1))


def main(document: str, fault: str) -> None:
    with watchdog(Path(document), "8px"), heartbeat() as writer:
        if fault == "reduce":
            reduce_forever(writer)
        train(writer, range(HEALTHY))
        print(f"healthy, {heartbeat_folder()}", flush=True)
        if fault != "none":
            fail(fault, writer)


if __name__ == "__main__":
    main(*sys.argv[1:])
