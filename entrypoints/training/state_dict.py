"""The tensors that a training step changes, by name, to save and to restore.

Names are ``model.…`` (weights and buffers), ``ema.…``, and ``optimizer.…``
(:mod:`sm_train.entrypoints.training.optimizer_state`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from sm_train.entrypoints.checkpoints.checkpoint_files import EMA, MODEL
from sm_train.entrypoints.checkpoints.sharded_tensors import (
    ShardSpec,
    StoredTensor,
    load_into,
    stored_tensors,
)
from sm_train.entrypoints.distributed.local_shard import LocalShard, local_shard
from sm_train.entrypoints.training.ema import ExponentialMovingAverage
from sm_train.entrypoints.training.optimizer_state import OptimizerState
from torch import Tensor, nn

LoadTensors = Callable[[Mapping[ShardSpec, LocalShard]], None]
"""Overwrites tensors with saved ones of the same names."""


class TrainStateDict:
    """Maps a model, its optimizers and its EMA, if any, to named tensors.

    ``local_weights`` are this rank's shards of the trained weights, in the order of the module's
    parameters. The EMA holds tensors of the same shapes.
    """

    def __init__(
        self,
        module: nn.Module,
        local_weights: Sequence[Tensor],
        optimizers: Sequence[torch.optim.Optimizer],
        ema: ExponentialMovingAverage | None,
    ) -> None:
        self._module, self._ema = module, ema
        parameters = dict(trained_parameters(module))
        self._trained = {
            name: replace(local_shard(parameter), tensor=weight)
            for (name, parameter), weight in zip(parameters.items(), local_weights, strict=True)
        }
        self._local_weights = local_weights
        self.optimizer = OptimizerState(optimizers, self._trained)

    @torch.no_grad()
    def tensors(self) -> dict[ShardSpec, LocalShard]:
        """Return the current state; the tensors share memory with the training.

        Call it after a first step: before that an optimizer has no state.
        """
        return self._model() | self.optimizer.tensors() | self._averages()

    def _model(self) -> dict[ShardSpec, LocalShard]:
        shards = {name: local_shard(tensor) for name, tensor in model_tensors(self._module).items()}
        return {_spec(f"{MODEL}{name}", shard): shard for name, shard in shards.items()}

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

    def restore(self, files: Sequence[Path], optimizer: Mapping[str, Any]) -> None:
        """Load the state from the shards in ``files``; without an EMA in them, reset the EMA.

        ``optimizer`` are the values of :attr:`optimizer` at that time.

        Raises:
            ShardedTensorError: a tensor is missing or incomplete, or of another optimizer.
        """
        stored = stored_tensors(files)
        has_ema = any(name.startswith(EMA) for name in stored)
        load = partial(_load_files, files)
        load(self._model() | (self._averages() if has_ema else {}))
        self._load_optimizer(load, optimizer, stored)
        if not has_ema:
            self._reset_ema()

    @torch.no_grad()
    def load(self, load: LoadTensors, optimizer: Mapping[str, Any]) -> None:
        """Overwrite the state by ``load``, which is called with a part of it at a time."""
        load(self._model() | self._averages())
        self._load_optimizer(load, optimizer)

    @torch.no_grad()
    def load_from_stage(
        self, files: Sequence[Path], *, weights: bool, optimizer: Mapping[str, Any] | None
    ) -> None:
        """Load another stage's trained weights, optimizer state, or both; reset the EMA.

        ``optimizer`` are the values of the optimizer's state, None to reset it. Buffers keep their
        values: they depend on the resolution and are not trained.

        Raises:
            ShardedTensorError: a tensor is missing or incomplete, or of another optimizer.
        """
        load = partial(_load_files, files)
        if weights:
            load(self._like_weights(MODEL, self._local_weights))
        if optimizer is not None:
            self._load_optimizer(load, optimizer, stored_tensors(files))
        self._reset_ema()

    @torch.no_grad()
    def _load_optimizer(
        self,
        load: LoadTensors,
        values: Mapping[str, Any],
        stored: Mapping[str, StoredTensor] | None = None,
    ) -> None:
        if stored is not None:
            self.optimizer.allocate(stored, values)
        targets = self.optimizer.load_targets()
        load(targets)
        self.optimizer.set_values(values, targets)

    def _reset_ema(self) -> None:
        if self._ema is not None:
            torch._foreach_copy_(self._ema.averages, list(self._local_weights))


def trained_parameters(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield the parameters that are trained, by name."""
    return (
        (name, parameter)
        for name, parameter in module.named_parameters()
        if parameter.requires_grad
    )


def model_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Return the tensors of the model that a checkpoint holds, by name.

    They are all weights and buffers, or, if a part of the weights is frozen, those that are
    trained.
    """
    state: dict[str, Tensor] = module.state_dict()
    trained = {name for name, _ in trained_parameters(module)}
    if len(trained) == sum(1 for _ in module.parameters()):
        return state
    return {name: tensor for name, tensor in state.items() if name in trained}


def _load_files(files: Sequence[Path], targets: Mapping[ShardSpec, LocalShard]) -> None:
    load_into(files, {spec: shard.tensor for spec, shard in targets.items()})


def _spec(name: str, shard: LocalShard) -> ShardSpec:
    dimensions = shard.tensor.dim()
    return ShardSpec(name, (shard.start, *(0,) * (dimensions - 1)) if dimensions else ())
