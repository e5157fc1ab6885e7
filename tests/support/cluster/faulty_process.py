"""A training process without a model: it beats, and then does what hangs real ones.

Started as ``watched.py DOCUMENT FAULT``; it speaks on standard output.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import sys
import time
from pathlib import Path

from sm_train.entrypoints.common.parent_death import exit_with_parent
from sm_train.entrypoints.monitoring.heartbeat import HeartbeatWriter, Phase
from sm_train.entrypoints.monitoring.start import heartbeat

HEALTHY = 70
"""Steps before the fault: limits are learned by then."""


def read_for_ever(path: str) -> None:
    """A loader worker on a file system that does not answer."""
    exit_with_parent()
    with open(path, "rb") as file:  # noqa: PTH123
        file.read()


def train(pulse: HeartbeatWriter, steps: range) -> None:
    for step in steps:
        pulse.enter(Phase.DATA, step)
        time.sleep(0.001)
        pulse.enter(Phase.STEP, step)
        time.sleep(0.01)


def fail(fault: str, pulse: HeartbeatWriter) -> None:
    if fault == "gil":
        # A call through PyDLL keeps the GIL: no other Python thread of this process runs.
        ctypes.PyDLL(None).sleep(1000)
    if fault == "read":
        pulse.enter(Phase.DATA, HEALTHY)
        worker = multiprocessing.get_context("spawn").Process(
            target=read_for_ever, args=(os.environ["READ"],), daemon=True
        )
        worker.start()
        worker.join()
    if fault == "raise":
        raise RuntimeError("the loss went through the roof")
    train(pulse, range(HEALTHY, 10**9))


def reduce_for_ever(pulse: HeartbeatWriter) -> None:
    """Steps that end with a sum over all processes, as in training."""
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    for step in range(10**9):
        pulse.enter(Phase.DATA, step)
        time.sleep(0.01)
        pulse.enter(Phase.STEP, step)
        dist.all_reduce(torch.zeros(1))


def main(document: str, fault: str) -> None:
    with heartbeat(Path(document), "8px") as pulse:
        if fault == "reduce":
            reduce_for_ever(pulse)
        train(pulse, range(HEALTHY))
        print("healthy", flush=True)
        if fault != "none":
            fail(fault, pulse)


if __name__ == "__main__":
    main(*sys.argv[1:])
