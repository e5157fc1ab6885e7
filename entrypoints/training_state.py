"""Everything that a step of training changes, as tensors by name, to save and to restore.

Names are ``model.…`` (weights and buffers), ``ema.…``, and for AdamW ``exp_avg.…``,
``exp_avg_sq.…`` and ``optimizer.steps``.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from sm_train.entrypoints.ema import ExponentialMovingAverage
from sm_train.entrypoints.tensor_pieces import Box, fill, stored_names
from torch import Tensor, nn

MODEL, AVERAGE = "model.", "ema."
_MOMENTS = ("exp_avg", "exp_avg_sq")
_STEPS = "optimizer.steps"


class TrainingState:
    """The state of a model, its AdamW optimizer and its average, if there is one."""

    def __init__(
        self,
        module: nn.Module,
        optimizer: torch.optim.Optimizer,
        average: ExponentialMovingAverage | None,
    ) -> None:
        self._module, self._optimizer, self._average = module, optimizer, average
        self._trained = {name: one for name, one in module.named_parameters() if one.requires_grad}

    @torch.no_grad()
    def tensors(self) -> dict[str, Tensor]:
        """The state as it is; the tensors are the training's own, not copies.

        Only after a first step: AdamW has no moments before.
        """
        found = {f"{MODEL}{name}": one for name, one in self._module.state_dict().items()}
        states = {name: self._optimizer.state[one] for name, one in self._trained.items()}
        for moment in _MOMENTS:
            found |= {f"{moment}.{name}": state[moment] for name, state in states.items()}
        found[_STEPS] = torch.stack([state["step"].float() for state in states.values()])
        return found | self.averages()

    def averages(self) -> dict[str, Tensor]:
        """The averaged weights by name; empty without an average."""
        if self._average is None:
            return {}
        names = (f"{AVERAGE}{name}" for name in self._trained)
        return dict(zip(names, self._average.averages, strict=True))

    @torch.no_grad()
    def restore(self, files: Sequence[Path]) -> None:
        """Take the state from the pieces in ``files``; an average that they lack begins anew.

        Raises:
            PiecesError: something is missing in them.
        """
        for parameter in self._trained.values():
            self._optimizer.state[parameter] = {
                "step": torch.zeros((), dtype=torch.float32),
                **{moment: torch.zeros_like(parameter) for moment in _MOMENTS},
            }
        steps = torch.zeros(len(self._trained))
        targets = self.tensors() | {_STEPS: steps}
        begins_anew = not self.averages().keys() <= stored_names(files)
        if begins_anew:
            targets = {name: one for name, one in targets.items() if not name.startswith(AVERAGE)}
        fill(files, {Box(name, (0,) * one.dim()): one for name, one in targets.items()})
        for parameter, step in zip(self._trained.values(), steps, strict=True):
            self._optimizer.state[parameter]["step"] = step.clone()
        if begins_anew and self._average is not None:
            torch._foreach_copy_(self._average.averages, list(self._trained.values()))
        # Puts the steps where this optimizer wants them: fused kernels have them on the device.
        self._optimizer.load_state_dict(self._optimizer.state_dict())
