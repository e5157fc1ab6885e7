"""The options of ``sm-train doctor``."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class DoctorOptions:
    """The options of ``doctor``, by the names of the command's; ``poll_seconds`` is --interval."""

    run: Path
    stage: str | None
    canary: bool
    instance_type: str | None
    local: bool
    nodes: int | None
    processes: int
    output: Path | None
    dry_run: bool
    yes: bool
    as_json: bool
    poll_seconds: float
    region: str | None
    profile: str | None
