"""Everything that a step of training changes, as tensors by name, to save and to restore.

Names are ``model.…`` (weights and buffers), ``ema.…``, and for AdamW ``exp_avg.…``,
``exp_avg_sq.…`` and ``optimizer.steps``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from sm_train.entrypoints.ema import ExponentialMovingAverage
from sm_train.entrypoints.owned import Owned, owned
from sm_train.entrypoints.tensor_pieces import Box, fill, stored_names
from torch import Tensor, nn

MODEL, AVERAGE = "model.", "ema."
_MOMENTS = ("exp_avg", "exp_avg_sq")
_STEPS = "optimizer.steps"
_OPTIMIZER = (*(f"{moment}." for moment in _MOMENTS), _STEPS)


class TrainingState:
    """The state of a model, its AdamW optimizer and its average, if there is one.

    ``parts`` are what this process owns of the trained weights; the optimizer and the average have
    those.
    """

    def __init__(
        self,
        module: nn.Module,
        parts: Sequence[Tensor],
        optimizer: torch.optim.Optimizer,
        average: ExponentialMovingAverage | None,
    ) -> None:
        self._module, self._optimizer, self._average = module, optimizer, average
        trained = [(name, one) for name, one in module.named_parameters() if one.requires_grad]
        self._trained = {name: owned(one) for name, one in trained}
        self._parts = parts

    @torch.no_grad()
    def tensors(self) -> dict[Box, Owned]:
        """The state as it is; the tensors are the training's own, not copies.

        Only after a first step: AdamW has no moments before.
        """
        found = {}
        for name, tensor in self._module.state_dict().items():
            own = owned(tensor)
            found[_box(f"{MODEL}{name}", own)] = own
        states = [self._optimizer.state[part] for part in self._parts]
        for moment in _MOMENTS:
            found |= self._like_weights(f"{moment}.", [state[moment] for state in states])
        steps = torch.stack([state["step"].float() for state in states])
        found[Box(_STEPS, (0,))] = owned(steps)
        if self._average is not None:
            found |= self._like_weights(AVERAGE, self._average.averages)
        return found

    def _like_weights(self, prefix: str, tensors: Sequence[Tensor]) -> dict[Box, Owned]:
        """Tensors that are split as the trained weights are."""
        likes = zip(self._trained.items(), tensors, strict=True)
        return {
            _box(f"{prefix}{name}", own): replace(own, part=tensor) for (name, own), tensor in likes
        }

    @torch.no_grad()
    def restore(self, files: Sequence[Path]) -> None:
        """Take the state from the pieces in ``files``; an average that they lack begins anew.

        Raises:
            PiecesError: something is missing in them.
        """
        averaged = any(name.startswith(AVERAGE) for name in stored_names(files))
        prefixes = (MODEL, *_OPTIMIZER, *([AVERAGE] if averaged else []))
        self._fill(files, lambda name: name.startswith(prefixes))
        if not averaged:
            self._begin_average()

    @torch.no_grad()
    def take_over(self, files: Sequence[Path], *, weights: bool, optimizer: bool) -> None:
        """Take the trained weights or the optimizer's state of another stage, from its pieces.

        Buffers stay: what a network knows of its size is not trained. The average begins anew.

        Raises:
            PiecesError: something is missing in them.
        """
        wanted = {f"{MODEL}{name}" for name in self._trained} if weights else set()
        prefixes = _OPTIMIZER if optimizer else ()
        self._fill(files, lambda name: name in wanted or name.startswith(prefixes))
        self._begin_average()

    def _fill(self, files: Sequence[Path], wanted: Callable[[str], bool]) -> None:
        with_optimizer = wanted(_STEPS)
        for part in self._parts:
            self._optimizer.state[part] = {
                "step": torch.zeros((), dtype=torch.float32),
                **{moment: torch.zeros_like(part) for moment in _MOMENTS},
            }
        steps = torch.zeros(len(self._parts))
        targets = {box: own.part for box, own in self.tensors().items()}
        targets |= {Box(_STEPS, (0,)): steps}
        fill(files, {box: one for box, one in targets.items() if wanted(box.name)})
        for part, step in zip(self._parts, steps, strict=True):
            self._optimizer.state[part]["step"] = step.clone()
        if not with_optimizer:
            self._optimizer.state.clear()
            return
        # Puts the steps where this optimizer wants them: fused kernels have them on the device.
        self._optimizer.load_state_dict(self._optimizer.state_dict())

    def _begin_average(self) -> None:
        if self._average is not None:
            torch._foreach_copy_(self._average.averages, list(self._parts))


def _box(name: str, own: Owned) -> Box:
    return Box(name, (own.start, *(0,) * (own.part.dim() - 1)) if own.part.dim() else ())
