"""The loss of a micro-batch: the objective's squared error, or the user's function."""

from __future__ import annotations

from collections.abc import Callable

import torch
from sm_train.entrypoints.job_interface.job_config import JobConfigError
from sm_train.entrypoints.job_interface.user_function import load_user_function
from sm_train.entrypoints.models.objectives import DiffusionTarget, loss, per_sample_loss
from torch import Tensor

_KEY = "training.objective"


class TrainingLoss:
    """The loss that ``training.objective`` names, None for the squared error.

    The user's function gets the prediction (B, C, H, W) and the :class:`DiffusionTarget`, and
    returns each sample's loss (B,). It must be a pure function: no checkpoint holds its state.
    """

    def __init__(self, name: str | None) -> None:
        self._name = name
        self._function: Callable[[Tensor, DiffusionTarget], object] | None = None
        if name is not None:
            self._function = load_user_function(_KEY, name)

    def mean(self, prediction: Tensor, target: DiffusionTarget) -> Tensor:
        """Return the loss of a micro-batch, a scalar."""
        if self._function is None:
            return loss(prediction, target)
        return self.per_sample(prediction, target).mean()

    def per_sample(self, prediction: Tensor, target: DiffusionTarget) -> Tensor:
        """Return each sample's loss (B,).

        Raises:
            JobConfigError: the user's function returned something else.
        """
        if self._function is None:
            return per_sample_loss(prediction, target)
        losses = self._function(prediction.float(), target)
        shape = (len(prediction),)
        if not isinstance(losses, Tensor) or losses.shape != torch.Size(shape):
            kind = tuple(losses.shape) if isinstance(losses, Tensor) else type(losses).__name__
            raise JobConfigError(
                f"{_KEY}: {self._name} returned {kind}; return each sample's loss, a tensor of "
                f"shape {shape}"
            )
        return losses
