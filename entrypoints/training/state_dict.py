"""The tensors that a training step changes, by name, to save and to restore.

Names are ``model.…`` (weights and buffers), ``ema.…``, and for AdamW ``exp_avg.…``,
``exp_avg_sq.…`` and ``optimizer.steps``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from sm_train.entrypoints.checkpointing.manifest import EMA, MODEL
from sm_train.entrypoints.checkpointing.sharded_tensors import ShardSpec, load_into, stored_names
from sm_train.entrypoints.distributed.local_shard import LocalShard, local_shard
from sm_train.entrypoints.training.ema import ExponentialMovingAverage
from torch import Tensor, nn

_MOMENTS = ("exp_avg", "exp_avg_sq")
_STEPS = ShardSpec("optimizer.steps", (0,))

LoadTensors = Callable[[Mapping[ShardSpec, LocalShard]], None]
"""Overwrites tensors with saved ones of the same names."""


class TrainStateDict:
    """Maps a model, its AdamW optimizer and its EMA, if any, to named tensors.

    ``local_weights`` are this rank's shards of the trained weights, in the order of the module's
    parameters. The optimizer and the EMA hold tensors of the same shapes.
    """

    def __init__(
        self,
        module: nn.Module,
        local_weights: Sequence[Tensor],
        optimizer: torch.optim.Optimizer,
        ema: ExponentialMovingAverage | None,
    ) -> None:
        self._module, self._optimizer, self._ema = module, optimizer, ema
        self._trained = {
            name: local_shard(parameter)
            for name, parameter in module.named_parameters()
            if parameter.requires_grad
        }
        self._local_weights = local_weights

    @torch.no_grad()
    def tensors(self) -> dict[ShardSpec, LocalShard]:
        """Return the current state; the tensors share memory with the training.

        Call it after a first step: before that AdamW has no moments.
        """
        return self._model() | self._optimizer_state() | self._averages()

    def _model(self) -> dict[ShardSpec, LocalShard]:
        """Return weights and buffers."""
        shards = {name: local_shard(tensor) for name, tensor in self._module.state_dict().items()}
        return {_spec(f"{MODEL}{name}", shard): shard for name, shard in shards.items()}

    def _optimizer_state(self) -> dict[ShardSpec, LocalShard]:
        states = [self._optimizer.state[weight] for weight in self._local_weights]
        steps = torch.stack([state["step"].float() for state in states])
        tensors = {_STEPS: local_shard(steps)}
        for moment in _MOMENTS:
            tensors |= self._like_weights(f"{moment}.", [state[moment] for state in states])
        return tensors

    def _averages(self) -> dict[ShardSpec, LocalShard]:
        if self._ema is None:
            return {}
        return self._like_weights(EMA, self._ema.averages)

    def _like_weights(self, prefix: str, tensors: Sequence[Tensor]) -> dict[ShardSpec, LocalShard]:
        """Return ``tensors``, which are sharded like the trained weights, by name."""
        return {
            _spec(f"{prefix}{name}", shard): replace(shard, tensor=tensor)
            for (name, shard), tensor in zip(self._trained.items(), tensors, strict=True)
        }

    def restore(self, files: Sequence[Path]) -> None:
        """Load the state from the shards in ``files``; without an EMA in them, reset the EMA.

        Raises:
            ShardedTensorError: a tensor is missing or incomplete.
        """
        has_ema = any(name.startswith(EMA) for name in stored_names(files))
        self.load(partial(_load_files, files), with_ema=has_ema)
        if not has_ema:
            self._reset_ema()

    @torch.no_grad()
    def load(self, load: LoadTensors, *, with_ema: bool = True) -> None:
        """Overwrite the state by ``load``, which is called with a part of it at a time."""
        load(self._model() | (self._averages() if with_ema else {}))
        self._load_optimizer(load)

    @torch.no_grad()
    def load_from_stage(self, files: Sequence[Path], *, weights: bool, optimizer: bool) -> None:
        """Load another stage's trained weights, optimizer state, or both; reset the EMA.

        Buffers keep their values: they depend on the resolution and are not trained.

        Raises:
            ShardedTensorError: a tensor is missing or incomplete.
        """
        load = partial(_load_files, files)
        if weights:
            load(self._like_weights(MODEL, self._local_weights))
        if optimizer:
            self._load_optimizer(load)
        self._reset_ema()

    def _load_optimizer(self, load: LoadTensors) -> None:
        for weight in self._local_weights:
            self._optimizer.state[weight] = {
                "step": torch.zeros((), dtype=torch.float32),
                **{moment: torch.zeros_like(weight) for moment in _MOMENTS},
            }
        targets = self._optimizer_state()
        # On the device of the weights: a rollback receives it by a collective.
        steps = targets[_STEPS]
        targets[_STEPS] = replace(steps, tensor=steps.tensor.to(self._local_weights[0].device))
        load(targets)
        for weight, step in zip(self._local_weights, targets[_STEPS].tensor.cpu(), strict=True):
            self._optimizer.state[weight]["step"] = step.clone()
        # load_state_dict moves each "step" where this optimizer needs it: fused kernels read it
        # on the device.
        self._optimizer.load_state_dict(self._optimizer.state_dict())

    def _reset_ema(self) -> None:
        if self._ema is not None:
            torch._foreach_copy_(self._ema.averages, list(self._local_weights))


def _load_files(files: Sequence[Path], targets: Mapping[ShardSpec, LocalShard]) -> None:
    load_into(files, {spec: shard.tensor for spec, shard in targets.items()})


def _spec(name: str, shard: LocalShard) -> ShardSpec:
    dimensions = shard.tensor.dim()
    return ShardSpec(name, (shard.start, *(0,) * (dimensions - 1)) if dimensions else ())
