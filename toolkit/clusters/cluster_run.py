"""A run on Kubernetes or Slurm, as its nodes stored it next to its checkpoints."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property

from sm_train.entrypoints.job_records.node_record import (
    NodeRecord,
    StoredNode,
    read_nodes,
    read_stop_request,
    store_stop_request,
)
from sm_train.entrypoints.object_store.store import S3Access
from sm_train.entrypoints.shared_work.storage import Storage, open_storage
from sm_train.estimators.config.schema import RunConfig
from sm_train.toolkit.aws.aws_errors import translate_aws_errors
from sm_train.toolkit.clusters.cluster_job import ClusterJob, cluster_jobs, cluster_platform
from sm_train.toolkit.errors import UserError
from sm_train.toolkit.jobs.checkpoints import StoredCheckpoint, checkpoints_in


@dataclass(frozen=True)
class ClusterRun:
    """A run on a cluster. ``target`` is how the user named it, which commands repeat.

    ``root`` is the folder or prefix with a folder for each of its ``stages`` that has records.
    ``region`` is that of its bucket, and of prices. ``stage`` is set if the user named one.
    """

    target: str
    root: str
    config: RunConfig
    region: str
    stages: tuple[str, ...]
    access: S3Access = field(default_factory=S3Access)
    stage: str | None = None

    @property
    def name(self) -> str:
        return self.config.name

    def storage(self, stage: str) -> Storage:
        """Return the checkpoint folder of a stage."""
        return open_storage(f"{self.root}/{stage}", self.access)

    def nodes(self, stage: str) -> list[StoredNode]:
        """Return the starts of the stage's nodes, oldest first.

        Raises:
            UserError: the place cannot be read.
        """
        return self._nodes.get(stage, [])

    @cached_property
    def _nodes(self) -> dict[str, list[StoredNode]]:
        """The starts of nodes by stage, read once: `refreshed` reads them again."""
        with readable(self.root):
            return {stage: read_nodes(self.storage(stage)) for stage in self.stages}

    def refreshed(self) -> ClusterRun:
        """Return the run as it is now stored."""
        return replace(self)

    def is_live(self, now: float) -> bool:
        """Return whether a node of any stage has sent a heartbeat lately; ``now`` in Unix seconds.

        Raises:
            UserError: the place cannot be read.
        """
        return any(node.is_live(now) for stage in self.stages for node in self.nodes(stage))

    def jobs(self, stage: str, now: float) -> list[ClusterJob]:
        """Return the stage's attempts, oldest first; ``now`` is in Unix seconds.

        Raises:
            UserError: the place cannot be read.
        """
        nodes = self.nodes(stage)
        with readable(self.root):
            stop = read_stop_request(self.storage(stage)) if nodes else None
        return cluster_jobs(nodes, f"{self.root}/{stage}", self.region, now, stop)

    def newest_jobs(self, now: float) -> list[ClusterJob]:
        """Return the attempts of the stage that the user named, or of all, oldest first.

        Raises:
            UserError: the place cannot be read, or there is none.
        """
        names = (self.stage,) if self.stage is not None else self.stages
        jobs = [job for stage in names for job in self.jobs(stage, now)]
        if not jobs:
            raise UserError(f"{self.target}: no node has stored a record at {self.root} yet")
        return sorted(jobs, key=lambda job: (job.created, job.name))

    def stored(self, stage: str) -> StoredCheckpoint:
        """Return the newest complete checkpoint of a stage.

        Raises:
            UserError: the place cannot be read.
        """
        with readable(self.root):
            return checkpoints_in(self.storage(stage))

    def request_stop(self, stage: str, by: str) -> None:
        """Store a request to stop: nodes that have started before it checkpoint and end.

        If the platform numbers its jobs, it also concerns the newest when it starts again.

        Raises:
            UserError: the place cannot be written.
        """
        with readable(self.root):
            nodes = self.nodes(stage)
            store_stop_request(self.storage(stage), by, nodes[-1].record.job_id if nodes else None)

    @property
    def newest_node(self) -> StoredNode | None:
        """The node with the newest heartbeat; None without any.

        Raises:
            UserError: the place cannot be read.
        """
        found = [node for stage in self.stages for node in self.nodes(stage)]
        return max(found, key=lambda node: node.seen, default=None)

    @property
    def newest_record(self) -> NodeRecord | None:
        """The record with the newest heartbeat; None without any.

        Raises:
            UserError: the place cannot be read.
        """
        newest = self.newest_node
        return None if newest is None else newest.record

    @property
    def platform(self) -> str:
        """The platform of its newest record, with a capital letter."""
        record = self.newest_record
        return "a cluster" if record is None else cluster_platform(record.platform).title

    def command(self, purpose: str) -> str | None:
        """Return the platform's command to check, stop or resume the run, as its nodes stored it.

        Raises:
            UserError: the place cannot be read.
        """
        record = self.newest_record
        return None if record is None else record.commands.get(purpose)


@contextmanager
def readable(place: str) -> Iterator[None]:
    """Raise errors of the storage as a :class:`UserError` that names ``place``."""
    try:
        with translate_aws_errors(place):
            yield
    except OSError as error:
        raise UserError(f"{place}: {error.strerror or error}") from None
