"""Event lines of a job on standard output: ``SMT {json}``, one event per line.

CloudWatch's metric definitions, the laptop's progress bar, the cost estimate and the review all
parse these lines, so their shape is a contract: :data:`FIELDS` lists every kind and its required
fields. Times are Unix seconds, durations are ``*_seconds``, unknown values are ``null``.
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

_RECENT_EVENTS = 100
"""Number of recent events kept on disk for stall reports."""

FIELDS: dict[str, frozenset[str]] = {
    # The run's actual configuration, logged once before the first step.
    "start": frozenset(
        "run stage resolution world_size nodes per_device_batch_size gradient_accumulation_steps "
        "effective_batch_size max_steps parameters backend backend_reason precision "
        "resumed_from_step".split()
    ),
    # One logging interval: averages since the previous "step" event. The built-in training and the
    # observer of scripts add timed_steps, timed_seconds and waited_seconds: the sums since the
    # start by which a job's speed is known from one event (monitoring/heartbeat.py).
    "step": frozenset(
        "step epoch loss learning_rate gradient_norm steps_per_second images_per_second "
        "data_wait_share mfu".split()
    ),
    # Size of an epoch: samples read, repeated to give all processes equally many batches, and not
    # visible to any instance.
    "epoch": frozenset({"epoch", "samples", "batches", "repeated", "unseen"}),
    # Logged for each node by its watchdog process, about the rank with the oldest heartbeat. If its
    # checkpoints are copied to storage: `saves`, the newest with their age ([[step, seconds]]), and
    # `unstored_seconds`, for how long its notes show storage behind them (null: it is not).
    "heartbeat": frozenset({"step", "seconds_since_step"}),
    # Activity of a node's network, disks, GPUs and ranks since the previous "node" event. Each of
    # `ranks` holds rank, steps, p50 … max (seconds of a whole step, equal on all ranks: they wait
    # for each other), data_wait_share and, if known, busy_seconds and cpu_wait_seconds: the mean
    # per step outside collectives, and the part of it in which other programs used the CPU. The
    # first node compares the ranks of all nodes over the last two minutes: `straggler_ratio` is
    # the largest ratio of a rank's busy time (without cpu_wait_seconds) to the other ranks' median,
    # `stragglers` a list of rank (null for a whole node), node, busy_seconds and ratio, empty if
    # there is none, and `arrival_skew` a list of node and seconds by which its last rank arrives
    # at a step's collective after the earliest node's last rank. On the other nodes, and while too
    # little is known, `straggler_ratio` and `stragglers` are null.
    "node": frozenset(
        "network_receive_bytes_per_second network_send_bytes_per_second "
        "efa_receive_bytes_per_second efa_send_bytes_per_second efa_drops efa_retransmits "
        "disk_read_bytes_per_second disk_write_bytes_per_second read_bytes_per_second "
        "nvlink_bytes_per_second gpu_utilization_mean gpu_utilization_min gpu_memory_used_max "
        "gpu_temperature_max gpu_clock_min gpu_power_mean gpu_ecc_uncorrected "
        "straggler_ratio data_wait_share_max gpus ranks".split()
    ),
    "checkpoint": frozenset({"step", "path", "bytes", "seconds"}),
    # One evaluation, during which training pauses; validation loss, if there is a set.
    "eval": frozenset({"step", "seconds", "loss"}),
    # The doctor's verdict on the cluster before training; slowdown is a factor.
    "doctor": frozenset(
        {"level", "sentence", "seconds", "network_bytes_per_second", "slowdown", "findings"}
    ),
    # Code `stall` adds: step, phase, silent_seconds, limit_seconds, blamed_rank, blamed_node,
    # reason, evidence (folder below the checkpoints), files, ends (whether the job is killed);
    # `stall-resolved` adds step and silent_seconds; `rank-died` adds step, rank_died and death
    # (killed, died, aborted or terminated: monitoring/failures.py; the launcher terminates the
    # other ranks after the first one); `node-lost` adds blamed_node; `straggler` adds step,
    # straggler_rank, straggler_node and ratio; `heartbeat-invalid` adds unread_rank.
    "warning": frozenset({"code", "message"}),
    "error": frozenset({"code", "message"}),
    "end": frozenset({"step", "reason", "training_seconds", "images", "steps_per_second"}),
}
"""Kind → its required fields beyond ``kind``, ``time``, ``node`` and ``rank``."""

TEXTS = frozenset(
    "run stage backend backend_reason precision path reason code message level sentence".split()
)
"""Fields that are text. ``findings``, ``gpus`` and ``ranks`` are lists, all others numbers.

Text and numbers may be null. Commands skip events with other values (toolkit/records/job_logs.py).
"""


def format_event(kind: str, fields: dict[str, Any], *, time: float, node: int, rank: int) -> str:
    """Return an event as one line, without the line end.

    Raises:
        ValueError: the kind is unknown, or a required field is missing.
    """
    missing = FIELDS[kind] - fields.keys() if kind in FIELDS else None
    if missing is None:
        raise ValueError(f"unknown event kind {kind!r}; known: {', '.join(FIELDS)}")
    if missing:
        raise ValueError(f"event {kind!r} lacks {', '.join(sorted(missing))}")
    event = {"kind": kind, "time": round(time, 3), "node": node, "rank": rank, **fields}
    return PREFIX + json.dumps({key: _to_json(value) for key, value in event.items()})


def _to_json(value: Any) -> Any:
    """Replace NaN and infinity, which JSON does not have, by None."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


class EventStream(Protocol):
    """The part of a text file that :class:`EventLog` writes to."""

    def write(self, text: str, /) -> int: ...

    def flush(self) -> None: ...


class EventLog:
    """Writes this process's events, each next to a readable line."""

    def __init__(
        self,
        *,
        node: int,
        rank: int,
        stream: EventStream | None = None,
        clock: Callable[[], float] = time.time,
        recent_events_file: Path | None = None,
        subscriber: Callable[[str, str], None] | None = None,
    ) -> None:
        """Keep the most recent events in ``recent_events_file``, too, if it is set.

        ``subscriber`` gets the kind and the line of each event; it must not block or raise.
        """
        self._node, self._rank = node, rank
        self._recent = deque[str](maxlen=_RECENT_EVENTS)
        self._recent_events_file = recent_events_file
        self._stream: EventStream = stream or sys.stdout
        self._clock = clock
        self._subscriber = subscriber

    def write(self, kind: str, readable: str, **fields: Any) -> None:
        """Print ``readable`` and the event in one write, so that ranks do not interleave."""
        line = format_event(kind, fields, time=self._clock(), node=self._node, rank=self._rank)
        self._stream.write(f"{readable}\n{line}\n")
        self._stream.flush()
        if self._subscriber is not None:
            self._subscriber(kind, line)
        if self._recent_events_file is not None:
            self._recent.append(f"{line}\n")
            # A full disk must not end the training.
            with contextlib.suppress(OSError):
                self._recent_events_file.write_text("".join(self._recent))

    def warn(self, code: str, message: str, **fields: Any) -> None:
        """Write a ``warning`` event."""
        self.write("warning", f"warning: {message}", code=code, message=message, **fields)

    def warn_of_bad_samples(self, message: str, reasons: dict[str, int], samples: int) -> None:
        """Write a warning about skipped samples; ``reasons`` count them, ``samples`` is of all."""
        self.warn("bad-sample", message, reasons=reasons, samples=samples)
