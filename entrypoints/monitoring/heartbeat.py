"""Heartbeats in shared memory: the phase of every process of a node, for its watchdog to read.

A heartbeat is a few integers in mapped memory: no lock, no system call, and no thread that would
need the GIL. The memory outlives the process, so the last phase of a dead one can still be read.

The training clock measures the speed of a job, one definition for every log, screen and estimate.
Speed = optimizer steps ÷ seconds, over the logging intervals since the process started. The first
interval is left out, because it includes compilation and the first batches; so are checkpoints and
evaluation, which an estimate prices by themselves. Stalls count. The share of time spent waiting
for data is that of the same seconds.
"""

from __future__ import annotations

import math
import mmap
import os
import re
import stat
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from enum import IntEnum
from functools import cache
from pathlib import Path
from struct import Struct
from typing import IO
from zlib import crc32

from sm_train.entrypoints.monitoring.procfs import state


class Phase(IntEnum):
    """What a process is doing. All ranks of a job go through the same phases in one order."""

    START = 0
    FIRST_STEP = 1
    DATA = 2
    STEP = 3
    CHECKPOINT = 4
    EVALUATION = 5
    SAMPLES = 6
    FINISH = 7
    SCRIPT = 8
    """A script of the user's own, between its steps: nothing is known of what it does there."""

    @property
    def label(self) -> str:
        """The phase's name in messages."""
        return self.name.lower().replace("_", " ")


class ExitState(IntEnum):
    """How a process ended; RUNNING if it has not reported an end."""

    RUNNING = 0
    DONE = 1
    FAILED = 2


WARM_UP = {
    Phase.DATA: 5,
    Phase.STEP: 5,
    Phase.CHECKPOINT: 1,
    Phase.EVALUATION: 1,
    Phase.SAMPLES: 1,
}
"""First durations of a phase that are left out: caches and connections make them untypical.

nvidia-resiliency-ext's training-iteration detection leaves out as many iterations (2025).
"""

# The memory is one array of int64 (_TOTAL_WORDS,), in native byte order. One thread of the
# watched process writes all of it. Readers are other processes, which see each aligned word as it
# was before or after a store. They may see stores to different words in any order: Arm does not
# keep it.
#   0..5   record of the present phase: sequence number, phase, optimizer step, start of the phase
#          (monotonic ns), checksum, sequence number. A reader sees one complete record or none.
#   6..8   pid, rank, local rank: written once, before the file has its name
#   9      exit state: one word, written once more at the end
#   10     start of a compilation, monotonic ns; 0 if nothing is being compiled: one word
#   11..15 record of busy times: steps with a known one, nanoseconds of busy time, and of waits for
#          a CPU in it, checksum, steps. A reader sees one complete record or none.
#   16     checkpoints that could not be written since the newest complete one: one word
#   17..   nanoseconds spent in each row (_ROWS,): each word is right when it is read, and may lack
#          the latest phase
#   then   duration histograms (_ROWS, BUCKETS): the same
# A row is a phase; one more row holds whole optimizer steps.
_BEAT_FIELDS, _BUSY_FIELDS = 3, 2
_BEAT, _PID, _RANK, _LOCAL_RANK, _EXIT_STATE, _COMPILING, _BUSY = 0, 6, 7, 8, 9, 10, 11
_FAILED_SAVES, _TOTALS = 16, 17
_ROWS = len(Phase) + 1
_WHOLE_STEP_ROW = len(Phase)
_WORD_BYTES = 8
_READ_ATTEMPTS = 100
"""A reader that meets a write tries again at once; the writer may be descheduled in the middle."""

# Histogram buckets are logarithmic with a linear subdivision, as in HdrHistogram: each doubling
# (octave) of the duration is split into 16 equal parts, so a bucket is at most 1/16 wide. The
# octave is the position of the highest bit, the part are the four bits after it: integers only,
# because a heartbeat must cost less than a microsecond. Durations up to 2^20 ns share bucket 0.
_FINEST_BITS, _OCTAVES, _PARTS = 20, 33, 16
BUCKETS = _OCTAVES * _PARTS
"""Buckets of a histogram, from 2^20 ns (1 ms) to 2^53 ns (104 days)."""

