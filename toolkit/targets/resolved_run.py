"""Finds the run on SageMaker that a command names, with its jobs and its newest launch record."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from sm_train.estimators.config.naming import staging_bucket
from sm_train.estimators.config.schema import RunConfig
from sm_train.toolkit.aws.session import (
    account_of,
    open_session,
    resolve_region,
    session_in_region,
)
from sm_train.toolkit.clusters.cluster_run import ClusterRun
from sm_train.toolkit.clusters.find_cluster_run import (
    cluster_run_at,
    cluster_run_of,
    is_outside_of_aws,
)
from sm_train.toolkit.errors import ExitCode, UserError
from sm_train.toolkit.jobs.launch_record import DamagedRecordError, LaunchRecord, read_record
from sm_train.toolkit.jobs.local_folder import LocalRunFolder
from sm_train.toolkit.jobs.training_job import TrainingJob, jobs_of_run
from sm_train.toolkit.run_file import load
from sm_train.toolkit.targets.target import Kind, Target, local_run_hint, run_target

if TYPE_CHECKING:
    import boto3


@dataclass(frozen=True)
class ResolvedRun:
    """A run, found by its file, its name, one of its stages or one of its jobs.

    ``region`` and ``bucket`` are its home; jobs may also be in other regions.
    """

    name: str
    region: str
    bucket: str
    config: RunConfig
    record: LaunchRecord | None
    """The newest launch record; None if nothing was submitted."""
    jobs: tuple[TrainingJob, ...] = ()
    """Its jobs when it was resolved."""
    stage: str | None = None
    """The stage that the user named, or the stage of the job that the user named."""
    job: str | None = None
    """The job that the user named."""

    @property
    def submitted_config(self) -> RunConfig:
        """The config that code is staged for, whatever the run file has become since."""
        return self.record.config if self.record is not None else self.config

    def is_named(self, job: TrainingJob) -> bool:
        """Return whether the user named this job, its stage or the whole run."""
        return self.job in (None, job.name) and self.stage in (None, job.stage)


def resolve_run(session: boto3.Session, target: str, region: str) -> ResolvedRun:
    """Return the run of ``target``: a run file, or the name of a run, a stage or a job.

    By name it is found from any of its regions: the jobs' tags name its home region.

    Raises:
        UserError: there is no such run in the region, or its file is invalid.
    """
    found = run_target(target)
    if found.kind is Kind.RUN_FILE:
        return run_of_config(session, load(found.path), region)
    target = found.text
    name, _, rest = target.partition("--")
    jobs = jobs_of_run(session, name)
    named = [job for job in jobs if not rest or target == job.name or rest == job.stage]
    if not named:
        raise UserError(
            f"{target}: neither a run file here nor a run or job of sm-train in {region}; "
            "`sm-train list` shows all runs"
        )
    home, bucket = _home(jobs)
    record = None
    if bucket is not None:
        record = read_record(session_in_region(session, home), bucket, name, jobs[-1].name)
    if bucket is None or record is None:
        raise UserError(f"{name}: {jobs[-1].name} left no record in S3; give the run file instead")
    return ResolvedRun(
        name,
        home,
        bucket,
        record.config,
        record,
        tuple(jobs),
        stage=named[-1].stage if rest else None,
        job=target if target == named[-1].name else None,
    )


def run_of_config(session: boto3.Session, config: RunConfig, region: str) -> ResolvedRun:
    """Return the run that a run file describes, with its jobs in ``region``.

    A damaged launch record counts as none, with a warning.
    """
    bucket, record = staging_bucket(config, region), None
    jobs = jobs_of_run(session, config.name)
    if jobs:
        try:
            record = read_record(session, _home(jobs)[1] or bucket, config.name, jobs[-1].name)
        except DamagedRecordError as error:
            sys.stderr.write(f"warning: {error.problem}; the run file counts instead\n")
    return ResolvedRun(config.name, region, bucket, config, record, tuple(jobs))


def _home(jobs: Sequence[TrainingJob]) -> tuple[str, str | None]:
    """Return the run's home region, and its bucket there, which holds the launch records."""
    home = jobs[-1].regions[0]
    return home, next((job.bucket for job in reversed(jobs) if job.region == home), None)


def refresh_run(session: boto3.Session, run: ResolvedRun) -> ResolvedRun:
    """Return the run with its jobs as they are now."""
    return replace(run, jobs=tuple(jobs_of_run(session, run.name)))


def newest_job(session: boto3.Session, run: ResolvedRun) -> TrainingJob:
    """Return the job that the user named, or the newest of the stage or run, as it is now.

    Raises:
        UserError: there is none.
    """
    jobs = [job for job in jobs_of_run(session, run.name) if run.is_named(job)]
    if not jobs:
        raise UserError(f"{run.name}: has no job in {run.region}; `sm-train submit` starts one")
    return jobs[-1]


@dataclass(frozen=True)
class RunOnSageMaker:
    """A run, and a session in its home region."""

    session: boto3.Session
    run: ResolvedRun


FoundRun = RunOnSageMaker | ClusterRun | LocalRunFolder
"""A run, wherever it is."""


