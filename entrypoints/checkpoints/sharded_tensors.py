"""Tensors of a checkpoint in shards: each rank writes some, any number of ranks reads them.

A rank's file is safetensors. Its header holds the full tensor's name and the start of each shard,
so a reader needs to know neither how many ranks wrote nor how they had sharded the weights.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import add
from pathlib import Path
from typing import Any

import torch
from blake3 import blake3
from sm_train.entrypoints.checkpoints.safetensors_header import header_bytes, torch_type
from torch import Tensor

_STARTS_KEY = "boxes"
"""Key in a file's metadata: JSON of tensor name → start of its shard. Part of the format."""


class ShardedTensorError(ValueError):
    """The shards do not cover a requested tensor; the message is one line."""


_CHUNK_BYTES = 512 << 10
"""What is digested and then written at a time: it stays in a core's cache between both, which takes
a sixth less CPU time and memory bandwidth than chunks of 16 MiB."""


@dataclass(frozen=True)
class ShardSpec:
    """A tensor's name and where the shard starts in it, along each dimension."""

    name: str
    start: tuple[int, ...] = ()


def partition_by_size(sizes: Mapping[ShardSpec, int], ranks: int) -> list[list[ShardSpec]]:
    """Partition shards over ``ranks`` with about equal bytes; ``sizes`` are in bytes.

    Greedy: the largest shard first, each to the rank with the fewest bytes so far.
    """
    assigned: list[list[ShardSpec]] = [[] for _ in range(ranks)]
    loads = [0] * ranks
    for spec in sorted(sizes, key=lambda spec: (-sizes[spec], spec.name)):
        least = loads.index(min(loads))
        assigned[least].append(spec)
        loads[least] += sizes[spec]
    return assigned


def save_shards(path: Path, shards: Mapping[ShardSpec, Tensor]) -> str:
    """Write a rank's shards, at most one per tensor; return the file's BLAKE3 digest.

    An existing file is overwritten in place. On a CPU that trains as well, memory for new pages
    costs the system twice as much as all other work here; the library's ``save_file`` also copies
    every tensor, and digesting the file would read it again. Format: safetensors README (2026-11).
    """
    starts = {spec.name: spec.start for spec in shards}
    # The library's order: each tensor's data is aligned to the size of its elements.
    ordered = sorted(shards.items(), key=_alignment)
    header = header_bytes(
        ((spec.name, tensor.dtype, tensor.shape) for spec, tensor in ordered),
        {_STARTS_KEY: json.dumps(starts)},
    )
    return _write([memoryview(header), *(_content(tensor) for _, tensor in ordered)], path)


def _alignment(shard: tuple[ShardSpec, Tensor]) -> tuple[int, str]:
    spec, tensor = shard
    return -tensor.element_size(), spec.name


def _content(tensor: Tensor) -> memoryview:
    """Return the bytes of a tensor in host memory, without a copy if it is contiguous."""
    flat = tensor.detach().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data if flat.numel() else memoryview(b"")


def _write(contents: Sequence[memoryview], path: Path) -> str:
    """Write ``contents`` in order, and digest them in the same pass.

    Both calls release the GIL for a chunk, which the training thread would wait for otherwise.
    """
    digest = blake3()
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT, 0o666)
    with os.fdopen(descriptor, "wb", buffering=0) as file:
        for content in contents:
            for start in range(0, len(content), _CHUNK_BYTES):
                chunk = content[start : start + _CHUNK_BYTES]
                digest.update(chunk)
                while chunk:
                    # A full disk may take a part of it.
                    chunk = chunk[file.write(chunk) :]
        file.truncate()
    return digest.hexdigest()