_HISTOGRAMS = _TOTALS + _ROWS
_TOTAL_WORDS = _HISTOGRAMS + _ROWS * BUCKETS

# IntEnum members are several times as slow to compare and index with as plain integers.
_FIRST_STEP_PHASE, _STEP_PHASE = int(Phase.FIRST_STEP), int(Phase.STEP)


def bucket_index(nanoseconds: int) -> int:
    """Return the histogram bucket of a duration."""
    bits = nanoseconds.bit_length()
    if bits <= _FINEST_BITS:
        return 0
    # nanoseconds >> (bits - 5) are the highest five bits: 16 plus the part. So this index begins at
    # 16 for the first octave above the finest; bucket 0 stands for the octave below.
    index = (bits - _FINEST_BITS - 1) * _PARTS + (nanoseconds >> (bits - 5))
    return index if index < BUCKETS else BUCKETS - 1


def bucket_upper_edge(index: int) -> float:
    """Return the seconds that no duration in bucket ``index`` exceeds."""
    octave, part = divmod(index, _PARTS)
    if not octave:
        return float(2**_FINEST_BITS) / 1e9
    edge: float = math.ldexp(_PARTS + part + 1, octave + _FINEST_BITS - 5)
    return edge / 1e9


@dataclass(frozen=True)
class DurationHistogram:
    """A histogram of durations: ``counts`` per bucket (BUCKETS,)."""

    counts: tuple[int, ...]

    @classmethod
    def of(cls, seconds: Iterable[float]) -> DurationHistogram:
        """Return the histogram of durations in seconds."""
        counts = [0] * BUCKETS
        for duration in seconds:
            counts[bucket_index(round(duration * 1e9))] += 1
        return cls(tuple(counts))

    def __len__(self) -> int:
        return sum(self.counts)

    def __add__(self, other: DurationHistogram) -> DurationHistogram:
        return DurationHistogram(tuple(map(sum, zip(self.counts, other.counts, strict=True))))

    def __sub__(self, earlier: DurationHistogram) -> DurationHistogram:
        """Return what was added since ``earlier``."""
        pairs = zip(self.counts, earlier.counts, strict=True)
        return DurationHistogram(tuple(now - before for now, before in pairs))

    def quantile(self, share: float) -> float | None:
        """Return the seconds that ``share`` of the durations do not exceed; None if empty."""
        rank = max(1, math.ceil(share * len(self)))
        cumulative = 0
        for index, count in enumerate(self.counts):
            cumulative += count
            if cumulative >= rank:
                return bucket_upper_edge(index)
        return None

    def longest_values(self, count: int, step: int = 1) -> list[float]:
        """Return the longest duration and every ``step``-th one below it, at most ``count``."""
        values: list[float] = []
        cumulative = 0
        for index in range(BUCKETS - 1, -1, -1):
            cumulative += self.counts[index]
            while len(values) * step < cumulative and len(values) < count:
                values.append(bucket_upper_edge(index))
        return values

    def up_to(self, seconds: float) -> DurationHistogram:
        """Return the durations without those that certainly exceed ``seconds``."""
        kept = bucket_index(round(seconds * 1e9)) + 1
        return DurationHistogram(self.counts[:kept] + (0,) * (BUCKETS - kept))

    @property
    def longest(self) -> float | None:
        """The longest duration in seconds; None if empty."""
        return self.quantile(1.0)


EMPTY_HISTOGRAM = DurationHistogram((0,) * BUCKETS)


class _Record:
    """Several integers in shared memory of which a reader sees all or none.

    The sequence number stands at both ends, and a checksum covers it and the fields. One copy
    writes the record: ``Struct.pack_into`` would set its target to zero first, where readers see it
    (CPython 3.11, Modules/_struct.c, s_pack_internal).
    """

    def __init__(self, memory: mmap.mmap, first_word: int, fields: int) -> None:
        self._memory = memory
        self._head, self._tail = Struct(f"={fields + 1}q"), Struct("=2q")
        first = first_word * _WORD_BYTES
        self._bytes = slice(first, first + self._head.size + self._tail.size)

    def write(self, sequence: int, *fields: int) -> None:
        """Replace the record."""
        head = self._head.pack(sequence, *fields)
        self._memory[self._bytes] = head + self._tail.pack(crc32(head), sequence)

    def read(self) -> tuple[int, ...] | None:
        """Return the sequence number and the fields; None if no valid record is found."""
        size = self._head.size
        for _ in range(_READ_ATTEMPTS):
            content = self._memory[self._bytes]
            head = content[:size]
            values = self._head.unpack(head)
            if self._tail.unpack(content[size:]) == (crc32(head), values[0]):
                return values
        return None


