"""A run on Kubernetes or Slurm, as its nodes stored it next to its checkpoints."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import cached_property
from itertools import accumulate
from typing import ClassVar, Self

from sm_train.entrypoints.clusters.attempts import clock_findings, named
from sm_train.entrypoints.clusters.node_record import (
    StoredNode,
    Submitted,
    read_nodes,
    read_stop_request,
    read_submitted,
    store_stop_request,
)
from sm_train.entrypoints.storage.storage import Storage, open_storage
from sm_train.entrypoints.storage.store import S3Access
from sm_train.estimators.config.schema import RunConfig
from sm_train.estimators.config.stage import StageSection
from sm_train.estimators.manifests.manifest import queue_commands
from sm_train.toolkit.aws.aws_errors import translate_aws_errors
from sm_train.toolkit.base.errors import UserError
from sm_train.toolkit.clusters.node_records import cluster_logs
from sm_train.toolkit.clusters.node_records.cluster_job import (
    ClusterJob,
    cluster_jobs,
    cluster_platform,
)
from sm_train.toolkit.clusters.scheduler import run_words
from sm_train.toolkit.platforms.placed_run import JobLogLine, LogOptions, PlacedRun
from sm_train.toolkit.records.checkpoints import StoredCheckpoint, checkpoints_in
from sm_train.toolkit.records.job_logs import JobLogs
from sm_train.toolkit.records.live_state import LiveState
from sm_train.toolkit.records.run_job import Platform, RunJob
from sm_train.toolkit.records.stage_state import StageState


@dataclass(frozen=True, kw_only=True)
class ClusterRun(PlacedRun):
    """A run on a cluster.

    ``root`` is the folder or prefix with a folder for each of its ``stages`` that has records.
    ``region`` is that of its bucket, and of prices.
    """

    config: RunConfig
    root: str
    stages: tuple[str, ...]
    access: S3Access = field(default_factory=S3Access)
    named_by_place: bool = False
    """Whether the user named the place."""

    watcher: ClassVar[str] = "sm_train.toolkit.clusters.node_records.cluster_watch"
    unwatched: ClassVar[tuple[str, ...]] = ("alert when all nodes are gone",)

    @property
    def is_only_place(self) -> bool:
        return self.named_by_place or self.config.is_outside_of_aws

    # ------------------------------------------------------------------ words

    @property
    def platform(self) -> Platform:
        newest, submitted = self._newest, self._newest_submitted
        if newest is not None:
            return cluster_platform(newest.record.platform)
        return cluster_platform("a cluster" if submitted is None else submitted[1].platform)

    @property
    def place(self) -> str:
        return f"on {self.platform.title}, in {self.root}"

    @property
    def origin(self) -> str:
        return f"settings of {self.kind} in {self.root}"

    @property
    def resume_command(self) -> str:
        """The platform's own command, as its nodes stored it."""
        return self._command("resume") or "sm-train manifest RUN --to KIND"

    @property
    def sample_target(self) -> str:
        return self.root

    def start_command(self, stage: str) -> str:
        submitted = self._submitted.get(stage)
        if submitted is not None and "status" in submitted.commands:
            return submitted.commands["status"]
        return f"sm-train manifest RUN --to KIND --stage {stage}"

    @property
    def no_jobs(self) -> str:
        status = self._command("status")
        shows = f"; `{status}` shows whether it waits" if status else ""
        return f"{self.target}: no node has stored a record at {self.root} yet{shows}"

    def _command(self, purpose: str) -> str | None:
        newest, submitted = self._newest, self._newest_submitted
        if newest is not None:
            return newest.record.commands.get(purpose)
        return None if submitted is None else submitted[1].commands.get(purpose)

    # ------------------------------------------------------------------ state

    def refreshed(self) -> Self:
        return replace(self)

    def folder(self, stage: str) -> Storage:
        """Return the checkpoint folder of a stage."""
        return open_storage(f"{self.root}/{stage}", self.access)

    def nodes(self, stage: str) -> list[StoredNode]:
        """Return the starts of the stage's nodes, oldest first."""
        return self._nodes.get(stage, [])

    @cached_property
    def _nodes(self) -> dict[str, list[StoredNode]]:
        """The starts of nodes by stage, read once: `refreshed` reads them again."""
        with readable(self.root):
            return {stage: read_nodes(self.folder(stage)) for stage in self.stages}

    @cached_property
    def _submitted(self) -> dict[str, Submitted]:
        """The newest job of each stage that was handed to the platform, as far as it is known."""
        with readable(self.root):
            found = {stage: read_submitted(self.folder(stage)) for stage in self.stages}
        return {stage: each for stage, each in found.items() if each is not None}

    @property
    def _newest_submitted(self) -> tuple[str, Submitted] | None:
        """The stage and the job that was handed to the platform last."""
        return max(self._submitted.items(), key=lambda item: item[1].time, default=None)

    @property
    def _newest(self) -> StoredNode | None:
        """The node with the newest heartbeat."""
        found = [node for stage in self.stages for node in self.nodes(stage)]
        return max(found, key=lambda node: node.seen, default=None)

    def latest_start(self) -> float | None:
        newest, submitted = self._newest, self._newest_submitted
        if newest is not None:
            return newest.started
        return None if submitted is None else submitted[1].time

    def jobs(self, now: datetime | None = None) -> list[ClusterJob]:
        at = now or self.now()
        found: list[tuple[datetime, str, ClusterJob]] = []
        for stage in self.stages:
            attempts = self._attempts(stage, at)
            # A node that runs on makes an attempt older than those before it.
            begins = accumulate((job.created for job in attempts), max)
            found += [(begin, job.name, job) for begin, job in zip(begins, attempts, strict=True)]
        return [job for _, _, job in sorted(found, key=lambda each: each[:2])]

    def _attempts(self, stage: str, now: datetime, *, with_stop: bool = True) -> list[ClusterJob]:
        nodes, stop = self.nodes(stage), None
        if nodes and with_stop:
            with readable(self.root):
                stop = read_stop_request(self.folder(stage))
        place = f"{self.root}/{stage}"
        return cluster_jobs(nodes, place, self.region, now.timestamp(), stop)

    def live(self, job: RunJob) -> LiveState:
        return cluster_logs.read_live(self._reader(job), _attempt(job).starts)

    def storage(self, job: RunJob) -> Storage:
        return self.folder(job.stage)

    def stored(self, stage: StageSection, jobs: Sequence[RunJob]) -> StoredCheckpoint:
        del jobs
        with readable(self.root):
            stored = checkpoints_in(self.folder(stage.name))
        return replace(stored, uri=f"{self.root}/{stage.name}", region=self.region)

    def notices(self, stages: Sequence[StageState], now: datetime) -> list[str]:
        """Return the nodes without heartbeats and the wrong clocks of live attempts."""
        newest = [stage.jobs[-1] for stage in stages if stage.jobs]
        live = [job for job in newest if job.live]
        return [line for job in live for line in node_warnings(_attempt(job).starts, now)]

    # ------------------------------------------------------------------ logs

    def log_lines(self, job: RunJob, options: LogOptions) -> Iterator[JobLogLine]:
        return cluster_logs.log_lines(
            self._reader(job), _attempt(job), lambda: _attempt(self.refreshed_job(job)), options
        )

    def job_logs(self, job: RunJob) -> JobLogs:
        jobs = self._attempts(job.stage, self.now(), with_stop=False)
        number = [each.name for each in jobs].index(job.name)
        *earlier, last = [
            cluster_logs.log_streams(self._reader(each), self.root, each.starts)
            + cluster_logs.platform_streams(each)
            for each in jobs[: number + 1]
        ]
        return JobLogs(job.name, job.status, last, earlier)

    def _reader(self, job: RunJob) -> cluster_logs.ReadSegment:
        storage = self.folder(job.stage)

        def read(name: str) -> bytes:
            with readable(self.root):
                return storage.read(name)

        return read

    # ------------------------------------------------------------------ actions

    def request_stop(self) -> tuple[RunJob, str | None]:
        """Store a request: nodes that have started before it checkpoint and end.

        If the platform numbers its jobs, it also concerns the newest when it starts again.
        """
        job, warning = self.newest_job(), None
        if job.status == "Stopping":
            return job, None
        if job.live or job.may_start_again:
            self.store_stop(job.stage, "sm-train stop")
        if not job.live and (command := self._command("cancel") or self._command("stop")):
            # Whether it, or another job, waits in a queue, only the platform knows.
            warning = (
                f"a job may still wait in the platform's queue: `{command}`, or --cancel where "
                "that program is, takes it out of it"
            )
        return self.refreshed_job(job), warning

    def leave_queue(self) -> str:
        """Take the run's newest job out of its platform's queue, by the platform's own program."""
        submitted = self._newest_submitted
        stage = self.newest_job().stage if self.jobs() or submitted is None else submitted[0]
        command = None
        # Anybody who can write the records could have named a stage: only the run's are.
        if stage in [each.name for each in self.config.stages]:
            namespace = self.config.kubernetes.namespace
            command = queue_commands(self.name, stage, namespace, self._command("stop") or "")
        if command is None:
            raise UserError(f"--cancel: {self.root} has no command for the queue of this job")
        run_words(shlex.split(command))
        return command

    def store_stop(self, stage: str, by: str) -> None:
        """Store a request to stop a stage."""
        with readable(self.root):
            nodes = self.nodes(stage)
            store_stop_request(self.folder(stage), by, nodes[-1].record.job_id if nodes else None)


def _attempt(job: RunJob) -> ClusterJob:
    """Return a job of this platform as what it is."""
    assert isinstance(job, ClusterJob)
    return job


def node_warnings(starts: Sequence[StoredNode], now: datetime) -> list[str]:
    """Return the nodes of a live attempt without heartbeats, and its clocks that are wrong."""
    warnings = []
    if lost := [start for start in starts if start.is_lost(now.timestamp())]:
        minutes = (now.timestamp() - max(start.seen for start in lost)) / 60
        warnings.append(f"no heartbeat of {named(lost)} for {minutes:.0f} minutes")
    return [*warnings, *clock_findings(starts)]


@contextmanager
def readable(place: str) -> Iterator[None]:
    """Raise errors of the storage as a :class:`UserError` that names ``place``."""
    try:
        with translate_aws_errors(place):
            yield
    except OSError as error:
        raise UserError(f"{place}: {error.strerror or error}") from None
