"""Observes a script that trains with Accelerate: steps, heartbeats, checkpoints and the stop.

Everything is called in the script's main thread and must cost microseconds: no collective, and no
wait for the device except once per logging interval.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sm_train.entrypoints.common.checkpoint_layout import CheckpointMarker
from sm_train.entrypoints.common.events import EventLog
from sm_train.entrypoints.common.job_config import JobConfig
from sm_train.entrypoints.common.sagemaker_paths import ResourceConfig
from sm_train.entrypoints.common.signals import StopSignal
from sm_train.entrypoints.monitoring.heartbeat import HeartbeatWriter, Phase
from sm_train.entrypoints.script.process_groups import keep_cpu_backends
from sm_train.entrypoints.script.ranks import Save, ScriptRanks
from sm_train.entrypoints.script.saved_states import SavedState, name_for_step, saved_step
from sm_train.entrypoints.script.step_events import LoopFacts, StepEvents, StepWindow

STOP_AGREEMENT_TIMEOUT = 60.0
"""Seconds that a rank waits at the last step for the others, of SageMaker's 120."""

REPLACED_AFTER = 100
"""Steps of another optimizer in a row after which it counts as the successor of the first one.

A training of two networks may take several steps of one for each step of the other."""

_DEFAULT_NAME = "checkpoint-{step}"
"""Name of a checkpoint in the diffusers examples."""


@dataclass(frozen=True)
class OwnValues:
    """Values of the last step; ``gradient_norm`` is a number or a scalar tensor."""

    learning_rate: float | None
    gradient_norm: Any
    epoch: int | None