@dataclass(frozen=True)
class WatchedProcess:
    """The process that writes heartbeats."""

    rank: int
    local_rank: int
    pid: int


@dataclass(frozen=True)
class HeartbeatSample:
    """The state of one process when it was read.

    ``sequence`` counts the phases that it has entered; ``since`` is when it entered this one
    (monotonic seconds). ``compiling`` is whether it compiles layers of the network.
    ``failed_saves`` are the checkpoints that could not be written since the newest complete one.
    """

    rank: int
    local_rank: int
    pid: int
    phase: Phase
    step: int
    sequence: int
    since: float
    exit_state: ExitState
    compiling: bool = False
    failed_saves: int = 0

    @property
    def activity(self) -> str:
        """What the process is doing, for messages."""
        return f"{self.phase.label} (compiling)" if self.compiling else self.phase.label


class HeartbeatWriter:
    """Writes this process's heartbeats; only one thread may use it."""

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
        # A new file, renamed when it is complete: the memory of an earlier attempt may still be
        # read, and a reader never sees a partial one.
        temporary = path.with_suffix(f".{os.getpid()}")
        with temporary.open("wb") as file:
            _allocate(file, _TOTAL_WORDS * _WORD_BYTES)
        with temporary.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), _TOTAL_WORDS * _WORD_BYTES)
        self._words = memoryview(self._map).cast("q")
        self._phase, self._step, self._sequence = int(Phase.START), 0, 0
        self._since = self._step_since = clock()
        self._warm_up = [WARM_UP.get(phase, 0) for phase in Phase]
        self._totals = [0] * len(Phase)
        self._compiled = 0  # nanoseconds in this phase
        self._is_first_step = True
        words = self._words
        words[_PID], words[_RANK], words[_LOCAL_RANK] = os.getpid(), rank, local_rank
        self._beat = _Record(self._map, _BEAT, _BEAT_FIELDS)
        self._beat.write(0, self._phase, 0, self._since)
        self._busy = _Record(self._map, _BUSY, _BUSY_FIELDS)
        self._busy_totals = (0, 0, 0)
        self._busy.write(*self._busy_totals)
        temporary.replace(path)

    def enter(self, phase: Phase, step: int) -> None:
        """Enter ``phase`` (again) after ``step`` optimizer steps."""
        now = self._clock()
        words, previous, spent = self._words, self._phase, now - self._since
        entered = _FIRST_STEP_PHASE if phase == _STEP_PHASE and self._is_first_step else phase + 0
        self._sequence = sequence = self._sequence + 1
        self._beat.write(sequence, entered, step, now)
        self._phase, self._since = entered, now
        self._totals[previous] += spent
        words[_TOTALS + previous] = self._totals[previous]
        if self._compiled:
            spent, self._compiled = max(0, spent - self._compiled), 0
        if self._warm_up[previous]:
            self._warm_up[previous] -= 1
        else:
            words[_HISTOGRAMS + previous * BUCKETS + bucket_index(spent)] += 1
        if step != self._step:
            self._end_step(step, now)

    def _end_step(self, step: int, now: int) -> None:
        if not self._is_first_step:
            duration = now - self._step_since
            self._words[_HISTOGRAMS + _WHOLE_STEP_ROW * BUCKETS + bucket_index(duration)] += 1
        self._is_first_step = False
        self._step, self._step_since = step, now

    def add_busy(self, nanoseconds: int, cpu_wait: int) -> None:
        """Add the busy time of one optimizer step: what it spent outside collectives.

        ``cpu_wait`` is the part of it in which other programs used the CPU cores.
        """
        steps, busy, waits = self._busy_totals
        self._busy_totals = (steps + 1, busy + nanoseconds, waits + cpu_wait)
        self._busy.write(*self._busy_totals)

    def begin_compilation(self) -> None:
        """Report that layers are being compiled, which takes a step longer than any other.

        It is no phase: ranks compile at different times, but enter the same phases in one order.
        """
        self._words[_COMPILING] = self._clock()

    def end_compilation(self) -> None:
        """Report the end of a compilation, whose time is left out of the phase's durations."""
        self._compiled += self._clock() - self._words[_COMPILING]
        self._words[_COMPILING] = 0

    def report_failed_saves(self, count: int) -> None:
        """Report how many checkpoints could not be written since the newest complete one."""
        self._words[_FAILED_SAVES] = count

    def end(self, exit_state: ExitState) -> None:
        """Report how this process ends."""
        self._words[_EXIT_STATE] = exit_state


