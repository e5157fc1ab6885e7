"""Reads what PyTorch's watchdog of NCCL prints of a collective that timed out.

It prints two lines one after the other. The first has the operation and the rank within its group,
the second has the group (torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp; the wording of the
second is that of 2.4, 2.5 and 2.7)::

    [rank5]:[E… ProcessGroupNCCL.cpp:683] [Rank 1] Watchdog caught collective operation timeout:
        WorkNCCL(SeqNum=42, OpType=ALLREDUCE, …) ran for 600045 milliseconds before timing out.
    [rank5]:[E… ProcessGroupNCCL.cpp:1537] [PG 1 Rank 1] Timeout at NCCL work: 42, …
    [rank5]:[E… ProcessGroupNCCL.cpp:1785] [PG ID 2 PG GUID 9 Rank 1] Exception (either an error or
        timeout) detected by watchdog at work: 42, …
    [rank5]:[E… ProcessGroupNCCL.cpp:2168] [PG ID 2 PG GUID 7(dp_shard) Rank 1]  failure detected by
        watchdog at work sequence id: 42 PG status: …
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from sm_train.toolkit.analysis.diagnose.log_lines import LogLine

GROUP_OF_WORK = "detected by watchdog at work"
"""Part of a second line that no signature has."""

_MAX_TIMEOUTS = 100_000
_OPERATION = re.compile(
    r"\[Rank (?P<rank>\d+)\] Watchdog caught collective operation timeout: ?"
    r"(?:WorkNCCL\(SeqNum=(?P<sequence>\d+), OpType=(?P<operation>\w+))?"
)
_GROUP = re.compile(
    r"\[PG (?:ID )?(?P<id>\d+)(?: PG GUID (?P<guid>[^\s(\]]+))? ?(?:\((?P<name>[^)]*)\))? "
    r"Rank (?P<rank>\d+)\] +(?:Timeout at NCCL work|.{0,40}detected by watchdog at work(?: sequence"
    r" id)?): (?P<sequence>\d+)"
)
_DEFAULT = "0"


@dataclass(frozen=True)
class Group:
    """A process group as PyTorch names it; that of all ranks is the default group."""

    id: str
    name: str

    @property
    def is_default(self) -> bool:
        """Whether it has all ranks of the job."""
        return self.id == _DEFAULT or self.name == "default_pg"


@dataclass(frozen=True)
class CollectiveTimeout:
    """A collective that timed out on a rank.

    ``rank`` is the number among all ranks, None if the line has none; ``group_rank`` is that in
    its group. ``group`` is None if no line names it. ``order`` is a line number, and ``time`` in
    Unix seconds.
    """

    rank: int | None
    group_rank: int
    sequence: int | None
    operation: str | None
    group: Group | None
    node: str | None
    time: float | None
    order: int
    text: str


class WatchdogLines:
    """Joins the two lines of each timeout in a log."""

    def __init__(self) -> None:
        self._timeouts: list[CollectiveTimeout] = []
        self._open: dict[tuple[int | None, int, int | None], list[int]] = {}

    @property
    def timeouts(self) -> tuple[CollectiveTimeout, ...]:
        """The timeouts in the order of their lines."""
        return tuple(self._timeouts)

    def forget(self) -> None:
        """Forget all timeouts: the training has continued, or another attempt begins."""
        self._timeouts.clear()
        self._open.clear()

    def read(self, line: LogLine, rank: int | None, node: str | None, order: int) -> None:
        """Read a line of ``node``; ``rank`` is the one that wrote it, if it is known."""
        if found := _OPERATION.search(line.text):
            sequence = None if found["sequence"] is None else int(found["sequence"])
            self._add(
                CollectiveTimeout(
                    *(rank, int(found["rank"]), sequence, found["operation"], None),
                    *(node, line.time, order, line.text.strip()),
                )
            )
        elif found := _GROUP.search(line.text):
            self._name(found, rank)

    def _add(self, timeout: CollectiveTimeout) -> None:
        if len(self._timeouts) < _MAX_TIMEOUTS:
            key = (timeout.rank, timeout.group_rank, timeout.sequence)
            self._open.setdefault(key, []).append(len(self._timeouts))
            self._timeouts.append(timeout)

    def _name(self, found: re.Match[str], rank: int | None) -> None:
        """Note the group of the timeouts that wait for it.

        Two groups of a rank may time out at the same number at the same time. Their operations
        could be exchanged, so neither is known.
        """
        waiting = self._open.pop((rank, int(found["rank"]), int(found["sequence"])), [])
        operations = {self._timeouts[number].operation for number in waiting}
        if len(operations) != 1:
            return
        group = Group(found["guid"] or found["id"], found["name"] or "")
        for number in waiting:
            self._timeouts[number] = replace(self._timeouts[number], group=group)
