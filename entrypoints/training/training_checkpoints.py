"""A training's checkpoints: what they hold, what a resume takes from one, and rollbacks."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from accelerate import Accelerator
from sm_train.entrypoints.base.sagemaker_paths import SageMakerPaths
from sm_train.entrypoints.checkpoints import checkpoint_files
from sm_train.entrypoints.checkpoints.async_checkpointer import AsyncCheckpointer, CheckpointRank
from sm_train.entrypoints.checkpoints.checkpoint_files import CheckpointInfo
from sm_train.entrypoints.checkpoints.host_snapshot import HostSnapshot
from sm_train.entrypoints.checkpoints.stored_steps import StoredSteps
from sm_train.entrypoints.data_loading.shard_catalog import DataRank
from sm_train.entrypoints.distributed.object_exchange import all_gather
from sm_train.entrypoints.job_interface.checkpoint_layout import (
    PROGRESS_FILE,
    SAMPLER_FILE,
    SETTINGS_FILE,
    LastCheckpointError,
)
from sm_train.entrypoints.job_interface.events import EventLog
from sm_train.entrypoints.job_interface.job_config import JobConfig
from sm_train.entrypoints.job_interface.node_description import uploads_checkpoints
from sm_train.entrypoints.models.builder import ModelComponents
from sm_train.entrypoints.training import run_settings
from sm_train.entrypoints.training.step_metrics import MAX_LISTED, RECENT_STEPS, MetricsLogger
from sm_train.entrypoints.training.train_state import TrainState


class DivergedError(RuntimeError):
    """Further training would only cost money; the message is one line."""


class TrainingCheckpoints:
    """Saves ``state`` and restores it; all ranks call each method after the same step."""

    def __init__(
        self,
        config: JobConfig,
        components: ModelComponents,
        accelerator: Accelerator,
        state: TrainState,
        paths: SageMakerPaths,
        events: EventLog,
        data_rank: DataRank,
    ) -> None:
        self._config, self._components, self._accelerator = config, components, accelerator
        self._state, self._events = state, events
        self._rollbacks = 0
        self._writer = AsyncCheckpointer(
            paths.checkpoints,
            CheckpointRank.of(data_rank, accelerator.process_index, accelerator.num_processes),
            fingerprint=state.fingerprint,
            keep=config.checkpoint.keep_last,
            events=events,
            all_gather=all_gather,
            background=state.background,
            stored=StoredSteps(paths.checkpoints, uploads=uploads_checkpoints(paths)),
        )

    def resume(self, checkpoint: CheckpointInfo) -> None:
        """Load the state of a checkpoint, and log what the run file has changed since.

        Raises:
            CheckpointError: it belongs to another model.
        """
        self._state.restore(checkpoint)
        self._writer.stored.restored(checkpoint.step)
        self._warn_of_changes(checkpoint)
        # A rollback before this job's first checkpoint returns here.
        self.snapshot.take(self._state.step, self._state.tensors(), self._state.progress())

    @property
    def snapshot(self) -> HostSnapshot:
        """The copy of the last checkpoint's state in memory."""
        return self._writer.snapshot

    @property
    def is_pending(self) -> bool:
        """Whether a checkpoint is not complete yet."""
        return self._writer.step is not None

    @property
    def is_writing(self) -> bool:
        """Whether this rank is still writing one."""
        return self._writer.writing

    def start(self, sampler: bytes) -> None:
        """Start to save the current step, after finishing the previous checkpoint.

        ``sampler`` is the position in the data.
        """
        self.finish()
        progress = self._state.progress()
        files: dict[str, Callable[[Path], None]] = {}
        if self._accelerator.is_main_process:
            files = {
                PROGRESS_FILE: checkpoint_files.save_bytes(json.dumps(progress).encode()),
                SETTINGS_FILE: checkpoint_files.save_bytes(self.settings_file()),
                SAMPLER_FILE: checkpoint_files.save_bytes(sampler),
            }
        self._writer.save_async(self._state.step, self._state.tensors(), progress, files)

    def finish(self) -> None:
        """Wait until a pending checkpoint is written, and complete it."""
        if self.is_pending:
            self._writer.wait()
            self._writer.commit()

    def commit(self) -> None:
        """Complete the pending checkpoint, which all ranks have written."""
        self._writer.commit()

    @property
    def failures(self) -> int:
        """The number of checkpoints that could not be written since the newest complete one."""
        return self._writer.failures

    def require_last(self) -> None:
        """Refuse to end as stopped if the last checkpoint could not be written.

        Raises:
            LastCheckpointError: it could not.
        """
        if self._writer.failures:
            raise LastCheckpointError(
                f"stopped without a checkpoint of step {self._state.step}: {self._writer.failure}"
            )

    def check_share_of_skipped(self, metrics: MetricsLogger) -> None:
        """End a training that skips too many of its latest steps, though not in succession.

        Raises:
            DivergedError: more than ``training.max_nonfinite_share`` of them were skipped.
        """
        share, recent = self._config.training.max_nonfinite_share, metrics.skips.recent
        if recent > share * RECENT_STEPS:
            self.finish()
            raise DivergedError(
                f"{recent} of the last {RECENT_STEPS} steps up to step {self._state.step} had no "
                f"finite gradient, more than training.max_nonfinite_share ({share:g}) allows"
                f"{_nonfinite_samples(metrics)}; remove these samples, or lower the learning rate; "
                "earlier checkpoints are intact"
            )

    def roll_back(self, metrics: MetricsLogger) -> None:
        """Restore the last snapshot; the data continue, so that other samples follow.

        Raises:
            DivergedError: there is no snapshot, or the run file allows no more rollbacks.
        """
        self.finish()
        step, skipped = self._state.step, metrics.skips.consecutive
        snapshot = self.snapshot
        if snapshot.step is None or self._rollbacks >= self._config.training.max_rollbacks:
            samples = _nonfinite_samples(metrics)
            raise DivergedError(
                f"{skipped} steps in a row had no finite gradient, up to step {step}{samples}"
                "; lower the learning rate or lengthen the warm-up; earlier checkpoints are intact"
            )
        self._state.roll_back(snapshot)
        self._rollbacks += 1
        metrics.skips.restart_run()
        if self._accelerator.is_main_process:
            self._events.warn(
                "rolled-back",
                f"{skipped} steps in a row had no finite gradient: rolled back from step {step} to "
                f"the state of step {snapshot.step}; training continues with the next data",
                step=snapshot.step,
            )

    def settings_file(self) -> bytes:
        """Return what a checkpoint records of the settings of this training."""
        return run_settings.settings_file(
            run_settings.target(self._config, self._components),
            run_settings.course(self._config, self._accelerator.num_processes),
            self._components.identities,
            self._config.stage.resolution,
            self._state.next_learning_rate,
        )

    def _warn_of_changes(self, checkpoint: CheckpointInfo) -> None:
        course = run_settings.course(self._config, self._accelerator.num_processes)
        rate = self._state.next_learning_rate
        changes = run_settings.course_changes(checkpoint.folder, course, rate)
        if changes and self._accelerator.is_main_process:
            message = f"since the checkpoint of step {checkpoint.step}: {'; '.join(changes)}"
            self._events.warn("settings-changed", message)


def _nonfinite_samples(metrics: MetricsLogger) -> str:
    """Return the part of a message that names the samples of all ranks' non-finite losses."""
    samples = [sample for sample in all_gather(metrics.last_nonfinite_loss) if sample]
    return f"; non-finite loss in {'; '.join(samples[:MAX_LISTED])}" if samples else ""