class HeartbeatReader:
    """Reads another process's heartbeats."""

    def __init__(self, path: Path) -> None:
        with path.open("rb") as file:
            self._map = mmap.mmap(
                file.fileno(), _TOTAL_WORDS * _WORD_BYTES, access=mmap.ACCESS_READ
            )
        self._words = words = memoryview(self._map).cast("q")
        self._beat = _Record(self._map, _BEAT, _BEAT_FIELDS)
        self._busy = _Record(self._map, _BUSY, _BUSY_FIELDS)
        self.process = WatchedProcess(words[_RANK], words[_LOCAL_RANK], words[_PID])

    @property
    def exit_state(self) -> ExitState:
        """How the process ended, if it has reported its end."""
        return ExitState(self._words[_EXIT_STATE])

    def sample(self) -> HeartbeatSample | None:
        """Read the process's present state; None if the memory holds no valid record."""
        record = self._beat.read()
        if record is None:
            return None
        sequence, phase, step, since = record
        process = self.process
        return HeartbeatSample(
            rank=process.rank,
            local_rank=process.local_rank,
            pid=process.pid,
            phase=Phase(phase),
            step=step,
            sequence=sequence,
            since=since / 1e9,
            exit_state=self.exit_state,
            compiling=bool(self._words[_COMPILING]),
            failed_saves=self._words[_FAILED_SAVES],
        )

    def durations(self, phase: Phase) -> DurationHistogram:
        """Return the durations of a phase, without its warm-up."""
        return self._histogram(phase)

    def step_durations(self) -> DurationHistogram:
        """Return the durations of whole optimizer steps, without the first."""
        return self._histogram(_WHOLE_STEP_ROW)

    def seconds_in(self, phase: Phase) -> float:
        """Return the seconds spent in a phase, without the present stay."""
        return float(self._words[_TOTALS + phase]) / 1e9

    def busy(self) -> tuple[int, float, float] | None:
        """Return the steps whose busy time is known, its seconds, and those without a CPU core.

        None if the memory holds no valid record of them.
        """
        record = self._busy.read()
        if record is None:
            return None
        steps, busy, waits = record
        return steps, busy / 1e9, waits / 1e9

    def total_seconds(self) -> float:
        """Return the seconds spent in all phases, without the present stay."""
        return sum(self.seconds_in(phase) for phase in Phase)

    def _histogram(self, row: int) -> DurationHistogram:
        first = _HISTOGRAMS + row * BUCKETS
        return DurationHistogram(tuple(self._words[first : first + BUCKETS]))


@cache
def heartbeat_folder() -> Path:
    """Return the folder of the heartbeats of the processes that one launcher started on this node.

    It is in memory if possible: writing to a page that is on its way to a disk would block.

    Each attempt has its own, because its watchdog deletes the folder, and may still be sending
    alerts when the same launcher starts the next attempt. The environment of the first call counts:
    Accelerate adds LOCAL_RANK to it under MPI.
    """
    memory = Path("/dev/shm")
    base = memory if os.access(memory, os.W_OK) else Path(tempfile.gettempdir())
    environment = os.environ
    job = f"{environment.get('MASTER_PORT', '0')}-{environment.get('GROUP_RANK', '0')}"
    # torchrun counts the restarts of its processes. A process without a launcher is alone.
    is_alone = "LOCAL_RANK" not in environment
    job += f"-{os.getpid() if is_alone else environment.get('TORCHELASTIC_RESTART_COUNT', '0')}"
    launcher = os.getppid()
    if (namespace := environment.get("PMIX_NAMESPACE")) is not None:
        # Under MPI each process has a launcher of its own.
        job, launcher = re.sub(r"\W", "", namespace), 1
    return base / f"sm-train-{os.getuid()}-{launcher}-{job}"


