"""Signs of life in shared memory: what every process of a machine is at, for its monitor to read.

A beat is a few integers in mapped memory: no lock, no system call, and no thread that would need
the GIL. The memory outlives the process, so what a dead one was at can still be read.
"""

from __future__ import annotations

import math
import mmap
import os
import re
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from struct import Struct

from sm_train.entrypoints.common.procfs import state


class Phase(IntEnum):
    """What a process is at. All processes of a job pass through the same sections in one order."""

    START = 0
    FIRST_STEP = 1
    DATA = 2
    STEP = 3
    CHECKPOINT = 4
    EVALUATION = 5
    SAMPLES = 6
    FINISH = 7

    @property
    def words(self) -> str:
        return self.name.lower().replace("_", " ")


class ExitState(IntEnum):
    """How a process said goodbye, if it did."""

    RUNS = 0
    DONE = 1
    FAILED = 2


IGNORED = {
    Phase.DATA: 5,
    Phase.STEP: 5,
    Phase.CHECKPOINT: 1,
    Phase.EVALUATION: 1,
    Phase.SAMPLES: 1,
}
"""So many first durations of a section say nothing of the later ones (caches, connections).

nvidia-resiliency-ext's training-iteration detection leaves out as many iterations (2025).
"""

_FIRST_STEP, _STEP_SECTION = int(Phase.FIRST_STEP), int(Phase.STEP)
_WHOLE_STEP = len(Phase)
_ROWS = len(Phase) + 1

_FINEST, _OCTAVES, _PARTS = 20, 33, 16
BUCKETS = _OCTAVES * _PARTS
"""Of a histogram: 16 for each doubling, from 2^20 ns (1 ms) to 2^53 ns (104 days)."""

_BEGUN, _SECTION, _STEP, _SINCE, _DONE = range(5)
_SIGN = Struct("=5q")
_PID, _RANK, _LOCAL_RANK, _ENDING = range(5, 9)
_TOTALS = 9
_COUNTS = _TOTALS + _ROWS
_SLOTS = _COUNTS + _ROWS * BUCKETS


def bucket(nanoseconds: int) -> int:
    """The histogram's bucket of a duration."""
    bits = nanoseconds.bit_length()
    if bits <= _FINEST:
        return 0
    index = (bits - _FINEST - 1) * _PARTS + (nanoseconds >> (bits - 5))
    return index if index < BUCKETS else BUCKETS - 1


def upper_edge(index: int) -> float:
    """Seconds that no duration in bucket ``index`` exceeds."""
    octave, part = divmod(index, _PARTS)
    if not octave:
        return float(2**_FINEST) / 1e9
    edge: float = math.ldexp(_PARTS + part + 1, octave + _FINEST - 5)
    return edge / 1e9


@dataclass(frozen=True)
class DurationHistogram:
    """A histogram of seconds: how often each bucket was met."""

    counts: tuple[int, ...]

    @classmethod
    def of(cls, seconds: Iterable[float]) -> DurationHistogram:
        counts = [0] * BUCKETS
        for each in seconds:
            counts[bucket(round(each * 1e9))] += 1
        return cls(tuple(counts))

    def __len__(self) -> int:
        return sum(self.counts)

    def __add__(self, other: DurationHistogram) -> DurationHistogram:
        return DurationHistogram(tuple(map(sum, zip(self.counts, other.counts, strict=True))))

    def __sub__(self, earlier: DurationHistogram) -> DurationHistogram:
        """What has come since ``earlier``."""
        pairs = zip(self.counts, earlier.counts, strict=True)
        return DurationHistogram(tuple(now - before for now, before in pairs))

    def quantile(self, share: float) -> float | None:
        """Seconds that ``share`` of the durations do not exceed; None where there are none."""
        wanted = max(1, math.ceil(share * len(self)))
        seen = 0
        for index, count in enumerate(self.counts):
            seen += count
            if seen >= wanted:
                return upper_edge(index)
        return None

    @property
    def longest(self) -> float | None:
        return self.quantile(1.0)


NOTHING = DurationHistogram((0,) * BUCKETS)


@dataclass(frozen=True)
class HeartbeatSample:
    """What one process was at when it was looked at.

    ``marks`` counts the sections that it has entered, ``since`` is when it entered this one
    (seconds of the machine's monotonic clock).
    """

    rank: int
    local_rank: int
    pid: int
    section: Phase
    step: int
    marks: int
    since: float
    ending: ExitState


