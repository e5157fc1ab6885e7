"""Defines findings, the checks that produce them, and what is checked."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, Protocol

from sm_train.cost.estimate import Estimate
from sm_train.estimators.config.schema import RunConfig

Level = Literal["error", "warning", "info"]

LEVELS: tuple[Level, ...] = ("error", "warning", "info")
"""Most severe first: with an error a job would fail or be rejected."""


@dataclass(frozen=True)
class Finding:
    """One problem: ``where`` is a key of the run file, ``fix`` says what to change."""

    level: Level
    code: str
    where: str
    message: str
    fix: str


@dataclass(frozen=True)
class Check:
    """A code and its levels. ``docs/checks.md`` describes what it means.

    Findings are only created by :meth:`found`, so each has a description there.
    """

    code: str
    levels: tuple[Level, ...]

    def found(self, level: Level, where: str, message: str, fix: str) -> Finding:
        """Create a finding with this check's code; ``level`` must be a documented one."""
        assert level in self.levels, f"{self.code} is documented as {self.levels}, not {level}"
        return Finding(level, self.code, where, message, fix)


@dataclass(frozen=True)
class Subject:
    """The run to check in one region, its estimate, and the source of its shards on this machine.

    ``base`` is the run file's folder; ``index`` is an index file used instead of the shards, and
    ``components`` a model to check as well: a folder, an S3 prefix or a Hub repository.
    ``number`` counts the regions and clusters that the run may use, the first one is 0; ``key`` is
    the key of the run file that defines the others.
    """

    config: RunConfig
    region: str
    estimate: Estimate
    base: Path
    index: Path | None = None
    number: int = 0
    key: str = ""
    components: str | None = None


class ClusterChoice(Protocol):
    """A cluster and region that the run may get, and the key of the run file that defines it."""

    @property
    def config(self) -> RunConfig: ...

    @property
    def region(self) -> str: ...

    @property
    def key(self) -> str: ...


def found_at(cluster: ClusterChoice, findings: Iterable[Finding]) -> Iterator[Finding]:
    """Attribute the findings to the key that defines ``cluster``."""
    instance_type = cluster.config.cluster.instance_type
    for finding in findings:
        message = f"{instance_type} in {cluster.region}: {finding.message}"
        yield replace(finding, where=cluster.key, message=message)
