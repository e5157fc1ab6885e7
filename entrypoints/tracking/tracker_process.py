"""The process of one tracker: reads events from standard input until it is closed.

It has no part in the training: whatever the tracker's client does, the training loses only what
the tracker would have shown.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import TextIO

from sm_train.entrypoints.base.sagemaker_paths import SageMakerPaths
from sm_train.entrypoints.base.signals import kill_group_after_parent
from sm_train.entrypoints.job_interface.events import PREFIX, EventLog
from sm_train.entrypoints.job_interface.job_config import JobConfig, TrackerConfig, read_job_config
from sm_train.entrypoints.monitoring.secret_values import SecretError, read_key, redact
from sm_train.entrypoints.tracking.mlflow_tracker import MlflowTracker
from sm_train.entrypoints.tracking.packages import ensure_packages
from sm_train.entrypoints.tracking.tensorboard_files import TensorBoardFiles
from sm_train.entrypoints.tracking.tracker import FOLDER, Tracker, TrackerRun, tracker_run_id
from sm_train.entrypoints.tracking.wandb_tracker import WandbTracker

_NICENESS = 10
"""The niceness of this process, of the client's own and of pip: the training needs the CPU."""

EXIT_TIMEOUT = 60.0
"""Seconds after the end of the events, or of the training process, in which the tracker must have
sent everything."""


def main() -> None:
    """Feed the tracker; always exit with 0, a failure is a warning event."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--document", type=Path, required=True)
    parser.add_argument("--stage", required=True)
    parser.add_argument("--tracker", required=True)
    parser.add_argument("--node-event", type=Path, required=True)
    parser.add_argument("--parent", type=int, required=True)
    options = parser.parse_args()
    kill_group_after_parent(options.parent, EXIT_TIMEOUT)
    for number in (signal.SIGINT, signal.SIGTERM):
        # The end of the events ends this process.
        signal.signal(number, signal.SIG_IGN)
    os.nice(_NICENESS)
    config = read_job_config(options.document, options.stage)
    tracker = next(candidate for candidate in config.trackers if candidate.name == options.tracker)
    with _quiet() as stream:
        events = EventLog(node=0, rank=0, stream=stream)
        process = TrackerProcess(config, tracker, events, options.node_event)
        process.run(sys.stdin)
        stream.flush()
        # Without waiting for the threads of a client.
        os._exit(0)


def _quiet() -> TextIO:
    """Discard the output of clients, which could contain anything; return that of this module."""
    stream = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    with Path(os.devnull).open("w") as nothing:
        for output in (sys.stdout, sys.stderr):
            os.dup2(nothing.fileno(), output.fileno())
    return stream


class TrackerProcess:
    """Feeds one tracker; the first failure is logged, and the number of events it misses."""

    def __init__(
        self, config: JobConfig, tracker: TrackerConfig, events: EventLog, node_event: Path
    ) -> None:
        """``node_event`` is the file in which this node's watchdog keeps its last event."""
        self._config, self._settings, self._events = config, tracker, events
        self._node_event, self._last_node_event = node_event, ""
        self._key: str | None = None
        self._has_warned = False
        self._failed = 0

    def run(self, lines: Iterable[str]) -> None:
        """Add the event lines to the tracker until they end; never raises."""
        run = None
        try:
            run = self._create()
        except Exception as error:
            self._warn(str(error))
        total = 0
        for line in lines:
            total += 1
            try:
                if run is None:
                    self._failed += 1
                else:
                    run.add(json.loads(line.removeprefix(PREFIX)))
                    self._add_node_event(run)
            except Exception as error:
                self._failed += 1
                self._warn(f"{type(error).__name__}: {error}")
        timer = threading.Timer(EXIT_TIMEOUT, os._exit, [0])
        timer.daemon = True
        timer.start()
        try:
            if run is not None:
                run.close()
        except Exception as error:
            self._warn(f"{type(error).__name__}: {error}")
        if self._failed:
            self._events.warn(
                "tracker-incomplete",
                f"{self._settings.name} lacks {self._failed} of {total} events; `sm-train review "
                "--export` has all",
                tracker=self._settings.name,
            )

    def _add_node_event(self, run: TrackerRun) -> None:
        """Add the watchdog's last event, unless it has been added or there is none yet."""
        try:
            line = self._node_event.read_text(encoding="utf-8")
        except OSError:
            return
        if line != self._last_node_event:
            self._last_node_event = line
            run.add(json.loads(line.removeprefix(PREFIX)))

    def _create(self) -> TrackerRun:
        ensure_packages(self._settings)
        if self._settings.secret is not None:
            try:
                self._key = read_key(self._settings.secret)
            except SecretError as error:
                self._warn(f"the key cannot be read: {error}")
        paths = SageMakerPaths.from_environment()
        tracker = self._tracker(paths.checkpoints / FOLDER)
        return TrackerRun(tracker, self._config, paths.checkpoints, self._warn)

    def _tracker(self, folder: Path) -> Tracker:
        local = "SAGEMAKER_BASE_DIR" in os.environ
        run_id = tracker_run_id(self._config, local=local)
        if self._settings.name == "tensorboard":
            return TensorBoardFiles(folder / "tensorboard" / run_id)
        kind = WandbTracker if self._settings.name == "wandb" else MlflowTracker
        return kind(
            self._settings, self._config.run, run_id, folder / self._settings.name, self._key
        )

    def _warn(self, reason: str) -> None:
        """Log the first problem, as one line without the key."""
        if self._has_warned:
            return
        self._has_warned = True
        text = " ".join(reason.split())[:500]
        if self._key is not None:
            text = redact(text, self._key)
        self._events.warn(
            "tracker-failed",
            f"tracker {self._settings.name}: {text}; training continues",
            tracker=self._settings.name,
        )


if __name__ == "__main__":
    main()