def _allocate(file: IO[bytes], size: int) -> None:
    """Allocate every page of a file: a write to a hole in a full file system would raise SIGBUS."""
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(file.fileno(), 0, size)
    else:  # macOS
        file.write(bytes(size))


def stale_dirs(folder: Path) -> list[Path]:
    """Return folders like ``folder`` whose launcher is dead: it was killed with its processes."""
    pattern = re.compile(rf"sm-train-{os.getuid()}-(\d+)-\w+")
    folders = ((path, pattern.match(path.name)) for path in folder.parent.glob("sm-train-*"))
    return [
        path for path, match in folders if match and state(int(match[1])) == "X" and _is_own(path)
    ]


def launched_folders(launcher: int) -> list[Path]:
    """Return the heartbeat folders of the processes that ``launcher`` has started."""
    folder = heartbeat_folder()
    return [
        path for path in folder.parent.glob(f"sm-train-{os.getuid()}-{launcher}-*") if _is_own(path)
    ]


def create_private_folder(folder: Path) -> None:
    """Create ``folder`` for this user alone, unless it exists.

    Its name is predictable and its parent writable for all, so another user of the node could have
    created it, to read what a rank is doing or to replace files that are written to.

    Raises:
        PermissionError: another user owns it or can open it, or it is a link.
    """
    folder.mkdir(mode=0o700, exist_ok=True)
    if not _is_own(folder):
        raise PermissionError(
            f"{folder} exists, but is not a private folder of this user; remove it"
        )


def _is_own(folder: Path) -> bool:
    try:
        status = folder.lstat()
    except OSError:
        return False
    private = not status.st_mode & (stat.S_IRWXG | stat.S_IRWXO)
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid() and private


def heartbeat_file(folder: Path, local_rank: int) -> Path:
    """Return the file that holds a process's heartbeats."""
    return folder / f"heartbeat-{local_rank}"


def stacks_file(folder: Path, local_rank: int) -> Path:
    """Return the file to which a process writes its stacks on a signal (faulthandler)."""
    return folder / f"stacks-{local_rank}"


def error_file(folder: Path, local_rank: int) -> Path:
    """Return the file to which a process writes the exception that it ends with."""
    return folder / f"error-{local_rank}"


def events_file(folder: Path, local_rank: int) -> Path:
    """Return the file in which a process keeps its last events."""
    return folder / f"events-{local_rank}"


def node_event_file(folder: Path) -> Path:
    """Return the file in which the watchdog keeps the node's last ``node`` event."""
    return folder / "node-event"


def open_readers(folder: Path) -> Iterator[HeartbeatReader]:
    """Yield a reader of every process that has a heartbeat, in the order of local ranks."""
    for path in sorted(folder.glob("heartbeat-?")) + sorted(folder.glob("heartbeat-??")):
        try:
            yield HeartbeatReader(path)
        except (OSError, ValueError):
            continue


@dataclass
class TrainingClock:
    """The sums over a process's logging intervals that every ``step`` event carries.

    ``timed_seconds`` is the duration of ``timed_steps``, and ``waited_seconds`` the part of it in
    which the process waited for data, None if that is unknown. All are 0 after the first interval.
    """

    timed_steps: int = 0
    timed_seconds: float = 0.0
    waited_seconds: float | None = 0.0
    _is_warm: bool = False

    def add(self, steps: int, seconds: float, waited_seconds: float | None) -> dict[str, object]:
        """Add an interval without checkpoints and evaluation; return the fields of its event."""
        if self._is_warm:
            self.timed_steps += steps
            self.timed_seconds += seconds
            if waited_seconds is None or self.waited_seconds is None:
                self.waited_seconds = None
            else:
                self.waited_seconds += waited_seconds
        self._is_warm = True
        return {
            "timed_steps": self.timed_steps,
            "timed_seconds": self.timed_seconds,
            "waited_seconds": self.waited_seconds,
        }

    @property
    def steps_per_second(self) -> float | None:
        """The speed; None after the first interval."""
        return self.timed_steps / self.timed_seconds if self.timed_seconds > 0 else None
