"""Which samples a job read instead of others: of bad ones, and of those removed while it ran.

Each rank notes them as it reads. Before each checkpoint the first rank collects the notes and
appends a line to ``data-records/TIME-replaced.jsonl``, next to the attempt's record: also without
replacements, so that a missing line shows that they are not known.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from sm_train.entrypoints.base.rng import Ints
from sm_train.entrypoints.lineage.data_record import RecordError

if TYPE_CHECKING:
    from sm_train.entrypoints.data_loading.batches import Batch

SUFFIX = "-replaced.jsonl"
"""Ends the name of the file; a record's name without ``.json`` begins it."""

Row = tuple[int, int, int, int, int]
"""A batch, the shard and the sample that it has, and the shard and the sample that were skipped."""


@dataclass
class ReplacementNotes:
    """The replacements of one rank since the last call of :meth:`take`."""

    batches: int = 0
    _rows: list[Row] = field(default_factory=list)

    def add(self, batch: Batch) -> None:
        """Note what the next batch of the attempt has instead of other samples."""
        for used, skipped in batch.replaced:
            self._rows.append((self.batches, *used, *skipped))
        self.batches += 1

    def take(self) -> list[Row]:
        """Return the notes, and begin again."""
        rows, self._rows = self._rows, []
        return rows


@dataclass
class ReplacementsFile:
    """The file with the replacements of all ranks; one process writes it."""

    path: Path
    _rows: list[Row] = field(default_factory=list)
    _bytes: int = 0

    def append(self, step: int, batches: int, rows: Iterable[Row]) -> None:
        """Add a line: the replacements up to ``step``, which ends ``batches`` batches.

        Raises:
            OSError: it cannot be written. The next line has the same replacements.
        """
        self._rows += rows
        document = {"step": step, "batches": batches, "replaced": self._rows}
        with self.path.open("r+b" if self._bytes else "wb") as file:
            file.seek(self._bytes)
            file.truncate()  # a line that was written in part
            file.write(f"{json.dumps(document)}\n".encode())
            file.flush()
            self._rows, self._bytes = [], file.tell()


@dataclass(frozen=True, eq=False)
class Replacements:
    """The replacements in the first ``batches`` batches of an attempt, which end with ``step``.

    ``rows`` (n, 5), int64, are those of :data:`Row`.
    """

    step: int
    batches: int
    rows: Ints = field(repr=False)

    def used(self, shards: tuple[int, ...], sample: int) -> Ints:
        """Return the batches that have a sample of any of ``shards`` instead of another one."""
        return self._batches(1, shards, sample)

    def skipped(self, shards: tuple[int, ...], sample: int) -> Ints:
        """Return the batches that have another sample instead of it."""
        return self._batches(3, shards, sample)

    def _batches(self, column: int, shards: tuple[int, ...], sample: int) -> Ints:
        is_shard = np.isin(self.rows[:, column], shards)
        batches: Ints = self.rows[is_shard & (self.rows[:, column + 1] == sample), 0]
        return batches


def decode_replacements(content: bytes, address: str) -> Replacements | None:
    """Parse a file of :class:`ReplacementsFile`; None if it has no complete line.

    A line that was not written completely is ignored: its batches are not covered.

    Raises:
        RecordError: another line is damaged.
    """
    *lines, _incomplete = content.split(b"\n")
    if not lines:
        return None
    try:
        documents = [json.loads(line) for line in lines]
        rows = [row for document in documents for row in document["replaced"]]
        last = documents[-1]
        return Replacements(
            last["step"], last["batches"], np.array(rows, np.int64).reshape(len(rows), 5)
        )
    except (ValueError, KeyError, TypeError) as error:
        raise RecordError(f"{address}: not the replaced samples of a job: {error}") from None
