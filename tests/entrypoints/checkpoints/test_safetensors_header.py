"""Limits of a safetensors file's header, as the library has them."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import save
from sm_train.entrypoints.checkpoints.safetensors_header import HeaderError, parse_header


@pytest.mark.parametrize("content", [save({}), (2).to_bytes(8, "little") + b"{}"])
def test_a_file_without_tensors_has_a_header(content: bytes) -> None:
    assert parse_header(lambda start, length: content[start : start + length], len(content), "a")


def test_a_header_longer_than_the_format_allows_is_not_read() -> None:
    """The library refuses more than 100 MB (safetensors 0.6, tensor.rs)."""
    read = list[int]()

    def read_range(start: int, length: int) -> bytes:
        read.append(length)
        return (100_000_001).to_bytes(8, "little")[start : start + length]

    with pytest.raises(HeaderError):
        parse_header(read_range, 10**9, "model.safetensors")
    assert read == [8]


def test_a_header_gives_the_places_of_tensors() -> None:
    content = save({"a": torch.zeros(2, 3), "b": torch.zeros(4, dtype=torch.bfloat16)})
    header = parse_header(lambda start, length: content[start : start + length], len(content), "a")
    assert {name: entry.shape for name, entry in header.tensors.items()} == {"a": (2, 3), "b": (4,)}
