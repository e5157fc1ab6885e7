"""Reports that checkpoints cannot be written, or do not reach storage: what would be lost."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sm_train.entrypoints.job_interface.checkpoint_layout import step_folder_name
from sm_train.entrypoints.job_interface.events import EventLog
from sm_train.entrypoints.job_interface.job_config import JobConfig
from sm_train.entrypoints.monitoring.alert_messages import AlertFormatter
from sm_train.entrypoints.monitoring.alert_sinks import AlertDispatcher
from sm_train.entrypoints.monitoring.alerts import REPEAT_SECONDS
from sm_train.entrypoints.monitoring.heartbeat import HeartbeatSample
from sm_train.entrypoints.monitoring.timeouts import call_with_timeout
from sm_train.entrypoints.records.upload_lag import MAX_LAG_SECONDS, is_behind
from sm_train.entrypoints.records.upload_notes import UploadedSteps, read_uploads

STORAGE_CHECK_SECONDS = 30.0
FAILED_SAVES = 3
"""Number of checkpoints in a row that cannot be written after which an alert is sent."""

_REPORTED_SAVES = 3
_DISK_TIMEOUT = 5.0


class FailedSavesReport:
    """Sends an alert when checkpoints cannot be written again and again, and when they can."""

    def __init__(self, dispatcher: AlertDispatcher, formatter: AlertFormatter) -> None:
        self._dispatcher, self._formatter = dispatcher, formatter
        self._is_open = False

    def check(self, samples: Sequence[HeartbeatSample]) -> None:
        """Compare the heartbeats of a node's processes with the limit."""
        failed = max((sample.failed_saves for sample in samples), default=0)
        step = max((sample.step for sample in samples), default=0)
        if failed >= FAILED_SAVES:
            self._is_open = True
            symptom = (
                f"{failed} checkpoints in a row could not be written, at step {step:,}; training "
                "continues, and what it does is lost with the job; the log has the reason "
                "(checkpoint-failed)"
            )
            self._dispatcher.send(self._formatter.not_saved(symptom))
        elif failed == 0 and self._is_open:
            self._is_open = False
            symptom = f"a checkpoint is complete, at step {step:,}"
            self._dispatcher.send(self._formatter.not_saved(symptom, resolved=True))


class StorageReport:
    """Compares what a node has saved with the notes of its uploads; call :meth:`check` now and
    then.
    """

    def __init__(
        self,
        config: JobConfig,
        checkpoints: Path,
        node: int,
        *,
        events: EventLog,
        dispatcher: AlertDispatcher,
        formatter: AlertFormatter,
    ) -> None:
        self._interval, self._checkpoints = config.checkpoint.every_steps, checkpoints
        self._node = node
        self._events, self._dispatcher, self._formatter = events, dispatcher, formatter
        self._saves = deque[tuple[int, float]](maxlen=_REPORTED_SAVES)
        self._restored: int | None = None
        self._is_started = False
        self._behind_since: float | None = None
        self._reported: float | None = None

    def check(self, now: float) -> None:
        """Warn, and send an alert, once the uploads have been behind for too long.

        ``now`` is in seconds of any clock.
        """
        uploads = call_with_timeout(_DISK_TIMEOUT, lambda: read_uploads(self._checkpoints), None)
        if uploads is None:
            return
        if not self._is_started:
            # What the folder holds before the first step was restored from storage.
            self._restored, self._is_started = uploads.newest, True
        newest_known = self._saves[-1][0] if self._saves else self._restored
        if uploads.newest is not None and uploads.newest != newest_known:
            self._saves.append((uploads.newest, now))
        stored = max((*uploads.uploaded, self._restored or 0))
        if uploads.newest is None or not is_behind(uploads.newest, stored, self._interval):
            self._resolve(stored)
            return
        if self._behind_since is None:
            self._behind_since = now
        if now - self._behind_since < MAX_LAG_SECONDS:
            return
        if self._reported is None or now - self._reported >= REPEAT_SECONDS:
            self._reported = now
            self._warn(uploads, stored, now - self._behind_since)

    def fields(self, now: float) -> dict[str, Any]:
        """Return what a heartbeat says of it: the newest saves with their age in seconds, and for
        how long this node's notes show storage behind them, None if it is not.
        """
        since = self._behind_since
        return {
            "saves": [[step, round(now - saved, 1)] for step, saved in self._saves],
            "unstored_seconds": None if since is None else round(now - since, 1),
        }

    def _warn(self, uploads: UploadedSteps, stored: int, seconds: float) -> None:
        saved = uploads.newest
        assert saved is not None
        if uploads.has_notes:
            uploaded = f"uploaded only {uploads.folder_of(stored)}" if stored else "uploaded none"
        else:
            uploaded = "nothing notes an upload"
        symptom = (
            f"node {self._node} has saved {uploads.folder_of(saved)}, and {uploaded} for "
            f"{seconds / 60:.0f} min; check that the job's role may write to the bucket"
        )
        self._events.warn("checkpoints-not-stored", symptom, step=saved, stored_step=stored)
        self._dispatcher.send(self._formatter.not_stored(symptom, self._node))

    def _resolve(self, stored: int) -> None:
        if self._reported is not None:
            symptom = f"node {self._node} has uploaded {step_folder_name(stored)}"
            self._dispatcher.send(self._formatter.not_stored(symptom, self._node, resolved=True))
        self._behind_since = self._reported = None
