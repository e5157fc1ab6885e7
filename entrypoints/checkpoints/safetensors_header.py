"""The header of a safetensors file: each tensor's name, type, shape and place.

The format is the header's length in 8 bytes, the header as JSON, then the tensors' bytes
(safetensors README, read 2026-11). The library writes all tensors of a file at once and checks a
header only while it opens the whole file, so both are done here. This module needs no PyTorch.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from operator import index
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

_MAX_BYTES = 100_000_000
"""Limit of the safetensors library."""

_BITS = {
    **dict.fromkeys(("F64", "I64", "U64", "C64"), 64),
    **dict.fromkeys(("F32", "I32", "U32"), 32),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 16),
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0"), 8),
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    "F4": 4,
}
"""Type → bits of a value (safetensors 0.6, tensor.rs)."""

_TORCH_NAMES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U8": "uint8",
    "BOOL": "bool",
}
"""Type → its name in PyTorch, of types that checkpoints and models hold."""

_TYPES = {name: dtype for dtype, name in _TORCH_NAMES.items()}

ReadRange = Callable[[int, int], bytes]
"""Returns up to so many bytes of a file: ``(start, length)``."""


class HeaderError(ValueError):
    """A file is damaged; the message is one line with the fix."""


@dataclass(frozen=True)
class TensorEntry:
    """A tensor in a header: name of its type, shape, and where its bytes are in the data."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


@dataclass(frozen=True)
class Header:
    """A header: its JSON, and its ``tensors`` by name, in the order of their bytes."""

    text: bytes
    tensors: Mapping[str, TensorEntry]


def has_type(dtype: torch.dtype) -> bool:
    """Return whether checkpoints and models hold tensors of a type."""
    return str(dtype).removeprefix("torch.") in _TYPES


def type_name(dtype: torch.dtype) -> str:
    """Return the name of a type in headers.

    Raises:
        KeyError: not :func:`has_type`.
    """
    return _TYPES[str(dtype).removeprefix("torch.")]


def torch_type(name: str) -> torch.dtype:
    """Return the type of a name in headers.

    Raises:
        KeyError: it is none of a checkpoint or model.
    """
    import torch

    dtype: torch.dtype = getattr(torch, _TORCH_NAMES[name])
    return dtype


def header_bytes(
    tensors: Iterable[tuple[str, torch.dtype, Sequence[int]]], metadata: Mapping[str, str]
) -> bytes:
    """Return what precedes a file's data; ``tensors`` are name, type and shape in its order."""
    document: dict[str, Any] = {"__metadata__": dict(metadata)}
    end = 0
    for name, dtype, shape in tensors:
        start, end = end, end + prod(shape) * dtype.itemsize
        document[name] = {
            "dtype": type_name(dtype),
            "shape": list(shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(document, separators=(",", ":")).encode()
    # The data must start at a multiple of 8 bytes; spaces may follow the JSON.
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def parse_header(read: ReadRange, size: int, path: str) -> Header:
    """Return the header of a file of ``size`` bytes, whose name is ``path`` in errors.

    Raises:
        HeaderError: it is damaged, longer than the format allows, or the file is shorter than it
            says.
    """
    damaged = HeaderError(f"{path}: the safetensors header is damaged; copy the model again")
    length = int.from_bytes(read(0, 8), "little")
    if size < 8 or length > min(size - 8, _MAX_BYTES):
        raise damaged
    text = read(8, length)
    try:
        document = json.loads(text, object_pairs_hook=_unique)
        document.pop("__metadata__", None)
        entries = {name: _entry(value) for name, value in document.items()}
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        raise damaged from None
    ordered = dict(sorted(entries.items(), key=lambda item: (item[1].start, item[1].end)))
    end = 0
    for entry in ordered.values():
        if entry.start != end:
            raise damaged
        end = entry.end
    if size != (needed := 8 + len(text) + end):
        raise HeaderError(f"{path} has {size:,} bytes of {needed:,}; copy the model again")
    return Header(text, ordered)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object, of which another reader could take another value of the same key."""
    document = dict(pairs)
    if len(document) != len(pairs):
        raise ValueError("duplicate key")
    return document


def _entry(value: Mapping[str, Any]) -> TensorEntry:
    shape = tuple(map(index, value["shape"]))
    start, end = map(index, value["data_offsets"])
    bits = _BITS[value["dtype"]] * prod(shape)
    if min(shape, default=0) < 0 or start < 0 or bits != 8 * (end - start):
        raise ValueError("offsets do not fit the shape")
    return TensorEntry(value["dtype"], shape, start, end)
