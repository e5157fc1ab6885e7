"""The state of any optimizer as named tensors and plain numbers, to save and to restore.

A floating-point tensor of a weight's shape is sharded like the weight, and any number of ranks can
read it. Any other tensor, such as an 8-bit moment and its scales, belongs to this rank's rows: a
sharded run can resume it only with as many shards. Tensors without dimensions are
stacked into one for all weights. Numbers, and what the optimizer has changed in its parameter
groups, are plain data (*values*).

============================  ============================================================
``optimizer.KEY.WEIGHT``      a tensor of the weight's shape
``optimizer.KEY.WEIGHT@I/N``  any other tensor, of shard I of N; ``@I/N`` if N > 1
``optimizer.KEY``             the tensors without dimensions, in the order of the weights
============================  ============================================================
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from sm_train.entrypoints.checkpoints.safetensors_header import has_type
from sm_train.entrypoints.checkpoints.sharded_tensors import (
    ShardedTensorError,
    ShardSpec,
    StoredTensor,
)
from sm_train.entrypoints.distributed.local_shard import LocalShard, local_shard
from torch import Tensor

OPTIMIZER = "optimizer."
"""Prefix of the names of an optimizer's tensors."""

_NOT_STATE = ("params", "lr", "initial_lr")
"""Entries of a parameter group that the run file and the learning rate's schedule determine."""

_Plain = (bool, int, float, str, type(None))


class UnsavableStateError(ValueError):
    """An optimizer keeps state that no checkpoint can hold; the message is one line."""


