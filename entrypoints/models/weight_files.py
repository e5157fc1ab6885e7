"""Write safetensors files tensor by tensor: the memory is that of one tensor, not of the model.

The format is a header of JSON after its length, then the tensors' bytes (safetensors README, read
2026-11). The library's ``save_file`` takes all tensors of a file at once.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import IO

import torch
from sm_train.entrypoints.base.atomic_write import (
    NOT_UPLOADED_SUFFIX,
    durable_replace,
    write_atomic,
)
from sm_train.entrypoints.checkpoints.safetensors_header import header_bytes, torch_type
from sm_train.entrypoints.models.component_files import ComponentFileError, read_file_header
from torch import Tensor

MODEL_WEIGHTS = "diffusion_pytorch_model"
"""Name of the weights of a diffusers model, without suffix."""

_FILE_BYTES = 5 * 10**9
"""Maximum size of a weight file of a network, as in published models."""


@dataclass(frozen=True)
class TensorSpec:
    """Precision and shape of a tensor."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @classmethod
    def of(cls, tensor: Tensor) -> TensorSpec:
        """Return the spec of ``tensor``, of the full tensor if it is sharded."""
        return cls(tensor.dtype, tuple(tensor.shape))

    @property
    def bytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize

    def converted(self, dtype: torch.dtype | None) -> TensorSpec:
        """Return the spec after a conversion, which leaves integers as they are."""
        converts = dtype is not None and self.dtype.is_floating_point
        return TensorSpec(dtype, self.shape) if converts and dtype is not None else self


Layout = Mapping[str, TensorSpec]
"""Tensors of a file or model, in the order in which they are written."""


def write_tensors(path: Path, layout: Layout, tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Write ``tensors``, which come in the order of ``layout``, to one file atomically.

    Each is converted to the precision of its spec.
    """
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}{NOT_UPLOADED_SUFFIX}")
    try:
        with temporary.open("wb") as file:
            tensors_of_header = ((name, spec.dtype, spec.shape) for name, spec in layout.items())
            file.write(header_bytes(tensors_of_header, {"format": "pt"}))
            for (expected, spec), (name, tensor) in zip(layout.items(), tensors, strict=True):
                assert name == expected, f"{name} comes where {expected} is due"
                _write_tensor(file, tensor.detach().to("cpu", spec.dtype))
        durable_replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def _write_tensor(file: IO[bytes], tensor: Tensor) -> None:
    if tensor.numel():
        file.write(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)


def read_layout(path: Path) -> dict[str, TensorSpec]:
    """Return the layout of a safetensors file from its header.

    Raises:
        ComponentFileError: the header is damaged, or has a type that models do not use.
    """
    layout = {}
    for name, entry in read_file_header(path).tensors.items():
        try:
            layout[name] = TensorSpec(torch_type(entry.dtype), entry.shape)
        except KeyError:
            problem = f"{path}: {name} is {entry.dtype}, which models do not use"
            raise ComponentFileError(problem) from None
    return layout


def read_tensors(path: Path, names: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
    """Yield tensors of a safetensors file by name; each is read when it is due."""
    from safetensors import safe_open

    with safe_open(path, framework="pt") as file:
        for name in names:
            yield name, file.get_tensor(name)


def convert_file(source: Path, target: Path, dtype: torch.dtype) -> None:
    """Copy a safetensors file with its floating-point tensors in another precision."""
    layout = read_layout(source)
    converted = {name: spec.converted(dtype) for name, spec in layout.items()}
    write_tensors(target, converted, read_tensors(source, layout))


def write_network(
    folder: Path,
    layout: Layout,
    tensors: Iterable[tuple[str, Tensor]],
    on_tensor: Callable[[int], None] = lambda _: None,
) -> None:
    """Write a network's weights to files of at most :data:`_FILE_BYTES`, as diffusers does.

    Call ``on_tensor`` with the bytes of each tensor.
    """
    stream = _reported(tensors, layout, on_tensor)
    files = _assign_files(layout)
    for name, names in files.items():
        write_tensors(
            folder / name,
            {tensor_name: layout[tensor_name] for tensor_name in names},
            _take(stream, len(names)),
        )
    if len(files) > 1:
        index = {
            "metadata": {"total_size": sum(spec.bytes for spec in layout.values())},
            "weight_map": {
                tensor_name: name for name, names in files.items() for tensor_name in names
            },
        }
        content = (json.dumps(index, indent=2) + "\n").encode()
        write_atomic(folder / f"{MODEL_WEIGHTS}.safetensors.index.json", content)


def _reported(
    tensors: Iterable[tuple[str, Tensor]], layout: Layout, on_tensor: Callable[[int], None]
) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in tensors:
        on_tensor(layout[name].bytes)
        yield name, tensor


def _take(stream: Iterator[tuple[str, Tensor]], count: int) -> Iterator[tuple[str, Tensor]]:
    """Yield the next ``count`` tensors; unlike islice it leaves the stream open."""
    for _ in range(count):
        yield next(stream)


def _assign_files(layout: Layout) -> dict[str, list[str]]:
    """Assign tensors to files in their order; return the tensors' names by file name."""
    groups: list[list[str]] = [[]]
    free = _FILE_BYTES
    for name, spec in layout.items():
        if spec.bytes > free and groups[-1]:
            groups.append([])
            free = _FILE_BYTES
        groups[-1].append(name)
        free -= spec.bytes
    if len(groups) == 1:
        return {f"{MODEL_WEIGHTS}.safetensors": groups[0]}
    count = len(groups)
    return {
        f"{MODEL_WEIGHTS}-{number:05d}-of-{count:05d}.safetensors": names
        for number, names in enumerate(groups, 1)
    }