def find_run(
    target: str, options: dict[str, Any], session: boto3.Session | None = None
) -> FoundRun:
    """Return the run that a user names: on SageMaker, on a cluster, or in a folder here.

    Of a run with jobs on SageMaker and elsewhere it is the place of the newest one. ``options`` are
    the global ones. ``session`` is one of the run's region, if it is open already.

    Raises:
        UserError: there is no such run, or AWS returns an error.
    """
    found = run_target(target)
    if found.local is not None:
        return found.local
    cluster = _cluster_run(found, options)
    if cluster is not None and (found.root is not None or is_outside_of_aws(cluster.config)):
        return cluster
    try:
        run = RunOnSageMaker(*_sagemaker_run(target, options, session))
    except UserError as error:
        # Other errors say nothing about the run.
        if cluster is None and found.kind is Kind.NAME and error.exit_code is ExitCode.USAGE:
            cluster = _in_default_bucket(found.text, options)
        if cluster is None:
            raise
        return cluster
    if cluster is None and found.kind is Kind.NAME:
        cluster = cluster_run_of(target, run.run.config, options, run.run.bucket)
    return run if cluster is None or _is_newer(run.run, cluster) else cluster


def _sagemaker_run(
    target: str, options: dict[str, Any], session: boto3.Session | None
) -> tuple[boto3.Session, ResolvedRun]:
    if session is None:
        return _open_on_sagemaker(target, options)
    run = resolve_run(session, target, session.region_name)
    return session_in_region(session, run.region), run


def may_be_on_sagemaker(target: str) -> bool:
    """Return whether a run may have jobs on SageMaker; nothing is asked for that.

    Raises:
        UserError: the target names no run.
    """
    found = run_target(target)
    if found.kind is Kind.RUN_FILE:
        return not is_outside_of_aws(load(found.path))
    return found.kind is Kind.NAME


def _cluster_run(found: Target, options: dict[str, Any]) -> ClusterRun | None:
    """Return the run whose records a folder, an address or the place in a run file holds."""
    if found.root is not None:
        return cluster_run_at(found.text, found.root, options, found.stage)
    if found.kind is Kind.RUN_FILE:
        return cluster_run_of(found.text, load(found.path), options)
    return None


def _in_default_bucket(name: str, options: dict[str, Any]) -> ClusterRun | None:
    """Look for a run that SageMaker does not know in the account's default bucket.

    None also if that fails: the error of the request to SageMaker says why.
    """
    run, _, stage = name.partition("--")
    try:
        session, region = _open(None, options)
        root = f"s3://sagemaker-{region}-{account_of(session)}/{run}/checkpoints"
        return cluster_run_at(name, root, options, stage or None)
    except UserError:
        return None


def _is_newer(run: ResolvedRun, cluster: ClusterRun) -> bool:
    """Return whether SageMaker has a job that is younger than the cluster's newest record."""
    node = cluster.newest_node
    return bool(run.jobs) and (node is None or run.jobs[-1].created.timestamp() > node.started)


def open_run(target: str, options: dict[str, Any]) -> tuple[boto3.Session, ResolvedRun]:
    """Return the run of ``target`` and a session in its home region, for a command with the global
    ``options`` that works on SageMaker only.

    Raises:
        UserError: there is no such run, nodes of a cluster train it, or AWS returns an error.
    """
    cluster = _cluster_run(run_target(target), options)
    if cluster is not None and cluster.is_live(time.time()):
        _refuse_cluster(target, cluster)
    return _open_on_sagemaker(target, options)


def _open_on_sagemaker(target: str, options: dict[str, Any]) -> tuple[boto3.Session, ResolvedRun]:
    found = run_target(target)
    if found.kind is Kind.RUN_FILE:
        config = load(found.path)
        _require_sagemaker(target, config, options)
        session, region = _open(config.region, options)
        return session, run_of_config(session, config, region)
    session, region = open_session_for(target, options)
    with local_run_hint(target):
        run = resolve_run(session, target, region)
    return session_in_region(session, run.region), run


def open_session_for(target: str, options: dict[str, Any]) -> tuple[boto3.Session, str]:
    """Open a session in the region of ``target``, if it is a run file, or of the options.

    Raises:
        UserError: the target is no run on SageMaker, or there are no credentials.
    """
    found = run_target(target)
    if found.local is not None:
        raise UserError(
            f"{target}: is a local run; this command works on SageMaker. To continue: "
            f"{found.local.start_command}"
        )
    if found.root is not None:
        cluster = _cluster_run(found, options)
        if found.kind is Kind.FOLDER or (cluster and is_outside_of_aws(cluster.config)):
            _refuse_cluster(target, cluster)
    configured = None
    if found.kind is Kind.RUN_FILE:
        config = load(found.path)
        _require_sagemaker(target, config, options)
        configured = config.region
    with local_run_hint(target):
        return _open(configured, options)


def _require_sagemaker(target: str, config: RunConfig, options: dict[str, Any]) -> None:
    """Refuse a run whose machines or store SageMaker does not have.

    Raises:
        UserError: it is one.
    """
    if is_outside_of_aws(config):
        _refuse_cluster(target, cluster_run_of(target, config, options))


def _refuse_cluster(target: str, cluster: ClusterRun | None) -> None:
    """Refuse a run on a cluster, for a command that works on SageMaker only.

    Raises:
        UserError: always.
    """
    where = "on Kubernetes or Slurm" if cluster is None else f"on {cluster.platform}"
    resume = None if cluster is None else cluster.command("resume")
    raise UserError(
        f"{target}: is a run {where}; this command works on SageMaker. To continue the run there: "
        f"{resume or 'sm-train manifest RUN --to KIND'}"
    )


def _open(configured: str | None, options: dict[str, Any]) -> tuple[boto3.Session, str]:
    region = resolve_region(options["region"], configured, options["profile"])
    return open_session(options["profile"], region), region