class HeartbeatWriter:
    """This process's own memory; written by one thread."""

    def __init__(
        self,
        path: Path,
        *,
        rank: int,
        local_rank: int,
        clock: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self._clock = clock
        path.parent.mkdir(mode=0o700, exist_ok=True)
        # A file of its own: the memory of an attempt before this one may still be read.
        fresh = path.with_suffix(f".{os.getpid()}")
        with fresh.open("wb") as file:
            # All of it now: where memory has run out, a write to a hole would kill the process.
            os.posix_fallocate(file.fileno(), 0, _SLOTS * 8)
        with fresh.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), _SLOTS * 8)
        self._view = memoryview(self._map).cast("q")
        self._section, self._step, self._marks = int(Phase.START), 0, 0
        self._since = self._step_since = clock()
        self._ignored = [IGNORED.get(section, 0) for section in Phase]
        self._totals = [0] * len(Phase)
        self._first = True
        view = self._view
        view[_PID], view[_RANK], view[_LOCAL_RANK] = os.getpid(), rank, local_rank
        view[_SINCE] = self._since
        fresh.replace(path)

    def enter(self, section: Phase, step: int) -> None:
        """Begin ``section`` (anew) after ``step`` optimizer steps."""
        now = self._clock()
        view, was, spent = self._view, self._section, now - self._since
        # A member of an enumeration is several times as slow to count with.
        entered = _FIRST_STEP if section == _STEP_SECTION and self._first else section + 0
        self._marks = marks = self._marks + 1
        # In this order: a reader trusts what it finds between two equal numbers.
        _SIGN.pack_into(self._map, 0, marks, entered, step, now, marks)
        self._section, self._since = entered, now
        self._totals[was] += spent
        view[_TOTALS + was] = self._totals[was]
        if self._ignored[was]:
            self._ignored[was] -= 1
        else:
            view[_COUNTS + was * BUCKETS + bucket(spent)] += 1
        if step != self._step:
            self._end_step(step, now)

    def _end_step(self, step: int, now: int) -> None:
        if not self._first:
            self._view[_COUNTS + _WHOLE_STEP * BUCKETS + bucket(now - self._step_since)] += 1
        self._first = False
        self._step, self._step_since = step, now

    def end(self, ending: ExitState) -> None:
        """Say goodbye."""
        self._view[_ENDING] = ending


class HeartbeatReader:
    """Another process's memory."""

    def __init__(self, path: Path) -> None:
        with path.open("rb") as file:
            self._map = mmap.mmap(file.fileno(), _SLOTS * 8, access=mmap.ACCESS_READ)
        self._view = memoryview(self._map).cast("q")

    def sign(self) -> HeartbeatSample:
        """What the process is at now."""
        view = self._view
        # A process that was stopped in the middle of a beat leaves it unfinished for good.
        for _ in range(100):
            done = view[_DONE]
            section, step, since = view[_SECTION], view[_STEP], view[_SINCE]
            if view[_BEGUN] == done:
                break
        return HeartbeatSample(
            rank=view[_RANK],
            local_rank=view[_LOCAL_RANK],
            pid=view[_PID],
            section=Phase(section),
            step=step,
            marks=done,
            since=since / 1e9,
            ending=ExitState(view[_ENDING]),
        )

    def durations(self, section: Phase) -> DurationHistogram:
        """What the section took each time, without the first ones."""
        return self._row(section)

    def steps(self) -> DurationHistogram:
        """What whole optimizer steps took, without the first."""
        return self._row(_WHOLE_STEP)

    def total(self, section: Phase) -> float:
        """Seconds spent in a section so far, the present stay left out."""
        return float(self._view[_TOTALS + section]) / 1e9

    def time(self) -> float:
        """Seconds spent in all sections so far, the present stay left out."""
        return sum(self.total(section) for section in Phase)

    def _row(self, row: int) -> DurationHistogram:
        first = _COUNTS + row * BUCKETS
        return DurationHistogram(tuple(self._view[first : first + BUCKETS]))


def heartbeat_folder() -> Path:
    """Where the processes that one launcher has started on this machine leave their signs.

    In memory where there is such a place: a page that is on its way to a disk would hold a beat up.
    """
    memory = Path("/dev/shm")
    base = memory if os.access(memory, os.W_OK) else Path(tempfile.gettempdir())
    environment = os.environ
    job = f"{environment.get('MASTER_PORT', '0')}-{environment.get('GROUP_RANK', '0')}"
    launcher = os.getppid()
    if (namespace := environment.get("PMIX_NAMESPACE")) is not None:
        # MPI starts each process through one of its own.
        job, launcher = re.sub(r"\W", "", namespace), 1
    return base / f"sm-train-{os.getuid()}-{launcher}-{job}"


def stale_dirs(folder: Path) -> list[Path]:
    """Folders like ``folder`` whose launcher is no more: it was killed with all it had started."""
    ours = re.compile(rf"sm-train-{os.getuid()}-(\d+)-\w+")
    found = ((path, ours.match(path.name)) for path in folder.parent.glob("sm-train-*"))
    return [path for path, match in found if match and state(int(match[1])) == "X"]


def heartbeat_file(folder: Path, local_rank: int) -> Path:
    return folder / f"pulse-{local_rank}"


def stacks_file(folder: Path, local_rank: int) -> Path:
    """Where a process writes its stacks when it is asked to (faulthandler)."""
    return folder / f"stacks-{local_rank}"


def events_file(folder: Path, local_rank: int) -> Path:
    """Where a process keeps its last events."""
    return folder / f"events-{local_rank}"


def readers(folder: Path) -> Iterator[HeartbeatReader]:
    """Of every process that has begun to beat."""
    for path in sorted(folder.glob("pulse-?")) + sorted(folder.glob("pulse-??")):
        try:
            yield HeartbeatReader(path)
        except (OSError, ValueError):
            continue
