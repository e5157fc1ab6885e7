"""What every training process does around its training: configuration, doctor, heartbeat, end.

torchrun, smddprun and ``accelerate launch`` each start one process per GPU with
``SCRIPT --stage NAME`` from the unpacked bundle.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from sm_train.entrypoints.base.digests import message_key
from sm_train.entrypoints.base.sagemaker_paths import ResourceConfig, SageMakerPaths
from sm_train.entrypoints.distributed.backend import adopt_mpi_variables
from sm_train.entrypoints.distributed.messages import use_job_key
from sm_train.entrypoints.job_interface.events import EventLog
from sm_train.entrypoints.job_interface.job_config import JOB_FILE, JobConfig, read_job_config
from sm_train.entrypoints.launcher.start_doctor import effective_mode, examine
from sm_train.entrypoints.monitoring.first_failure import (
    LOST_NODE_SECONDS,
    SETTLE_SECONDS,
    is_disconnection,
)
from sm_train.entrypoints.monitoring.heartbeat import ExitState, HeartbeatWriter
from sm_train.entrypoints.monitoring.start_monitoring import heartbeat, watchdog
from sm_train.entrypoints.tracking.feed import TrackerFeeds, tracker_feeds

CAUSE_TIMEOUT = LOST_NODE_SECONDS + 2 * SETTLE_SECONDS
"""Seconds in which the watchdog finds out why a peer is gone."""


@dataclass(frozen=True)
class TrainingProcess:
    """One process of a job: its stage's configuration, its folders, heartbeat and trackers."""

    config: JobConfig
    paths: SageMakerPaths
    heartbeat: HeartbeatWriter
    trackers: TrackerFeeds

    def end_hanging_job(self, message: str) -> NoReturn:
        """End the process from another thread; the watchdog must not take it for a crash."""
        self.heartbeat.end(ExitState.FAILED)
        report_failure(RuntimeError(message), self.paths)
        exit_now(1)


def run_job(
    train: Callable[[TrainingProcess], None],
    arguments: list[str] | None = None,
    *,
    prepare: Callable[[], None] = lambda: None,
) -> int:
    """Run ``train`` in this process; return the exit code, 0 when done or stopped, else 1.

    ``prepare`` runs before the doctor. A failure writes its cause to SageMaker's failure file and
    logs it as an event.
    """
    paths = SageMakerPaths.from_environment()
    with contextlib.ExitStack() as watched:
        try:
            options = _parse_options(arguments)
            config = read_job_config(options.document, options.stage)
            use_job_key(message_key(options.document))
            adopt_mpi_variables()
            prepare()
            _run_doctor(config, paths, options)
            if not options.doctor_only:
                watched.enter_context(watchdog(options.document, options.stage))
                trackers = watched.enter_context(tracker_feeds(config, options.document))
                with heartbeat() as writer:
                    train(TrainingProcess(config, paths, writer, trackers))
        except Exception as error:
            report_failure(error, paths)
            return 1
    return 0


def exit_now(code: int) -> NoReturn:
    """Exit without running destructors or exit handlers."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _parse_options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train one stage of a run.", allow_abbrev=False)
    parser.add_argument("--stage", required=True)
    parser.add_argument("--document", type=Path, default=Path(sys.argv[0]).parent / JOB_FILE)
    # A hyperparameter needs a value, and the container toolkit writes it as Python would.
    parser.add_argument("--doctor-only", choices=("true", "True"))
    # The platform passes its own hyperparameters as further arguments.
    return parser.parse_known_args(arguments)[0]


def _run_doctor(config: JobConfig, paths: SageMakerPaths, options: argparse.Namespace) -> None:
    """Run the doctor on the cluster if the run file enables it or the job is for it alone.

    Raises:
        UnfitClusterError: the run file forbids training on such a cluster.
    """

    doctor_mode = effective_mode(config, ResourceConfig.read(paths))
    if doctor_mode != "off" or options.doctor_only:
        # A doctor-only job reports its verdict and succeeds.
        fail = doctor_mode == "fail" and not options.doctor_only
        examine(config, options.document, fail=fail)


def report_failure(error: Exception, paths: SageMakerPaths) -> None:
    """Log the cause as an event; the first rank to fail also writes the failure file.

    A rank whose peer is gone waits for the watchdog to write it: the peer is the cause.
    """
    cause = f"{type(error).__name__}: {error}"
    resources = ResourceConfig.read(paths)
    rank = int(os.environ.get("RANK", "0"))
    EventLog(node=resources.node_rank, rank=rank).write(
        "error", f"rank {rank} failed: {cause}", code=type(error).__name__, message=cause
    )
    traceback.print_exception(error)
    sys.stderr.flush()
    if is_disconnection(cause):
        deadline = time.monotonic() + CAUSE_TIMEOUT
        while not paths.failure.exists() and time.monotonic() < deadline:
            time.sleep(0.1)
    paths.write_failure(f"rank {rank}: {cause}\n\n{''.join(traceback.format_exception(error))}")
