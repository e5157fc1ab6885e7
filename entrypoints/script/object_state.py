"""The state of a loop's objects as named tensors and JSON: what a checkpoint can hold.

``state_dict`` of a module, an optimizer or any other object is a tree of dictionaries, lists and
tuples. Its tensors are saved as shards, like those of the built-in training; the tree, with a
tensor's name in its place, is JSON.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from sm_train.entrypoints.base.error import Error
from sm_train.entrypoints.checkpoints.safetensors_header import has_type
from sm_train.entrypoints.checkpoints.sharded_tensors import ShardSpec
from sm_train.entrypoints.distributed.local_shard import LocalShard, is_dtensor, local_shard
from torch import Tensor, nn

Tree = dict[str, Any]
"""A node of the tree, as JSON: one of the keys dict, list, tuple, value and tensor."""

Path = tuple[Any, ...]
"""Keys and indices that lead to a value of a state."""

_PLAIN = (bool, int, float, str, type(None))
_KEYS = (str, int, bool, type(None))


@dataclass(frozen=True)
class ObjectState:
    """The state of one object: its tree, and its tensors by name."""

    tree: Tree
    tensors: dict[str, Tensor]


def object_state(name: str, state: object) -> ObjectState:
    """Return the ``state`` of the object ``name``; the tensors share its memory.

    Raises:
        Error: a checkpoint cannot hold it.
    """
    tensors: dict[str, Tensor] = {}
    return ObjectState(_encode((name,), state, tensors), tensors)


def _encode(path: Path, value: object, tensors: dict[str, Tensor]) -> Tree:
    if isinstance(value, Tensor):
        name = _unused(".".join(map(str, path)), tensors)
        tensors[name] = _require_savable(path, value)
        return {
            "tensor": name,
            "shape": list(value.shape),
            "dtype": str(value.dtype).removeprefix("torch."),
            "sharded": local_shard(value).num_shards > 1,
        }
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, _KEYS):
                raise _unsavable(path, f"has a key of type {type(key).__name__}")
        return {
            "dict": [[key, _encode((*path, key), item, tensors)] for key, item in value.items()]
        }
    if isinstance(value, (list, tuple)):
        kind = "list" if isinstance(value, list) else "tuple"
        return {kind: [_encode((*path, at), item, tensors) for at, item in enumerate(value)]}
    if isinstance(value, _PLAIN):
        return {"value": value}
    raise _unsavable(path, f"is a {type(value).__name__}")


def _unused(name: str, tensors: Mapping[str, Tensor]) -> str:
    """Return ``name``, with a number if a key with dots has led to the same."""
    number = 2
    unused = name
    while unused in tensors:
        unused, number = f"{name}#{number}", number + 1
    return unused


def _require_savable(path: Path, tensor: Tensor) -> Tensor:
    if not has_type(tensor.dtype):
        raise _unsavable(path, f"is of type {tensor.dtype}")
    if tensor.is_sparse or tensor.is_quantized:
        raise _unsavable(path, "is a sparse or quantized tensor")
    if is_dtensor(tensor):
        shards = [placement for placement in tensor.placements if not placement.is_replicate()]  # type: ignore[attr-defined]
        # FSDP2 with HSDP: at most one dimension of the mesh shards, and only rows.
        if len(shards) > 1 or any(type(shard).__name__ != "Shard" or shard.dim for shard in shards):
            raise _unsavable(path, "is sharded otherwise than by rows")
    return tensor


def _unsavable(path: Path, what: str) -> Error:
    name, *keys = path
    where = f"{name}: {'.'.join(map(str, keys))}" if keys else str(name)
    return Error(
        f"Checkpointer: {where} {what}, which a checkpoint cannot hold; its state must be tensors, "
        "whole or sharded by rows, numbers and texts"
    )


def decode(tree: Tree, tensor: Callable[[Path, Tree], Tensor], path: Path = ()) -> Any:
    """Return the state of ``tree``; ``tensor`` returns the tensor at a path, given its node."""
    [kind, *_] = tree
    content = tree[kind]
    if kind == "dict":
        return {key: decode(item, tensor, (*path, key)) for key, item in content}
    if kind in ("list", "tuple"):
        values = [decode(item, tensor, (*path, at)) for at, item in enumerate(content)]
        return values if kind == "list" else tuple(values)
    return tensor(path, tree) if kind == "tensor" else content


def shards(tensors: Mapping[str, Tensor]) -> dict[ShardSpec, LocalShard]:
    """Return this rank's shards of ``tensors``."""
    return dict(_shard(name, tensor) for name, tensor in tensors.items())


def _shard(name: str, tensor: Tensor) -> tuple[ShardSpec, LocalShard]:
    shard = local_shard(tensor)
    dimensions = shard.tensor.dim()
    start = (shard.start, *(0,) * (dimensions - 1)) if dimensions else ()
    return ShardSpec(name, start), shard


class Targets:
    """The tensors that a stored state of an object is loaded into, by name.

    Those of a module are its own. Those of an optimizer are new, and sharded like their weights;
    those of any other object like the ones that it has now.
    """

    def __init__(self, name: str, target: Any) -> None:
        self._name, self._target = name, target
        self._current = dict(_tensors((), target.state_dict()))
        self._weights: list[Tensor] = []
        if isinstance(target, torch.optim.Optimizer):
            self._weights = [weight for group in target.param_groups for weight in group["params"]]
        self.tensors: dict[str, Tensor] = {}

    def tensor(self, path: Path, node: Tree) -> Tensor:
        """Return the tensor to load into, for :func:`decode`.

        Raises:
            Error: the object has a tensor of another shape, or none that says how it is sharded.
        """
        name, current = node["tensor"], self._current.get(path)
        if isinstance(self._target, nn.Module) and current is not None:
            if list(current.shape) != node["shape"]:
                raise Error(
                    f"Checkpointer: {name} has the shape {list(current.shape)}, and the "
                    f"checkpoint's has {node['shape']}; give the run another name to start over"
                )
            self.tensors[name] = current
        else:
            self.tensors[name] = self._new(self._like(path, current), node)
        return self.tensors[name]

    def _like(self, path: Path, current: Tensor | None) -> Tensor | None:
        if self._weights and len(path) > 2 and path[0] == "state":
            return self._weights[path[1]]
        return current

    def _new(self, like: Tensor | None, node: Tree) -> Tensor:
        dtype = getattr(torch, node["dtype"])
        if like is not None and is_dtensor(like) and list(like.shape) == node["shape"]:
            return torch.zeros_like(like.detach(), dtype=dtype)
        if node["sharded"] and not self._weights:
            raise Error(
                f"Checkpointer: {node['tensor']} was sharded, and {self._name} does not have it "
                "yet; create it before restore()"
            )
        return torch.zeros(node["shape"], dtype=dtype)


def _tensors(path: Path, state: object) -> Iterator[tuple[Path, Tensor]]:
    """Yield the tensors of a state with their paths."""
    if isinstance(state, Tensor):
        yield path, state
    elif isinstance(state, Mapping):
        for key, value in state.items():
            yield from _tensors((*path, key), value)
    elif isinstance(state, (list, tuple)):
        for at, value in enumerate(state):
            yield from _tensors((*path, at), value)