class ScriptObserver:
    """Counts the steps of one rank and logs them on the main process.

    ``step`` is the number of synchronized optimizer steps, including those before a resume.

    The observer becomes active with the first Accelerator: from then on only the main thread writes
    heartbeats, and a stop takes place at a step. It begins with the first backward pass or step of
    an optimizer, which shows what kind of loop it is; before that nothing is logged. Then a loop
    repeats DATA, STEP and SCRIPT; CHECKPOINT lasts while a save is open. Steps of other optimizers
    count only if they replace the first one for good. A failure of the observer is reported once,
    and the script continues without it.
    """

    def __init__(
        self,
        config: JobConfig,
        resources: ResourceConfig,
        checkpoints: Path,
        heartbeat: HeartbeatWriter,
        events: EventLog,
        stop_request: Path,
    ) -> None:
        self.step, self.first_step = 0, 0
        self.steps_per_second = 0.0
        self.active = False
        """Whether an Accelerator exists, so that the heartbeat belongs to the main thread."""
        self.stopped = False
        self.last_save: SavedState | None = None
        self.resumable = False
        """Whether the script takes a checkpoint to resume from."""
        self._config, self._resources = config, resources
        self._checkpoints, self._events = checkpoints, events
        self._heartbeat, self._stop_request = heartbeat, stop_request
        self._handover = threading.Lock()
        self.stop: StopSignal | None = None
        """Set once this process stops after a step; None while SIGTERM is the script's."""
        self._is_main = int(os.environ.get("RANK", "0")) == 0
        self._phase = Phase.START
        self._accelerator: Any = None
        self._loader: Any = None
        self._optimizer: Any = None
        self._steps_of_others: Counter[int] = Counter()
        self._several_optimizers = self._observes_data = False
        self._norm: Any = None
        self._wait_started = 0.0
        self._window = StepWindow()
        self._has_begun = False
        self._own_values: OwnValues | None = None
        self.step_events: StepEvents | None = None
        """Of the loop, once it has begun; on rank 0 only."""
        self._saving: str | None = None
        self._save_started = 0.0
        self._warned_elsewhere = self._has_failed = False
        self.ranks: ScriptRanks | None = None

    # ------------------------------------------------------------------ called by the hooks

    def failed(self, error: Exception) -> None:
        """Report the first failure of the observer; the script continues."""
        if not self._has_failed:
            self._has_failed = True
            message = f"the observer failed: {type(error).__name__}: {error}"
            self._events.warn("entry-observer", message)

    def created(self, accelerator: Any) -> None:
        """Take note of a new Accelerator, which has created the process group."""
        self._accelerator = accelerator
        keep_cpu_backends()
        self.take_over_signals()

    def take_over_signals(self) -> None:
        """Take the heartbeat over from the background, and SIGTERM unless the script handles it."""
        if self.active:
            return
        with self._handover:
            self.active = True
        self.enter(Phase.START)
        on_main_thread = threading.current_thread() is threading.main_thread()
        if on_main_thread and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            self.stop = StopSignal(self._stop_request)

    def before_batch(self, loader: Any) -> None:
        """Begin to wait for a batch: of a prepared loader, where a requested stop takes place, or
        (None) of a loop that stops itself.
        """
        if loader is not None and self.ranks is not None and self.ranks.stop.at is not None:
            self._stop_if_agreed()
        self._wait_started = time.perf_counter()
        self.enter(Phase.DATA)

    def after_batch(self, loader: Any) -> None:
        """Got a batch."""
        self._loader, self._observes_data = loader, True
        self._window.data_wait_seconds += time.perf_counter() - self._wait_started
        self.enter(Phase.STEP)

    def before_backward(self, accelerator: Any, loss: Any) -> None:
        """Begin a backward pass."""
        self._accelerator = accelerator
        if self._loader is None and self.ranks is not None and self.ranks.stop.at is not None:
            self._stop_if_agreed()
        if self._phase != Phase.STEP:
            self.enter(Phase.STEP)
        if not self._has_begun and accelerator._optimizers:
            self._begin()
        if self._is_main and getattr(loss, "ndim", None) == 0:
            self._window.losses.append(loss.detach())

    def clipped(self, norm: Any) -> None:
        """Take note of the gradient norm."""
        if norm is not None:
            self._norm = norm

    def after_step(self, optimizer: Any) -> None:
        """Count an optimizer step; of several optimizers, those of the first."""
        count = self._count(optimizer)
        if not count:
            return
        if not self._has_begun:
            self._begin(observes_loss=False)
        self.step += count
        self._window.steps += count
        if self._window.steps >= self._config.training.log_every:
            self._log_steps()
        self.enter(Phase.SCRIPT)

    def record_step(
        self,
        step: int,
        loss: Any,
        learning_rate: float | None,
        gradient_norm: Any,
        epoch: int | None,
    ) -> None:
        """Count a step of a loop that reports its steps itself."""
        self.step = step
        window = self._window
        window.steps += 1
        if loss is not None and self._is_main:
            window.losses.append(loss.detach())
        self._own_values = OwnValues(learning_rate, gradient_norm, epoch)
        if window.steps >= self._config.training.log_every:
            self._log_steps()
        self.enter(Phase.SCRIPT)

    def before_save(self, accelerator: Any, output_dir: Any) -> None:
        """Begin to save; a folder below the checkpoints is incomplete from now on."""
        self._saving = self._name_of(accelerator, output_dir)
        self._save_started = time.monotonic()
        self.enter(Phase.CHECKPOINT)
        if self._saving is not None and self.ranks is not None:
            self.ranks.begin_save(self._saving, self.step)

    def after_save(self, saved: bool) -> None:
        """End a save; its folder is marked complete later, from another thread."""
        seconds = time.monotonic() - self._save_started
        if self._saving is not None and self.ranks is not None:
            self.ranks.end_save(seconds=seconds if saved else None)
            if saved:
                self.last_save = SavedState(self._saving, self.step)
        self._saving = None
        self._window.excluded_seconds += seconds
        self.enter(Phase.SCRIPT)

    def loaded(self, accelerator: Any, input_dir: Any) -> None:
        """Count the steps from those of the loaded state on."""
        folder = _loaded_folder(accelerator, input_dir)
        step = None if folder is None else saved_step(folder)
        if folder is None or step is None or self._has_begun:
            return
        self.step = self.first_step = step
        root = self._checkpoints.resolve()
        if folder.is_relative_to(root):
            self.last_save = SavedState(folder.relative_to(root).as_posix(), step)
        self.enter(Phase.START)

    # ------------------------------------------------------------------ heartbeats and events

    def beat(self) -> None:
        """Show that the process lives; from another thread, while no Accelerator exists."""
        with self._handover:
            if not self.active:
                self._heartbeat.enter(Phase.SCRIPT, 0)

    def enter(self, phase: Phase) -> None:
        """Enter ``phase`` (again) at the present step."""
        self._phase = phase
        self._heartbeat.enter(phase, self.step)

    def _count(self, optimizer: Any) -> int:
        """Return how many steps a step of ``optimizer`` counts as: 0 if another one is counted.

        One that replaces the counted optimizer counts with the steps that it has taken since then.
        """
        if self._optimizer is None:
            self._optimizer = optimizer
        if optimizer is self._optimizer:
            self._steps_of_others.clear()
            return 1
        self._several_optimizers = True
        self._steps_of_others[id(optimizer)] += 1
        count = self._steps_of_others[id(optimizer)]
        prepared = getattr(self._accelerator, "_optimizers", ())
        if count < REPLACED_AFTER and any(item is self._optimizer for item in prepared):
            return 0
        self._optimizer = optimizer
        self._steps_of_others.clear()
        return count

    def _begin(self, *, observes_loss: bool = True) -> None:
        """Log the actual configuration before the first step."""
        self._window = StepWindow()
        self._has_begun = True
        if not self._is_main:
            return
        accelerator = self._accelerator
        backend = _backend(accelerator)
        precision = str(accelerator.mixed_precision)
        self.begin(
            LoopFacts(
                accelerator.num_processes,
                self._batch_size(),
                int(accelerator.gradient_accumulation_steps),
                self._num_parameters(),
                backend,
                "cluster.backend" if backend == "smddp" else "chosen by Accelerate",
                "fp32" if precision == "no" else precision,
                self.first_step,
                tuple(self._unobserved(observes_loss=observes_loss)),
            )
        )

    def begin(self, facts: LoopFacts) -> None:
        """Log the ``start`` event, on rank 0."""
        self.step_events = StepEvents(self._config, self._resources, self._events, facts)

    def _unobserved(self, *, observes_loss: bool) -> list[str]:
        """Return what the events of this script lack, each with the reason."""
        missing = []
        if not observes_loss:
            missing.append("loss: the script did not call Accelerator.backward")
        elif self._accelerator.num_processes > 1:
            missing.append("loss of the other processes: `loss` is that of rank 0")
        if self._loader is None:
            missing.append(
                "data wait and epoch: Accelerator.prepare got no loader; a stop takes place at "
                "the next backward pass"
            )
        return missing

    def _batch_size(self) -> int:
        """Return the samples of a batch on one rank: the loader's, else the run file's."""
        total = getattr(self._loader, "total_batch_size", None)
        if isinstance(total, int) and total > 0:
            return max(1, total // int(self._accelerator.num_processes))
        return self._config.stage.per_device_batch_size

    def _num_parameters(self) -> int:
        optimizers = [self._optimizer] if self._optimizer else self._accelerator._optimizers[:1]
        return sum(
            parameter.numel()
            for optimizer in optimizers
            for group in optimizer.param_groups
            for parameter in group["params"]
        )

    def _log_steps(self) -> None:
        """Log the interval that ends at this step."""
        window, self._window = self._window, StepWindow()
        if not window.steps:
            return
        self.steps_per_second = window.steps_per_second
        if self.step_events is not None:
            values = self._own_values or self._observed_values()
            self.step_events.step(
                self.step,
                window,
                learning_rate=values.learning_rate,
                gradient_norm=_local_value(values.gradient_norm),
                epoch=values.epoch,
                observes_data=self._observes_data,
            )
        self._norm = None

    def _observed_values(self) -> OwnValues:
        rate = float(self._optimizer.param_groups[0]["lr"])
        return OwnValues(rate, self._norm, getattr(self._loader, "iteration", None))

    # ------------------------------------------------------------------ checkpoints

    def _name_of(self, accelerator: Any, output_dir: Any) -> str | None:
        """Return the path of a save below the checkpoints; None if it is elsewhere."""
        folder = _saved_folder(accelerator, output_dir)
        root = self._checkpoints.resolve()
        if folder is not None and folder.is_relative_to(root) and folder != root:
            return folder.relative_to(root).as_posix()
        if self._is_main and not self._warned_elsewhere:
            self._warned_elsewhere = True
            self._events.warn(
                "entry-checkpoint-elsewhere",
                f"{self._config.entry} saves its state to {folder}, which is lost with the "
                "instance; pass {checkpoints} in entry_args, and save to a folder below it",
            )
        return None

    def log_checkpoint(self, save: Save, marker: CheckpointMarker) -> None:
        """Log a complete checkpoint; called on rank 0, from another thread."""
        size = sum(file.bytes for file in marker.files)
        self._events.write(
            "checkpoint",
            f"checkpoint at step {save.step}: {save.name}, {size:,} bytes",
            step=save.step,
            path=str(self._checkpoints / save.name),
            bytes=size,
            seconds=save.seconds,
        )

    # ------------------------------------------------------------------ stop and end

    def is_last_step(self) -> bool:
        """Return whether all ranks stop after the present step; waits until they agree on it."""
        ranks = self.ranks
        if ranks is None or ranks.stop.at is None:
            return False
        deadline = time.monotonic() + STOP_AGREEMENT_TIMEOUT
        while self.step >= ranks.stop.at and not self.stopped:
            self.stopped = ranks.stop.agreed.wait(0.05) and self.step >= ranks.stop.at
            if time.monotonic() > deadline:
                self._events.warn("stop-not-agreed", "the ranks did not agree on a last step")
                raise SystemExit(0)
        return self.stopped

    def _stop_if_agreed(self) -> None:
        """End the script after the step that all ranks agreed on, with a checkpoint.

        Raises:
            SystemExit: the script ends, with code 0.
        """
        if self.is_last_step():
            self._save_last()
            raise SystemExit(0)

    def _save_last(self) -> None:
        """Save where the script would look for it, unless it has just saved or cannot resume."""
        saved, accelerator = self.last_save, self._accelerator
        if saved is not None and saved.step == self.step:
            return
        if accelerator.project_configuration.automatic_checkpoint_naming and saved is not None:
            accelerator.save_state()
            return
        name = _DEFAULT_NAME.format(step=self.step) if self.resumable else None
        if saved is not None:
            name = name_for_step(saved, self.step)
        if name is not None:
            accelerator.save_state(str(self._checkpoints / name))
        elif self._is_main:
            last = f"the last one is {saved.name}" if saved else "the script saves none"
            self._events.warn(
                "stop-without-checkpoint",
                f"stopped at step {self.step} without a checkpoint: {last}",
            )

    def finish(self) -> None:
        """Log the last steps, and what the script did not do."""
        own_loop = self._own_values is not None
        if self._optimizer is not None or own_loop:
            self._log_steps()
        if not self._is_main or own_loop:
            return
        entry = self._config.entry
        if self._optimizer is None:
            reason = (
                "it took no step of an optimizer that Accelerator.prepare returned"
                if self.active
                else "it creates no Accelerator; import sm_train offers a heartbeat and events"
            )
            self._events.warn("entry-no-steps", f"{entry}: no steps, speed and loss: {reason}")
        if self._several_optimizers:
            self._events.warn(
                "entry-several-optimizers",
                f"{entry}: the steps of one of its optimizers count, and `loss` is the mean of all "
                "backward passes",
            )
        if self._optimizer is not None and self.last_save is None:
            self._events.warn(
                "entry-no-checkpoint",
                f"{entry} saved no state below the checkpoint folder: a lost job starts over",
            )

    def log_end(self) -> None:
        """Log how the script ended, after everything that it leaves has been written."""
        reason = "sigterm" if self.stopped else "done"
        if self.step_events is not None:
            self.step_events.end(self.step, reason)
            return
        self._events.write(
            "end",
            f"{self._config.entry} ended: {reason}",
            step=self.step,
            reason=reason,
            training_seconds=0.0,
            images=0,
            steps_per_second=None,
        )


def _saved_folder(accelerator: Any, output_dir: Any) -> Path | None:
    """Return the folder that ``save_state`` writes to: Accelerate may number it."""
    project = accelerator.project_configuration
    if project.automatic_checkpoint_naming:
        name = f"checkpoint_{project.iteration}"
        return Path(accelerator.project_dir, "checkpoints", name).resolve()
    return None if output_dir is None else Path(output_dir).resolve()


def _loaded_folder(accelerator: Any, input_dir: Any) -> Path | None:
    """Return the folder that ``load_state`` has read: without a name, the last numbered one."""
    if input_dir is not None:
        return Path(input_dir).expanduser().resolve()
    numbered = Path(accelerator.project_dir, "checkpoints").resolve().glob("checkpoint_*")
    return max(numbered, key=lambda folder: int(folder.name.rpartition("_")[2]), default=None)


def _local_value(tensor: Any) -> float | None:
    """Return a scalar; None for one that is distributed over the ranks."""
    return None if tensor is None or hasattr(tensor, "full_tensor") else float(tensor)


def _backend(accelerator: Any) -> str:
    """Return the name of the process group's backend, as in the ``start`` event."""
    if accelerator.num_processes == 1:
        return "none"
    import torch.distributed as dist

    return str(dist.get_backend()) if dist.is_initialized() else "none"
