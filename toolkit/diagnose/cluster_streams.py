"""The logs of an attempt on a cluster, as `diagnose` and `review` read logs."""

from __future__ import annotations

from functools import partial

from sm_train.toolkit.clusters.cluster_job import ClusterJob
from sm_train.toolkit.clusters.cluster_logs import read_segments
from sm_train.toolkit.clusters.cluster_run import ClusterRun
from sm_train.toolkit.diagnose.matches import LogStream


def log_streams(run: ClusterRun, job: ClusterJob) -> list[LogStream]:
    """Return the log of each node of an attempt."""
    return [
        LogStream(
            f"{run.root}/{start.record.stage}/{start.record.folder}",
            partial(read_segments, run, start),
            start.record.node,
            start.record.seen,
        )
        for start in job.starts
    ]


def platform_streams(job: ClusterJob) -> list[LogStream]:
    """Return what the records say of the attempt's end, as a line of the platform."""
    if not job.failure_reason:
        return []
    ended = job.ended or job.created
    line = f"{ended.isoformat(timespec='milliseconds')} {job.platform}: {job.failure_reason}\n"
    return [LogStream("job-records", lambda: [line.encode()], None, ended.timestamp())]
