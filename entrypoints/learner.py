"""What is trained and all that a step changes: weights, AdamW, learning rate, average, noise."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from sm_train.entrypoints import checkpoint as store
from sm_train.entrypoints.ema import ExponentialMovingAverage
from sm_train.entrypoints.models import Parts
from sm_train.entrypoints.settings import Settings
from sm_train.entrypoints.tensor_pieces import PiecesError
from sm_train.entrypoints.training_state import TrainingState
from torch import Tensor

PROGRESS = "progress.json"
"""The file of a checkpoint that says how far the schedules are."""


class Learner:
    """One process's copy; ``process`` is its rank, which decides the noise that it draws.

    ``module`` is what learns, ``step`` how many steps it has learned for.
    """

    def __init__(
        self, settings: Settings, parts: Parts, device: torch.device, process: int
    ) -> None:
        training = settings.training
        self._seed, self._process = training.seed, process
        self.module = parts.trained().to(device)
        self.parameters = [one for one in self.module.parameters() if one.requires_grad]
        self._optimizer = torch.optim.AdamW(
            self.parameters,
            lr=settings.stage.learning_rate,
            weight_decay=training.weight_decay,
            fused=_fused_available(device),
        )
        warmup = training.warmup_iterations
        self._schedule = torch.optim.lr_scheduler.LambdaLR(
            self._optimizer, lambda step: min(1.0, (step + 1) / (warmup + 1))
        )
        self._average: ExponentialMovingAverage | None = None
        if training.ema_decay:
            self._average = ExponentialMovingAverage(
                self.parameters, training.ema_decay, training.ema_start
            )
        self.generator = torch.Generator(device)
        # A seed for each process: they must not draw the same noise.
        self.generator.manual_seed(self._seed * 65537 + process)
        self.step = 0
        self.fingerprint = store.fingerprint(self.module.state_dict())
        self._state = TrainingState(self.module, self._optimizer, self._average)

    @property
    def learning_rate(self) -> float:
        return float(self._schedule.get_last_lr()[0])

    def update(self, skipped: Tensor) -> None:
        """One step by the gradients, unless ``skipped`` is 1.0: they are no numbers.

        Fused AdamW looks itself, so that the host need not wait for the device to know.
        """
        if self._optimizer.defaults["fused"]:
            self._optimizer.found_inf = skipped  # type: ignore[attr-defined]
            self._optimizer.step()
        elif not skipped.item():
            self._optimizer.step()
        self._schedule.step()
        self.forget_gradients()
        if self._average is not None:
            self._average.update(self.parameters)
        self.step += 1

    def forget_gradients(self) -> None:
        self._optimizer.zero_grad(set_to_none=True)

    @torch.no_grad()
    def take_average(self) -> None:
        """Make the average the weights, where one is kept."""
        if self._average is not None:
            torch._foreach_copy_([*self.parameters], self._average.averages)

    # ------------------------------------------------------------------ checkpoints

    def tensors(self) -> dict[str, Tensor]:
        """The state that all processes share, by name; not copies."""
        return self._state.tensors()

    def shared_files(self) -> dict[str, Callable[[Path], None]]:
        """What else they share, as it is now: the name of a file and what writes it."""
        progress = {
            "schedule": self._schedule.last_epoch,
            "ema_updates": self._average.updates if self._average else 0,
        }
        return {PROGRESS: store.save_bytes(json.dumps(progress).encode())}

    def own_files(self) -> dict[str, Callable[[Path], None]]:
        """This process's own random state, as it is now."""
        own = {"generator": self.generator.get_state(), "cpu_rng": torch.get_rng_state()}
        return {_own_name(self._process): store.save_object(own)}

    def restore(self, found: store.Found) -> None:
        """Take the shared state of a checkpoint.

        Raises:
            CheckpointError: it is of another model.
        """
        if found.fingerprint != self.fingerprint:
            raise store.CheckpointError(
                f"{found.folder}: is of another model (weights {found.fingerprint}, this one has "
                f"{self.fingerprint}); give the run another name or checkpoint folder"
            )
        try:
            self._state.restore(store.pieces_files(found.folder))
        except PiecesError as error:
            raise store.CheckpointError(f"{found.folder}: {error}") from None
        progress: dict[str, Any] = json.loads((found.folder / PROGRESS).read_bytes())
        self._restore_schedule(progress["schedule"])
        if self._average is not None:
            self._average.updates = progress["ema_updates"]
        self.step = found.step

    def _restore_schedule(self, steps: int) -> None:
        """Go on after ``steps`` of the schedule, with the learning rate that the run file says."""
        factors = zip(self._schedule.base_lrs, self._schedule.lr_lambdas, strict=True)
        rates = [rate * factor(steps) for rate, factor in factors]
        self._schedule.load_state_dict(
            self._schedule.state_dict() | {"last_epoch": steps, "_last_lr": rates}
        )
        for group, rate in zip(self._optimizer.param_groups, rates, strict=True):
            group["lr"] = rate

    def restore_own(self, found: store.Found, processes: int) -> bool:
        """Take this process's random state; with other ``processes`` draw anew: whether so."""
        if found.world_size == processes:
            own = store.load_object(found.folder / _own_name(self._process))
            self.generator.set_state(own["generator"])
            torch.set_rng_state(own["cpu_rng"])
            return False
        # Not from the same numbers again: those of the first steps have been used.
        self.generator.manual_seed(self._seed * 65537 + self._process + found.step * 7919)
        return True


def _own_name(process: int) -> str:
    return f"rank-{process:05d}.pt"


def _fused_available(device: torch.device) -> bool:
    """Whether this PyTorch has the fused AdamW there; before 2.4 it had none for the CPU."""
    from torch.utils._foreach_utils import _get_fused_kernels_supported_devices

    return device.type in _get_fused_kernels_supported_devices()
