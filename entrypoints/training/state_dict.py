"""Everything that a step of training changes, as tensors by name, to save and to restore.

Names are ``model.…`` (weights and buffers), ``ema.…``, and for AdamW ``exp_avg.…``,
``exp_avg_sq.…`` and ``optimizer.steps``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from sm_train.entrypoints.checkpointing.manifest import EMA, MODEL
from sm_train.entrypoints.checkpointing.sharded_tensors import ShardSpec, load_into, stored_names
from sm_train.entrypoints.distributed.local_shard import LocalShard, local_shard
from sm_train.entrypoints.training.ema import ExponentialMovingAverage
from torch import Tensor, nn

_MOMENTS = ("exp_avg", "exp_avg_sq")
_STEPS = "optimizer.steps"


class TrainStateDict:
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
        self._trained = {name: local_shard(one) for name, one in trained}
        self._parts = parts

    @torch.no_grad()
    def tensors(self) -> dict[ShardSpec, LocalShard]:
        """The state as it is; the tensors are the training's own, not copies.

        Only after a first step: AdamW has no moments before.
        """
        return self._model() | self._optimizer_state() | self._averages()

    def _model(self) -> dict[ShardSpec, LocalShard]:
        """Weights and buffers."""
        own = {name: local_shard(tensor) for name, tensor in self._module.state_dict().items()}
        return {_box(f"{MODEL}{name}", one): one for name, one in own.items()}

    def _optimizer_state(self) -> dict[ShardSpec, LocalShard]:
        states = [self._optimizer.state[part] for part in self._parts]
        found = {
            ShardSpec(_STEPS, (0,)): local_shard(
                torch.stack([state["step"].float() for state in states])
            )
        }
        for moment in _MOMENTS:
            found |= self._like_weights(f"{moment}.", [state[moment] for state in states])
        return found

    def _averages(self) -> dict[ShardSpec, LocalShard]:
        if self._average is None:
            return {}
        return self._like_weights(EMA, self._average.averages)

    def _like_weights(self, prefix: str, tensors: Sequence[Tensor]) -> dict[ShardSpec, LocalShard]:
        """Tensors that are split as the trained weights are."""
        likes = zip(self._trained.items(), tensors, strict=True)
        return {
            _box(f"{prefix}{name}", own): replace(own, tensor=tensor)
            for (name, own), tensor in likes
        }

    @torch.no_grad()
    def restore(self, files: Sequence[Path]) -> None:
        """Take the state from the pieces in ``files``; an average that they lack begins anew.

        Raises:
            PiecesError: something is missing in them.
        """
        averaged = any(name.startswith(EMA) for name in stored_names(files))
        _fill(files, self._model() | (self._averages() if averaged else {}))
        self._restore_optimizer(files)
        if not averaged:
            self._begin_average()

    @torch.no_grad()
    def load_from_stage(self, files: Sequence[Path], *, weights: bool, optimizer: bool) -> None:
        """Take the trained weights or the optimizer's state of another stage, from its pieces.

        Buffers stay: what a network knows of its size is not trained. The average begins anew.

        Raises:
            PiecesError: something is missing in them.
        """
        if weights:
            _fill(files, self._like_weights(MODEL, self._parts))
        if optimizer:
            self._restore_optimizer(files)
        self._begin_average()

    def _restore_optimizer(self, files: Sequence[Path]) -> None:
        for part in self._parts:
            self._optimizer.state[part] = {
                "step": torch.zeros((), dtype=torch.float32),
                **{moment: torch.zeros_like(part) for moment in _MOMENTS},
            }
        targets = self._optimizer_state()
        _fill(files, targets)
        for part, step in zip(self._parts, targets[ShardSpec(_STEPS, (0,))].tensor, strict=True):
            self._optimizer.state[part]["step"] = step.clone()
        # Puts the steps where this optimizer wants them: fused kernels have them on the device.
        self._optimizer.load_state_dict(self._optimizer.state_dict())

    def _begin_average(self) -> None:
        if self._average is not None:
            torch._foreach_copy_(self._average.averages, list(self._parts))


def _fill(files: Sequence[Path], targets: Mapping[ShardSpec, LocalShard]) -> None:
    load_into(files, {box: own.tensor for box, own in targets.items()})


def _box(name: str, own: LocalShard) -> ShardSpec:
    return ShardSpec(name, (own.start, *(0,) * (own.tensor.dim() - 1)) if own.tensor.dim() else ())
