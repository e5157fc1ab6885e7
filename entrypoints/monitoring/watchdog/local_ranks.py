"""The training processes of one node, as their heartbeats and the kernel show them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from sm_train.entrypoints.monitoring import procfs
from sm_train.entrypoints.monitoring.heartbeat import (
    EMPTY_HISTOGRAM,
    DurationHistogram,
    ExitState,
    HeartbeatReader,
    HeartbeatSample,
    Phase,
    open_readers,
)
from sm_train.entrypoints.monitoring.stall_detector import RankStatus
from sm_train.entrypoints.monitoring.stragglers import BusyTotals


@dataclass(frozen=True)
class NodeInfo:
    """This node's number, the job's number of nodes, and the processes on this node."""

    node: int
    nodes: int
    processes: int


class LocalRanks:
    """Reads the heartbeats of a node's processes, which lie in the folder ``heartbeats``."""

    def __init__(self, info: NodeInfo, heartbeats: Path) -> None:
        self.info, self.heartbeats = info, heartbeats
        self.readers: list[HeartbeatReader] = []

    def samples(self) -> list[HeartbeatSample]:
        """Return the heartbeats of the processes that have started and have a valid record."""
        if len(self.readers) < self.info.processes:
            self.readers = list(open_readers(self.heartbeats))
        samples = (reader.sample() for reader in self.readers)
        return [sample for sample in samples if sample is not None]

    def unread(self, samples: Sequence[HeartbeatSample]) -> set[int]:
        """Return the ranks that have started, but have no valid record among ``samples``."""
        return {reader.process.rank for reader in self.readers} - {
            sample.rank for sample in samples
        }

    @property
    def ended_well(self) -> bool:
        """Whether the first process has reported success."""
        return bool(self.readers) and self.readers[0].exit_state is ExitState.DONE

    def durations(self, phase: Phase) -> DurationHistogram:
        """Return a phase's durations on all ranks of this node.

        Phases take about equally long on all ranks, so pooling their durations sets the timeouts
        sooner.
        """
        return sum((reader.durations(phase) for reader in self.readers), EMPTY_HISTOGRAM)

    def busy_totals(self) -> list[BusyTotals]:
        """Return how long each rank has been busy since its start."""
        totals = ((reader.process.rank, reader.busy()) for reader in self.readers)
        return [
            BusyTotals(rank, self.info.node, *busy) for rank, busy in totals if busy is not None
        ]

    def statuses(
        self,
        samples: Sequence[HeartbeatSample],
        in_collective: Mapping[int, bool | None] | None = None,
    ) -> list[RankStatus]:
        """Return what each rank does; ``in_collective`` says of a rank whether its stack waits."""
        return [
            RankStatus(
                sample.rank,
                self.info.node,
                sample.phase,
                sample.step,
                sample.sequence,
                # The kernel's state of a process that has reported its end no longer matters.
                procfs.state(sample.pid) if sample.exit_state is ExitState.RUNNING else "S",
                (in_collective or {}).get(sample.rank),
            )
            for sample in samples
        ]