class OptimizerState:
    """The state of ``optimizers``, which together train ``weights``: this rank's rows by name."""

    def __init__(
        self, optimizers: Sequence[torch.optim.Optimizer], weights: Mapping[str, LocalShard]
    ) -> None:
        self._optimizers, self._weights = optimizers, weights
        owner = {
            id(weight): optimizer
            for optimizer in optimizers
            for group in optimizer.param_groups
            for weight in group["params"]
        }
        self._owners = [owner[id(shard.tensor)] for shard in weights.values()]
        # The run file determines these: what differs later is state.
        self._initial_groups = [_plain_group(group) for group in self._groups()]

    def _groups(self) -> Iterator[dict[str, Any]]:
        for optimizer in self._optimizers:
            yield from optimizer.param_groups

    def _states(self) -> Iterator[tuple[str, LocalShard, dict[str, Any]]]:
        """Yield each weight's name, rows and state, which is empty before its first step."""
        for (name, shard), optimizer in zip(self._weights.items(), self._owners, strict=True):
            yield name, shard, optimizer.state.get(shard.tensor, {})

    def tensors(self) -> dict[ShardSpec, LocalShard]:
        """Return the state's tensors; all but the stacked ones share memory with the optimizer."""
        tensors: dict[ShardSpec, LocalShard] = {}
        for name, shard, state in self._states():
            for key, value in state.items():
                if isinstance(value, Tensor) and value.dim():
                    tensors |= [_named(key, name, shard, value)]
        for key, scalars in self._scalars().items():
            tensors[ShardSpec(f"{OPTIMIZER}{key}", (0,))] = local_shard(torch.stack(scalars))
        return tensors

    def _scalars(self) -> dict[str, list[Tensor]]:
        """Return the tensors without dimensions by key, in the order of the weights."""
        scalars: dict[str, list[Tensor]] = {}
        for _, _, state in self._states():
            for key, value in state.items():
                if isinstance(value, Tensor) and not value.dim():
                    scalars.setdefault(key, []).append(value)
        return scalars

    def values(self) -> dict[str, Any]:
        """Return the state that is no tensor, as JSON can hold it."""
        numbers: dict[str, dict[str, Any]] = {}
        scalars: dict[str, dict[str, Any]] = {}
        for index, (_, _, state) in enumerate(self._states()):
            for key, value in state.items():
                if not isinstance(value, Tensor):
                    numbers.setdefault(key, {})[str(index)] = value
                elif not value.dim():
                    entry = scalars.setdefault(key, {"cpu": not value.is_cuda, "weights": []})
                    entry["weights"].append(index)
        groups = [
            {key: value for key, value in _plain_group(group).items() if value != initial.get(key)}
            for group, initial in zip(self._groups(), self._initial_groups, strict=True)
        ]
        return {
            "classes": [type(optimizer).__name__ for optimizer in self._optimizers],
            "numbers": numbers,
            "scalars": scalars,
            "groups": groups,
        }

    def check(self) -> None:
        """Check that a checkpoint can hold the state; call it after a first step.

        Raises:
            UnsavableStateError: it cannot.
        """
        for name, _, state in self._states():
            for key, value in state.items():
                _check_savable(f"state {key} of {name}", value)
        for group in self._groups():
            for key, value in group.items():
                if key != "params":
                    _check_savable(f"{key} of a parameter group", value, tensors=False)

    def allocate(self, stored: Mapping[str, StoredTensor], values: Mapping[str, Any]) -> None:
        """Replace the state by one without values, of the shapes and types of a checkpoint.

        Load :meth:`tensors` after that, then call :meth:`set_values`.

        Raises:
            ShardedTensorError: the checkpoint is of another optimizer, or of other shards.
        """
        self._require_same_optimizer(values["classes"])
        by_weight = _by_weight(stored)
        for index, ((name, shard), optimizer) in enumerate(
            zip(self._weights.items(), self._owners, strict=True)
        ):
            state: dict[str, Any] = {}
            for key, entry in values["scalars"].items():
                if index in entry["weights"]:
                    dtype = stored[f"{OPTIMIZER}{key}"].dtype
                    state[key] = torch.zeros((), dtype=dtype)
            for key, suffixes in by_weight.get(name, {}).items():
                tensor = _empty_tensor(key, name, shard, suffixes, stored)
                if tensor is not None:
                    state[key] = tensor
            if state:
                optimizer.state[shard.tensor] = state

    def _require_same_optimizer(self, classes: Sequence[str]) -> None:
        own = [type(optimizer).__name__ for optimizer in self._optimizers]
        if [*classes] != own:
            raise ShardedTensorError(
                f"holds the state of {' and '.join(classes)}, and training.optimizer is "
                f"{' and '.join(own)}; write the earlier optimizer, or give the run another name"
            )

    def load_targets(self) -> dict[ShardSpec, LocalShard]:
        """Return :meth:`tensors` on the device of the weights, where collectives take them."""
        device = next(iter(self._weights.values())).tensor.device
        return {
            spec: replace(shard, tensor=shard.tensor.to(device))
            for spec, shard in self.tensors().items()
        }

    def set_values(self, values: Mapping[str, Any], loaded: Mapping[ShardSpec, LocalShard]) -> None:
        """Set the state that is no tensor, and scalars from the stacks in ``loaded``."""
        stacks = {spec.name.removeprefix(OPTIMIZER): stack for spec, stack in loaded.items()}
        weights = [shard.tensor for shard in self._weights.values()]
        for key, entry in values["scalars"].items():
            stack = stacks[key].tensor.cpu()
            for position, index in enumerate(entry["weights"]):
                owner, weight = self._owners[index], weights[index]
                scalar = stack[position].clone()
                owner.state[weight][key] = _place_scalar(owner, weight, scalar, cpu=entry["cpu"])
        for key, by_index in values["numbers"].items():
            for position, number in by_index.items():
                index = int(position)
                self._owners[index].state[weights[index]][key] = number
        for group, initial, changed in zip(
            self._groups(), self._initial_groups, values["groups"], strict=True
        ):
            group.update(
                {key: _like(group.get(key), value) for key, value in (initial | changed).items()}
            )


