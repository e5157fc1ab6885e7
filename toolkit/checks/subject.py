"""What is checked, and findings of one cluster among those a run may get."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from sm_train.cost.estimate import Estimate
from sm_train.estimators.config.schema import RunConfig
from sm_train.toolkit.checks.finding import Finding


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