def load_into(files: Iterable[Path], targets: Mapping[ShardSpec, Tensor]) -> None:
    """Fill each target from the shards in ``files`` that overlap it.

    Raises:
        ShardedTensorError: the files do not cover a target.
    """
    wanted = {spec.name: (spec.start, tensor) for spec, tensor in targets.items()}
    missing = {spec.name: tensor.numel() for spec, tensor in targets.items()}
    for path in files:
        for name, start, shard in _stored_shards(path):
            if name in wanted:
                missing[name] -= _copy_overlap(start, shard, *wanted[name])
    incomplete = [name for name, elements in missing.items() if elements]
    if incomplete:
        raise ShardedTensorError(f"{len(incomplete)} tensors are incomplete: {incomplete[0]}, …")


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of which ``files`` have shards: its full ``shape`` and its type."""

    shape: tuple[int, ...]
    dtype: torch.dtype


def stored_tensors(files: Iterable[Path]) -> dict[str, StoredTensor]:
    """Return the tensors that have shards in ``files``, by name; reads headers only."""
    tensors: dict[str, StoredTensor] = {}
    for path in files:
        for name, start, shard in _stored_shards(path):
            ends = tuple(map(add, start, shard.get_shape()))
            shape = tuple(map(max, ends, tensors[name].shape)) if name in tensors else ends
            tensors[name] = StoredTensor(shape, torch_type(shard.get_dtype()))
    return tensors


def load_full(files: Sequence[Path], prefix: str) -> dict[str, Tensor]:
    """Assemble every tensor whose name starts with ``prefix``; the result's names lack it.

    Raises:
        ShardedTensorError: the files do not cover a tensor.
    """
    reader = TensorReader(files)
    names = [name for name in reader.stored if name.startswith(prefix)]
    return {name.removeprefix(prefix): reader.load(name) for name in names}


class TensorReader:
    """Assembles the tensors of a checkpoint one at a time; ``stored`` has them sorted by name.

    Headers are read once.
    """

    def __init__(self, files: Sequence[Path]) -> None:
        self.stored = dict(sorted(stored_tensors(files).items()))
        self._shards: dict[str, list[tuple[tuple[int, ...], Any]]] = {}
        for path in files:
            for name, start, shard in _stored_shards(path):
                self._shards.setdefault(name, []).append((start, shard))

    def load(self, name: str) -> Tensor:
        """Assemble one tensor.

        Raises:
            ShardedTensorError: the files do not cover it.
        """
        stored = self.stored[name]
        tensor = torch.empty(stored.shape, dtype=stored.dtype)
        missing = tensor.numel()
        for start, shard in self._shards[name]:
            missing -= _copy_overlap(start, shard, (0,) * tensor.dim(), tensor)
        if missing:
            raise ShardedTensorError(f"the files do not cover {name}")
        return tensor


def _stored_shards(path: Path) -> Iterator[tuple[str, tuple[int, ...], Any]]:
    """Yield name, start and lazy slice of each shard; indexing the slice reads it."""
    from safetensors import safe_open

    with safe_open(path, framework="pt") as file:
        starts = json.loads(file.metadata()[_STARTS_KEY])
        for name, start in starts.items():
            yield name, tuple(start), file.get_slice(name)


def slices(path: Path) -> Iterator[tuple[str, Any]]:
    """Yield name and lazy slice of each tensor in a safetensors file."""
    from safetensors import safe_open

    with safe_open(path, framework="pt") as file:
        for name in file.keys():  # noqa: SIM118  not a mapping
            yield name, file.get_slice(name)


def _copy_overlap(
    start: tuple[int, ...], shard: Any, target_start: tuple[int, ...], target: Tensor
) -> int:
    """Copy the overlap of a stored shard and a target; return its number of elements.

    ``start`` and ``target_start`` are positions in the same full tensor.
    """
    source_index, target_index = [], []
    for own, size, other, other_size in zip(
        start, shard.get_shape(), target_start, target.shape, strict=True
    ):
        low, high = max(own, other), min(own + size, other + other_size)
        if low >= high:
            return 0
        source_index.append(slice(low - own, high - own))
        target_index.append(slice(low - other, high - other))
    part = target[tuple(target_index)]
    # A scalar has no dimensions: the overlap is all of it, which a slice reads by an ellipsis.
    part.copy_(shard[tuple(source_index)] if source_index else shard[...])
    return part.numel()