def _place_scalar(
    optimizer: torch.optim.Optimizer, weight: Tensor, value: Tensor, *, cpu: bool
) -> Tensor:
    # Fused and capturable kernels read scalars on the device.
    on_device = any(optimizer.defaults.get(flag) for flag in ("fused", "capturable"))
    return value.to(weight.device if on_device or not cpu else "cpu")


def _named(key: str, name: str, shard: LocalShard, value: Tensor) -> tuple[ShardSpec, LocalShard]:
    rows = replace(shard, tensor=value)
    quantized = shard.num_shards > 1 and not value.is_floating_point()
    if value.shape == shard.tensor.shape and not quantized:
        return ShardSpec(f"{OPTIMIZER}{key}.{name}", (shard.start, *(0,) * (value.dim() - 1))), rows
    suffix = _shard_suffix(shard)
    return ShardSpec(f"{OPTIMIZER}{key}.{name}{suffix}", (0,) * value.dim()), rows


def _shard_suffix(shard: LocalShard) -> str:
    return f"@{shard.shard_index}/{shard.num_shards}" if shard.num_shards > 1 else ""


def _by_weight(stored: Mapping[str, StoredTensor]) -> dict[str, dict[str, set[str]]]:
    """Return the suffixes of the tensors with dimensions, by weight and key."""
    found: dict[str, dict[str, set[str]]] = {}
    for name in stored:
        key, separator, rest = name.removeprefix(OPTIMIZER).partition(".")
        if name.startswith(OPTIMIZER) and separator:
            weight, at, shard = rest.partition("@")
            found.setdefault(weight, {}).setdefault(key, set()).add(at + shard)
    return found


def _empty_tensor(
    key: str,
    name: str,
    shard: LocalShard,
    suffixes: set[str],
    stored: Mapping[str, StoredTensor],
) -> Tensor | None:
    """Return a tensor for this rank's rows of a stored one; None if only other ranks have it.

    Raises:
        ShardedTensorError: it was stored for other shards.
    """
    rows, own = shard.tensor, _shard_suffix(shard)
    whole = stored.get(f"{OPTIMIZER}{key}.{name}")
    if own and own in suffixes:
        return _zeros(stored[f"{OPTIMIZER}{key}.{name}{own}"], rows.device)
    if whole is not None and _is_like(whole, shard):
        return torch.zeros_like(rows, dtype=whole.dtype)
    if whole is not None and not own:
        return _zeros(whole, rows.device)
    if own and any(suffix.endswith(f"/{shard.num_shards}") for suffix in suffixes):
        return None
    raise ShardedTensorError(
        f"the optimizer's {key} is of other shards of {name}; resume with the same number of GPUs "
        "and the same sharding"
    )


def _zeros(stored: StoredTensor, device: torch.device) -> Tensor:
    return torch.zeros(stored.shape, dtype=stored.dtype, device=device)


def _is_like(stored: StoredTensor, shard: LocalShard) -> bool:
    """Return whether a stored tensor can have the shape of the full weight."""
    rows = shard.tensor
    same_columns = stored.shape[1:] == tuple(rows.shape[1:])
    enough = len(stored.shape) == rows.dim() and stored.shape[0] >= shard.start + rows.shape[0]
    return same_columns and (enough if shard.num_shards > 1 else stored.shape == rows.shape)


def _plain_group(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key not in _NOT_STATE}


def _like(current: Any, value: Any) -> Any:
    """Return ``value`` from JSON in the type of ``current``: a pair stays a tuple."""
    return tuple(value) if isinstance(current, tuple) else value


def _check_savable(what: str, value: Any, *, tensors: bool = True) -> None:
    if isinstance(value, Tensor):
        savable = tensors and has_type(value.dtype)
    elif isinstance(value, (list, tuple)):
        savable = all(isinstance(item, _Plain) for item in value)
    else:
        savable = isinstance(value, _Plain)
    if not savable:
        kind = type(value).__name__
        raise UnsavableStateError(f"{what} is a {kind}, which a checkpoint cannot hold")
