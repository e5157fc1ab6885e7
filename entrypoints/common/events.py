"""The lines a job speaks: ``SMT {json}``, one event each, on standard output.

CloudWatch's metric definitions, the laptop's progress bar, the cost estimate and the review all
read these lines, so their shape is a contract: :data:`FIELDS` names every kind and the fields it
always carries. Times are Unix seconds, durations are ``*_seconds``, unknown is ``null``.
"""

from __future__ import annotations

import contextlib
import json
import math
import sys
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

PREFIX = "SMT "

_KEPT = 100
"""Events that are kept for who looks into a stall."""

FIELDS: dict[str, frozenset[str]] = {
    # The run as it really is, said once before the first step.
    "start": frozenset(
        "run stage resolution world_size nodes per_device_batch_size gradient_accumulation_steps "
        "effective_batch_size max_steps parameters backend backend_reason precision "
        "resumed_from_step".split()
    ),
    # One logging interval: means since the line before.
    "step": frozenset(
        "step epoch loss learning_rate gradient_norm steps_per_second images_per_second "
        "data_wait_share mfu".split()
    ),
    # How an epoch comes out: samples read, repeated to make processes equal, seen by no instance.
    "epoch": frozenset({"epoch", "samples", "batches", "repeated", "unseen"}),
    # Said for each machine by a process apart from training; of its most silent process.
    "heartbeat": frozenset({"step", "seconds_since_step"}),
    # What a machine's network, disks and GPUs did, and each of its processes, since the last.
    "node": frozenset(
        "network_receive_bytes_per_second network_send_bytes_per_second "
        "efa_receive_bytes_per_second efa_send_bytes_per_second efa_drops efa_retransmits "
        "disk_read_bytes_per_second disk_write_bytes_per_second read_bytes_per_second "
        "nvlink_bytes_per_second gpu_utilization_mean gpu_utilization_min gpu_memory_used_max "
        "gpu_temperature_max gpu_clock_min gpu_power_mean gpu_ecc_uncorrected "
        "straggler_ratio data_wait_share_max gpus ranks".split()
    ),
    "checkpoint": frozenset({"step", "path", "bytes", "seconds"}),
    # One evaluation, while training stood still; the held-out loss, if any.
    "eval": frozenset({"step", "seconds", "loss"}),
    # The verdict on the cluster before training; bytes a second, and times slower than expected.
    "doctor": frozenset(
        {"level", "sentence", "seconds", "network_bytes_per_second", "slowdown", "findings"}
    ),
    # Of code `stall` also: step, section, silent_seconds, limit_seconds, blamed_rank, blamed_node,
    # reason, evidence (folder below the checkpoints), files, ends (whether the job is ended); of
    # `stall-resolved` step and silent_seconds; of `rank-died` step and rank_died.
    "warning": frozenset({"code", "message"}),
    "error": frozenset({"code", "message"}),
    "end": frozenset({"step", "reason", "training_seconds", "images", "steps_per_second"}),
}
"""Kind → the fields beyond ``kind``, ``time``, ``node`` and ``rank`` that it always carries."""


def format_event(kind: str, fields: dict[str, Any], *, time: float, node: int, rank: int) -> str:
    """One event as one line, without the line end.

    Raises:
        ValueError: an unknown kind, or a field of the contract is missing.
    """
    missing = FIELDS[kind] - fields.keys() if kind in FIELDS else None
    if missing is None:
        raise ValueError(f"unknown event kind {kind!r}; known: {', '.join(FIELDS)}")
    if missing:
        raise ValueError(f"event {kind!r} lacks {', '.join(sorted(missing))}")
    event = {"kind": kind, "time": round(time, 3), "node": node, "rank": rank, **fields}
    return PREFIX + json.dumps({key: _plain(value) for key, value in event.items()})


def _plain(value: Any) -> Any:
    """JSON has no NaN and no infinity: both become ``null``."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


class EventStream(Protocol):
    """What events are written to."""

    def write(self, text: str, /) -> int: ...

    def flush(self) -> None: ...


class EventLog:
    """Writes this process's events, each with its readable twin."""

    def __init__(
        self,
        *,
        node: int,
        rank: int,
        stream: EventStream | None = None,
        clock: Callable[[], float] = time.time,
        keep: Path | None = None,
    ) -> None:
        """The last events are also kept in the file ``keep``."""
        self._node, self._rank = node, rank
        self._kept = deque[str](maxlen=_KEPT)
        self._keep = keep
        self._stream: EventStream = stream or sys.stdout
        self._clock = clock

    def write(self, kind: str, readable: str, **fields: Any) -> None:
        """Print ``readable`` and the event, in one write so that ranks do not interleave."""
        line = format_event(kind, fields, time=self._clock(), node=self._node, rank=self._rank)
        self._stream.write(f"{readable}\n{line}\n")
        self._stream.flush()
        if self._keep is not None:
            self._kept.append(f"{line}\n")
            with contextlib.suppress(OSError):
                self._keep.write_text("".join(self._kept))

    def warn(self, code: str, message: str, **fields: Any) -> None:
        """Write a ``warning`` event."""
        self.write("warning", f"warning: {message}", code=code, message=message, **fields)
