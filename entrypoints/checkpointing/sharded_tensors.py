"""Tensors of a checkpoint, in pieces: each process writes some, any number of processes reads them.

A process's file is safetensors. Its header says of each piece which box of which whole tensor it
is, so whoever reads needs no word of how many processes wrote, or how they had split the weights.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import add
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

_BOXES = "boxes"


class ShardedTensorError(ValueError):
    """Pieces do not make up what is asked of them; the message is one line."""


@dataclass(frozen=True)
class ShardSpec:
    """Where a piece starts in its whole tensor, along each dimension."""

    name: str
    start: tuple[int, ...] = ()


def partition_by_size(sizes: Mapping[ShardSpec, int], processes: int) -> list[list[ShardSpec]]:
    """Pieces for each process, of about equal bytes: the largest first, each to who has least."""
    dealt: list[list[ShardSpec]] = [[] for _ in range(processes)]
    loads = [0] * processes
    for box in sorted(sizes, key=lambda box: (-sizes[box], box.name)):
        least = loads.index(min(loads))
        dealt[least].append(box)
        loads[least] += sizes[box]
    return dealt


def save_shards(path: Path, pieces: Mapping[ShardSpec, Tensor]) -> None:
    """Write a process's pieces; of a whole tensor it has one at most."""
    from safetensors.torch import save_file

    boxes = {box.name: box.start for box in pieces}
    tensors = {box.name: tensor for box, tensor in pieces.items()}
    save_file(tensors, path, metadata={_BOXES: json.dumps(boxes)})


def load_into(files: Iterable[Path], targets: Mapping[ShardSpec, Tensor]) -> None:
    """Copy into each target what the pieces in ``files`` hold of it.

    Raises:
        PiecesError: a part of a target is in no file.
    """
    wanted = {box.name: (box.start, tensor) for box, tensor in targets.items()}
    missing = {box.name: tensor.numel() for box, tensor in targets.items()}
    for path in files:
        for name, start, piece in _pieces(path):
            if name in wanted:
                missing[name] -= _copy_overlap(start, piece, *wanted[name])
    lacking = [name for name, elements in missing.items() if elements]
    if lacking:
        raise ShardedTensorError(f"{len(lacking)} tensors are not whole, {lacking[0]} among them")


def stored_names(files: Iterable[Path]) -> set[str]:
    """The tensors of which there are pieces."""
    return {name for path in files for name, *_ in _pieces(path)}


def load_full(files: Sequence[Path], prefix: str) -> dict[str, Tensor]:
    """Every tensor whose name begins with ``prefix``, without it, put together.

    Raises:
        PiecesError: a part of one is in no file.
    """
    shapes: dict[str, tuple[int, ...]] = {}
    for path in files:
        for name, start, piece in _pieces(path):
            if name.startswith(prefix):
                ends = tuple(map(add, start, piece.get_shape()))
                shapes[name] = tuple(map(max, ends, shapes.get(name, ends)))
    wholes = {name: torch.empty(shape) for name, shape in shapes.items()}
    load_into(files, {ShardSpec(name, (0,) * one.dim()): one for name, one in wholes.items()})
    return {name.removeprefix(prefix): one for name, one in wholes.items()}


def _pieces(path: Path) -> Iterator[tuple[str, tuple[int, ...], Any]]:
    """Name, start and a slice of each piece, which is read when it is cut from."""
    from safetensors import safe_open

    with safe_open(path, framework="pt") as file:
        boxes = json.loads(file.metadata()[_BOXES])
        for name, start in boxes.items():
            yield name, tuple(start), file.get_slice(name)


def slices(path: Path) -> Iterator[tuple[str, Any]]:
    """Name and slice of each tensor in a file of safetensors, read when it is cut from."""
    from safetensors import safe_open

    with safe_open(path, framework="pt") as file:
        for name in file.keys():  # noqa: SIM118  no mapping
            yield name, file.get_slice(name)


def _copy_overlap(
    start: tuple[int, ...], piece: Any, target_start: tuple[int, ...], target: Tensor
) -> int:
    """Copy what the two boxes have in common; returns how many elements that is."""
    source_cut, target_cut = [], []
    # A scalar has neither start nor shape: the overlap is all of it.
    for own, size, other, other_size in zip(
        start, piece.get_shape(), target_start, target.shape, strict=True
    ):
        low, high = max(own, other), min(own + size, other + other_size)
        if low >= high:
            return 0
        source_cut.append(slice(low - own, high - own))
        target_cut.append(slice(low - other, high - other))
    part = target[tuple(target_cut)]
    part.copy_(piece[tuple(source_cut)] if source_cut else piece[...])
    return part.numel()
