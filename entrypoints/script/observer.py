"""Observes a script that trains with Accelerate: steps, heartbeats, checkpoints and the stop.

Everything is called in the script's main thread and must cost microseconds: no collective, and no
wait for the device except once per logging interval.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from sm_train.entrypoints.base.sagemaker_paths import ResourceConfig
from sm_train.entrypoints.job_interface.events import EventLog
from sm_train.entrypoints.job_interface.job_config import JobConfig
from sm_train.entrypoints.monitoring.heartbeat import HeartbeatWriter, Phase
from sm_train.entrypoints.script.accelerate_loop import CountedOptimizer, loop_facts
from sm_train.entrypoints.script.loop_heartbeat import LoopHeartbeat
from sm_train.entrypoints.script.loop_log import LoopLog, StepValues
from sm_train.entrypoints.script.process_groups import keep_cpu_backends
from sm_train.entrypoints.script.ranks import ScriptRanks
from sm_train.entrypoints.script.script_saves import ScriptSaves
from sm_train.entrypoints.script.step_events import StepWindow

STOP_AGREEMENT_TIMEOUT = 60.0
"""Seconds that a rank waits at the last step for the others, of SageMaker's 120."""


class ScriptObserver:
    """Counts the steps of one rank and logs them on the main process.

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
        self._is_main = int(os.environ.get("RANK", "0")) == 0
        self._config, self._events = config, events
        self.loop = LoopHeartbeat(heartbeat, stop_request)
        self.log = LoopLog(config, resources, events, is_main=self._is_main)
        self.saves = ScriptSaves(config.entry or "", checkpoints, events, is_main=self._is_main)
        self.ranks: ScriptRanks | None = None
        self.stopped = False
        self._optimizers = CountedOptimizer()
        self._accelerator: Any = None
        self._loader: Any = None
        self._wait_started = 0.0
        self._has_begun = self._has_failed = False

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
        self.loop.take_over()

    def before_batch(self, loader: Any) -> None:
        """Begin to wait for a batch: of a prepared loader, where a requested stop takes place, or
        (None) of a loop that stops itself.
        """
        if loader is not None:
            self._stop_if_agreed()
        self._wait_started = time.perf_counter()
        self.loop.enter(Phase.DATA)

    def after_batch(self, loader: Any) -> None:
        """Got a batch."""
        self._loader, self.log.observes_data = loader, True
        self.log.window.data_wait_seconds += time.perf_counter() - self._wait_started
        self.loop.enter(Phase.STEP)

    def before_backward(self, accelerator: Any, loss: Any) -> None:
        """Begin a backward pass."""
        self._accelerator = accelerator
        if self._loader is None:
            self._stop_if_agreed()
        if self.loop.phase != Phase.STEP:
            self.loop.enter(Phase.STEP)
        if not self._has_begun and accelerator._optimizers:
            self._begin()
        if getattr(loss, "ndim", None) == 0:
            self.log.add_loss(loss)

    def clipped(self, norm: Any) -> None:
        """Take note of the gradient norm."""
        if norm is not None:
            self.log.norm = norm

    def after_step(self, optimizer: Any) -> None:
        """Count an optimizer step; of several optimizers, those of the first."""
        count = self._optimizers.count(optimizer, self._accelerator)
        if not count:
            return
        if not self._has_begun:
            self._begin()
        self.loop.step += count
        if self.log.add_steps(count):
            self.log.flush(self.loop.step, self._values())
        self.loop.enter(Phase.SCRIPT)

    def record_step(self, step: int, loss: Any, values: StepValues) -> None:
        """Count a step of a loop that reports its steps itself."""
        self.loop.step, self.log.own_values = step, values
        self.log.add_loss(loss)
        if self.log.add_steps(1):
            self.log.flush(step, values)
        self.loop.enter(Phase.SCRIPT)

    def before_save(self, accelerator: Any, output_dir: Any) -> None:
        """Begin to save; a folder below the checkpoints is incomplete from now on."""
        self.loop.enter(Phase.CHECKPOINT)
        self.saves.begin(accelerator, output_dir, self.loop.step, self.ranks)

    def after_save(self, saved: bool) -> None:
        """End a save; its folder is marked complete later, from another thread."""
        seconds = self.saves.end(saved=saved, step=self.loop.step, ranks=self.ranks)
        self.log.window.excluded_seconds += seconds
        self.loop.enter(Phase.SCRIPT)

    def loaded(self, accelerator: Any, input_dir: Any) -> None:
        """Count the steps from those of the loaded state on."""
        step = None if self._has_begun else self.saves.loaded(accelerator, input_dir)
        if step is not None:
            self.loop.step = self.loop.first_step = step
            self.loop.enter(Phase.START)

    # ------------------------------------------------------------------ events

    def _begin(self) -> None:
        """Log the actual configuration before the first step."""
        self.log.window = StepWindow()
        self._has_begun = True
        if self._is_main:
            optimizer, first = self._optimizers.current, self.loop.first_step
            self.log.begin(
                loop_facts(
                    self._accelerator, self._loader, optimizer, self._config, first_step=first
                )
            )

    def _values(self) -> StepValues:
        """Return the values of the last step: those that the loop reports, or the optimizer's."""
        if self.log.own_values is not None:
            return self.log.own_values
        rate = float(self._optimizers.current.param_groups[0]["lr"])
        return StepValues(rate, self.log.norm, getattr(self._loader, "iteration", None))

    # ------------------------------------------------------------------ stop and end

    def is_last_step(self) -> bool:
        """Return whether all ranks stop after the present step; waits until they agree on it."""
        ranks = self.ranks
        if ranks is None or ranks.stop.at is None:
            return False
        deadline = time.monotonic() + STOP_AGREEMENT_TIMEOUT
        while self.loop.step >= ranks.stop.at and not self.stopped:
            self.stopped = ranks.stop.agreed.wait(0.05) and self.loop.step >= ranks.stop.at
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
            self.saves.save_last(self._accelerator, self.loop.step)
            raise SystemExit(0)

    def finish(self) -> None:
        """Log the last steps, and what the script did not do."""
        own_loop, optimizer = self.log.own_values is not None, self._optimizers.current
        if optimizer is not None or own_loop:
            self.log.flush(self.loop.step, self._values())
        if not self._is_main or own_loop:
            return
        entry = self._config.entry
        if optimizer is None:
            reason = (
                "it took no step of an optimizer that Accelerator.prepare returned"
                if self.loop.active
                else "it creates no Accelerator; import sm_train offers a heartbeat and events"
            )
            self._events.warn("entry-no-steps", f"{entry}: no steps, speed and loss: {reason}")
        if self._optimizers.has_others:
            self._events.warn(
                "entry-several-optimizers",
                f"{entry}: the steps of one of its optimizers count, and `loss` is the mean of all "
                "backward passes",
            )
        if optimizer is not None and self.saves.last is None:
            self._events.warn(
                "entry-no-checkpoint",
                f"{entry} saved no state below the checkpoint folder: a lost job starts over",
            )

    def log_end(self) -> None:
        """Log how the script ended, after everything that it leaves has been written."""
        self.log.end(self.loop.step, "sigterm" if self.stopped else "done")
