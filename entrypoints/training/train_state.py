"""Everything that a training step changes: weights, optimizer, learning rate, EMA."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from sm_train.entrypoints.checkpoints import checkpoint_files
from sm_train.entrypoints.checkpoints.background import BackgroundWork
from sm_train.entrypoints.checkpoints.host_snapshot import HostSnapshot
from sm_train.entrypoints.checkpoints.sharded_tensors import ShardedTensorError, ShardSpec
from sm_train.entrypoints.distributed.fsdp import sharded_modules
from sm_train.entrypoints.distributed.local_shard import LocalShard, is_dtensor, to_local
from sm_train.entrypoints.job_interface.checkpoint_layout import PROGRESS_FILE
from sm_train.entrypoints.job_interface.job_config import JobConfig, JobConfigError, StageConfig
from sm_train.entrypoints.training.ema import ExponentialMovingAverage
from sm_train.entrypoints.training.lr_schedule import LearningRate, build_schedule
from sm_train.entrypoints.training.optimizer_state import UnsavableStateError
from sm_train.entrypoints.training.optimizers import build_optimizers, is_fused_adamw
from sm_train.entrypoints.training.state_dict import TrainStateDict, trained_parameters
from torch import Tensor, nn


class TrainState:
    """One rank's replica of ``module``, or its shard if the module is sharded.

    Optimizers and the EMA work on the local shards, without any communication. ``step`` is the
    number of optimizer steps taken. ``base_digest`` identifies frozen weights of the module, None
    if all are trained.
    """

    def __init__(
        self, config: JobConfig, module: nn.Module, base_digest: str | None = None
    ) -> None:
        training = config.training
        self.module = module
        named = dict(trained_parameters(module))
        self.parameters = [*named.values()]
        self.background = BackgroundWork(self.parameters[0].device)
        self._sharded = any(is_dtensor(parameter) for parameter in self.parameters)
        self._local_weights: list[Tensor] = [*self.parameters]
        if self._sharded:
            # Plain tensors that share the DTensors' memory: optimizers and EMA see local rows only.
            self._local_weights = [
                to_local(parameter).detach().requires_grad_() for parameter in self.parameters
            ]
        self._optimizers = build_optimizers(
            training.optimizer,
            dict(zip(named, self._local_weights, strict=True)),
            config.stage.learning_rate,
            sharded=self._sharded,
        )
        self._fused = all(map(is_fused_adamw, self._optimizers))
        name = training.optimizer.name
        # The optimizer whose state is checked after the first step; AdamW's is known.
        self._unchecked_optimizer = None if name == "adamw" else name
        self._max_grad_norm = training.max_grad_norm
        self._rate = LearningRate(self._optimizers, build_schedule(config))
        self._ema: ExponentialMovingAverage | None = None
        self._ema_is_behind = False
        if training.ema_decay:
            self._ema = ExponentialMovingAverage(
                self._local_weights, training.ema_decay, training.ema_start
            )
        self.step = 0
        self.fingerprint = checkpoint_files.architecture_hash(module.state_dict(), base_digest)
        self._state_dict = TrainStateDict(module, self._local_weights, self._optimizers, self._ema)

    @property
    def learning_rate(self) -> float:
        """The learning rate of the last step, of the first group of weights."""
        return self._rate.last

    @property
    def next_learning_rate(self) -> float:
        """The learning rate of the next step, of the first group of weights."""
        return self._rate.current

    def update(self, norm: Tensor) -> Tensor:
        """Clip the gradients and take one optimizer step, unless they are not finite.

        ``norm`` is the gradients' norm over all ranks, a scalar. Return a scalar, 1.0 if the step
        was skipped. The EMA is one step behind until :meth:`start_ema_update`.
        """
        self._wait_for_background()
        if self._sharded:
            for parameter, weight in zip(self.parameters, self._local_weights, strict=True):
                weight.grad = None if parameter.grad is None else to_local(parameter.grad)
        skipped = (~torch.isfinite(norm)).float()
        excess = torch.clamp(norm / self._max_grad_norm, min=1.0)
        if self._fused:
            self._step_fused(excess, skipped)
        else:
            self._step_separately(excess, skipped)
        self._rate.advance()
        self.zero_grad()
        self._ema_is_behind = self._ema is not None
        self.step += 1
        return skipped

    def _step_fused(self, excess: Tensor, skipped: Tensor) -> None:
        """Step with AdamW's fused kernel.

        It divides gradients by grad_scale as it reads them: clipping takes no extra pass over
        memory. On a GPU it reads found_inf and skips the update itself, so the CPU need not wait
        for the norm.
        """
        for optimizer in self._optimizers:
            optimizer.grad_scale = excess  # type: ignore[attr-defined]
            if excess.is_cuda:
                optimizer.found_inf = skipped  # type: ignore[attr-defined]
                optimizer.step()
            elif not skipped.item():
                optimizer.step()

    def _step_separately(self, excess: Tensor, skipped: Tensor) -> None:
        """Clip, then step, unless the gradients are not finite: the CPU waits for the norm."""
        if skipped.item():
            return
        gradients = [weight.grad for weight in self._local_weights if weight.grad is not None]
        torch._foreach_mul_(gradients, 1.0 / excess)
        for optimizer in self._optimizers:
            optimizer.step()
        if self._unchecked_optimizer is not None:
            name, self._unchecked_optimizer = self._unchecked_optimizer, None
            self._check_state(name)

    def _check_state(self, optimizer: str) -> None:
        """Check that checkpoints can hold the optimizer's state.

        Raises:
            JobConfigError: they cannot.
        """
        try:
            self._state_dict.optimizer.check()
        except UnsavableStateError as error:
            raise JobConfigError(
                f"training.optimizer.name: {optimizer}: {error}; use an optimizer whose state is "
                "tensors and numbers"
            ) from None

    def start_ema_update(self) -> None:
        """Start the EMA update in the background.

        Call it right before a backward pass, which releases the GIL.
        """
        if self._ema_is_behind and self._ema is not None:
            self._ema_is_behind = False
            self.background.run(self._ema.update)

    def _wait_for_background(self) -> None:
        """Wait until nothing reads the weights any more and the EMA is up to date."""
        self.start_ema_update()
        self.background.join()

    def zero_grad(self) -> None:
        for weight in self._local_weights:
            weight.grad = None
        if self._sharded:
            for parameter in self.parameters:
                parameter.grad = None

    @contextlib.contextmanager
    def ema_weights(self) -> Iterator[None]:
        """Swap the averaged weights into the model inside the context; no-op without an EMA."""
        self._swap_ema()
        try:
            yield
        finally:
            self._swap_ema()

    @torch.no_grad()
    def _swap_ema(self) -> None:
        self._wait_for_background()
        if self._ema is None:
            return
        # One tensor at a time, so that the swap takes the memory of a single tensor.
        for weight, average in zip(self._local_weights, self._ema.averages, strict=True):
            previous = weight.clone()
            weight.copy_(average)
            average.copy_(previous)
        self._free_gathered_weights()

    def _free_gathered_weights(self) -> None:
        """Make FSDP gather the weights again, because their shards have been written.

        A forward pass without a backward pass, such as that of an evaluation, may leave gathered
        copies behind, which the next step would train on. Every method that writes weights outside
        of an optimizer step calls this.
        """
        for module in sharded_modules(self.module):
            module.reshard()  # type: ignore[operator]

    @torch.no_grad()
    def copy_ema_to_weights(self) -> None:
        """Overwrite the weights with their averages; no-op without an EMA."""
        self._wait_for_background()
        if self._ema is not None:
            torch._foreach_copy_([*self._local_weights], self._ema.averages)
            self._free_gathered_weights()

    # ------------------------------------------------------------------ checkpoints

    def tensors(self) -> dict[ShardSpec, LocalShard]:
        """Return this rank's shards of the state; they share memory with the training.

        Read them only in :attr:`background` work, which runs after the pending EMA update.
        """
        self.start_ema_update()
        return self._state_dict.tensors()

    def progress(self) -> dict[str, Any]:
        """Return what belongs to the state and is no tensor; the same on all ranks."""
        self._wait_for_background()
        return {
            "schedule": self._rate.steps,
            "ema_updates": self._ema.updates if self._ema else 0,
            "optimizer": self._state_dict.optimizer.values(),
        }

    def restore(self, checkpoint: checkpoint_files.CheckpointInfo) -> None:
        """Load the state of a checkpoint.

        Raises:
            CheckpointError: it belongs to another model.
        """
        if checkpoint.fingerprint != self.fingerprint:
            raise checkpoint_files.CheckpointError(
                f"{checkpoint.folder}: is of another model (weights {checkpoint.fingerprint}, this "
                f"one has {self.fingerprint}); give the run another name or checkpoint folder"
            )
        self._wait_for_background()
        progress = json.loads((checkpoint.folder / PROGRESS_FILE).read_bytes())
        try:
            files = checkpoint_files.shard_files(checkpoint.folder)
            self._state_dict.restore(files, progress["optimizer"])
        except ShardedTensorError as error:
            raise checkpoint_files.CheckpointError(f"{checkpoint.folder}: {error}") from None
        self._restore_counters(checkpoint.step, progress)

    def roll_back(self, snapshot: HostSnapshot) -> None:
        """Load the state of a snapshot that was taken of this state; a collective."""
        assert snapshot.step is not None
        self._wait_for_background()
        self._state_dict.load(snapshot.load_into, snapshot.progress["optimizer"])
        self._restore_counters(snapshot.step, snapshot.progress)

    def load_from_stage(self, previous: Path, stage: StageConfig) -> None:
        """Load from the previous stage's last checkpoint what the run file keeps of it.

        Raises:
            CheckpointError: it is incomplete, or belongs to another model.
        """
        files = checkpoint_files.shard_files(checkpoint_files.read_marker(previous).folder)
        optimizer = None
        if stage.optimizer_state == "keep":
            optimizer = json.loads((previous / PROGRESS_FILE).read_bytes())["optimizer"]
        try:
            self._state_dict.load_from_stage(
                files, weights=stage.init_from == "raw", optimizer=optimizer
            )
        except ShardedTensorError as error:
            raise checkpoint_files.CheckpointError(f"{previous}: {error}") from None
        self._free_gathered_weights()

    def _restore_counters(self, step: int, progress: Mapping[str, Any]) -> None:
        self._free_gathered_weights()
        # The schedule continues with the run file's current learning rate.
        self._rate.set(progress["schedule"])
        if self._ema is not None:
            self._ema.updates = progress["ema_updates"]
        self.step = step
