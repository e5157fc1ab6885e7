"""What a user names: a run file, a run's folder, files here, an address in S3, or a name."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path


class Kind(StrEnum):
    """What a target is. The values are part of error messages."""

    RUN_FILE = "a run file"
    RUN_FOLDER = "the folder of a run"
    FOLDER = "a folder"
    FILE = "a file"
    ADDRESS = "an address in S3"
    NAME = "a name"


@dataclass(frozen=True)
class RunPlace:
    """Where a run keeps what it stores: a folder, or a prefix in S3.

    ``stage`` is set if the user named one. ``holds_logs`` is whether the logs below it can be read
    as files.
    """

    root: str
    stage: str | None = None
    holds_logs: bool = False

    def __str__(self) -> str:
        return self.root if self.stage is None else f"{self.root}/{self.stage}"


@dataclass(frozen=True)
class Target:
    """What ``text`` names. ``place`` is that of a run which the text leads to; None of others.

    A *name* is that of a run, of a stage (``RUN--STAGE``) or of a job on SageMaker. Only AWS knows
    whether there is one.
    """

    text: str
    kind: Kind
    place: RunPlace | None = None

    @property
    def path(self) -> Path:
        """The path on this machine; of a run's folder its own, wherever the text leads to it."""
        return Path(str(self.place) if self.kind is Kind.RUN_FOLDER else self.text)

    @property
    def address(self) -> str:
        """The text that leads to the same run again, with the place of its checkpoints."""
        return str(self.place) if self.place and self.kind is Kind.NAME else self.text

    @property
    def is_read_as_files(self) -> bool:
        """Whether all that can be read of it are log files on this machine."""
        if self.place is not None:
            return self.place.holds_logs
        return self.kind not in (Kind.RUN_FILE, Kind.NAME)
