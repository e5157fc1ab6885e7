"""What a training loop of the user's own builds on: its job, heartbeats and events."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from sm_train.entrypoints.base.error import Error
from sm_train.entrypoints.base.sagemaker_paths import SageMakerPaths
from sm_train.entrypoints.job_interface.events import EventLog
from sm_train.entrypoints.job_interface.job_config import StageConfig
from sm_train.entrypoints.monitoring.heartbeat import Phase
from sm_train.entrypoints.script.loop_log import StepValues
from sm_train.entrypoints.script.observer import ScriptObserver
from sm_train.entrypoints.script.ranks import ScriptRank
from sm_train.entrypoints.script.step_events import LoopFacts

if TYPE_CHECKING:
    import torch
    from sm_train.entrypoints.base.sagemaker_paths import ResourceConfig
    from sm_train.entrypoints.job_interface.job_config import JobConfig

_PHASES = {
    "data": Phase.DATA,
    "step": Phase.STEP,
    "checkpoint": Phase.CHECKPOINT,
    "evaluation": Phase.EVALUATION,
    "other": Phase.SCRIPT,
}


@dataclass(frozen=True)
class ScriptProcess:
    """What the process that runs the script knows of its job."""

    config: JobConfig
    paths: SageMakerPaths
    resources: ResourceConfig
    rank: ScriptRank
    observer: ScriptObserver
    events: EventLog


_process: ScriptProcess | None = None


def set_process(process: ScriptProcess) -> None:
    """Make this process's job known to the building blocks."""
    global _process
    _process = process


def script_process() -> ScriptProcess:
    """Return this process's job.

    Raises:
        Error: the script was not started as a job's ``entry``.
    """
    if _process is None:
        raise Error(
            "there is no job: start the script as `entry` of a run file, on this machine with "
            "`sm-train submit run.yaml --local`"
        )
    return _process


@dataclass(frozen=True)
class CurrentJob:
    """This process and its job: ranks, folders, and the stage of the run file.

    ``checkpoints`` and ``model`` are folders that SageMaker uploads.
    """

    rank: int
    local_rank: int
    world_size: int
    device: torch.device
    stage: StageConfig
    seed: int
    checkpoint_every: int
    checkpoints: Path
    model: Path

    def channel(self, name: str) -> Path:
        """Return the folder of an input channel; that of `data.uri` is ``train``."""
        return script_process().paths.channel(name)

    def should_stop(self, step: int) -> bool:
        """Return whether this is the job's last step; equal on all ranks, without a collective.

        Call it after each step, on every rank. A stop is requested by SIGTERM: at a spot
        interruption, at the budget, or by `sm-train stop`.
        """
        observer = script_process().observer
        observer.loop.step = step
        return observer.is_last_step()


def current_job() -> CurrentJob:
    """Return the job of this process, and join its process group if it has several.

    Raises:
        Error: the script was not started as a job's ``entry``.
    """
    import torch
    import torch.distributed as dist

    process = script_process()
    rank, config = process.rank, process.config
    use_gpu = torch.cuda.is_available() and os.environ.get("ACCELERATE_USE_CPU") != "true"
    device = torch.device("cuda", rank.local_rank) if use_gpu else torch.device("cpu")
    if use_gpu:
        torch.cuda.set_device(device)
    if rank.world_size > 1 and not dist.is_initialized():
        dist.init_process_group("nccl" if use_gpu else "gloo")
    process.observer.loop.take_over()
    return CurrentJob(
        rank.rank,
        rank.local_rank,
        rank.world_size,
        device,
        config.stage,
        config.training.seed,
        config.checkpoint.every_steps,
        process.paths.checkpoints,
        process.paths.model,
    )


class Heartbeat:
    """Reports to the watchdog what this rank does, so that it finds a stall and its cause.

    ``ShardDataset``, ``Checkpointer`` and ``EventLog`` send heartbeats themselves;
    use this class around other work.
    """

    def __init__(self) -> None:
        self._loop = script_process().observer.loop

    def enter(
        self, phase: Literal["data", "step", "checkpoint", "evaluation", "other"], step: int
    ) -> None:
        """Enter ``phase`` (again) after ``step`` optimizer steps.

        The timeouts of all phases but "other" are learned from their durations.
        """
        self._loop.step = step
        self._loop.enter(_PHASES[phase])


class LoopEventLog:
    """Logs the loop's steps as events, for `watch`, `review`, `cost --measured` and CloudWatch."""

    def __init__(
        self,
        *,
        parameters: int = 0,
        batch_size: int | None = None,
        gradient_accumulation_steps: int = 1,
        precision: str = "fp32",
        first_step: int = 0,
    ) -> None:
        """Log the ``start`` event; ``batch_size`` of one rank is the run file's by default."""
        self._process = process = script_process()
        self._observer = process.observer
        loop = self._observer.loop
        loop.step = loop.first_step = first_step
        if process.rank.rank == 0:
            self._observer.log.begin(
                LoopFacts(
                    process.rank.world_size,
                    batch_size or process.config.stage.per_device_batch_size,
                    gradient_accumulation_steps,
                    parameters,
                    _backend(),
                    "chosen by the script",
                    precision,
                    first_step,
                )
            )

    def step(
        self,
        step: int,
        loss: torch.Tensor | None = None,
        *,
        learning_rate: float | None = None,
        gradient_norm: torch.Tensor | float | None = None,
        epoch: int | None = None,
    ) -> None:
        """Log step number ``step``, which has ended; an event follows every `log_every` steps.

        ``loss`` is a scalar of this rank; it is read from the device only for an event.
        """
        values = StepValues(learning_rate, gradient_norm, epoch)
        self._observer.record_step(step, loss, values)

    def warn(self, code: str, message: str, **fields: Any) -> None:
        """Log a warning, which `watch` and `review` show."""
        self._process.events.warn(code, message, **fields)


def _backend() -> str:
    import torch.distributed as dist

    return str(dist.get_backend()) if dist.is_initialized() else "none"
