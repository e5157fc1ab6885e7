"""Checkpoints in pieces: whoever wrote them and however they are cut, the tensors come back."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sm_train.entrypoints.checkpointing.sharded_tensors import (
    ShardedTensorError,
    ShardSpec,
    load_full,
    load_into,
    partition_by_size,
    save_shards,
)

SHAPES = st.lists(st.integers(1, 7), max_size=3)


def numbers(shape: list[int]) -> torch.Tensor:
    return torch.arange(torch.Size(shape).numel(), dtype=torch.float32).reshape(shape)


def cut(whole: torch.Tensor, parts: int) -> list[tuple[tuple[int, ...], torch.Tensor]]:
    """Along the first dimension, as FSDP does: the last processes may have nothing."""
    if not whole.dim():
        return [((), whole)]
    rows = -(-len(whole) // parts)
    starts = range(0, len(whole), rows)
    rest = (0,) * (whole.dim() - 1)
    return [((start, *rest), whole[start : start + rows].contiguous()) for start in starts]


@settings(deadline=None)
@given(st.lists(SHAPES, min_size=1, max_size=5), st.integers(1, 5), st.integers(1, 5))
def test_however_they_were_cut_pieces_make_up_any_cut(
    tmp_path_factory: pytest.TempPathFactory, shapes: list[list[int]], writers: int, readers: int
) -> None:
    folder = tmp_path_factory.mktemp("pieces")
    wholes = {f"t{number}": numbers(shape) for number, shape in enumerate(shapes)}
    files: list[dict[ShardSpec, torch.Tensor]] = [{} for _ in range(writers)]
    for name, whole in wholes.items():
        for rank, (start, piece) in enumerate(cut(whole, writers)):
            files[rank][ShardSpec(name, start)] = piece
    paths = [folder / f"{rank}.safetensors" for rank in range(writers)]
    for path, pieces in zip(paths, files, strict=True):
        save_shards(path, pieces)
    for name, whole in wholes.items():
        for start, expected in cut(whole, readers):
            target = torch.full_like(expected, -1.0)
            load_into(paths, {ShardSpec(name, start): target})
            assert torch.equal(target, expected)


def test_what_no_file_holds_is_named(tmp_path: Path) -> None:
    path = tmp_path / "one.safetensors"
    save_shards(path, {ShardSpec("there", (0,)): numbers([3])})
    with pytest.raises(ShardedTensorError, match="1 tensors are incomplete: gone, …"):
        load_into(
            [path], {ShardSpec("there", (0,)): numbers([3]), ShardSpec("gone", (0,)): numbers([3])}
        )
    with pytest.raises(ShardedTensorError, match="there"):
        load_into([path], {ShardSpec("there", (0,)): numbers([4])})


def test_whole_tensors_are_put_together_and_found_by_their_prefix(tmp_path: Path) -> None:
    one, two = tmp_path / "one.safetensors", tmp_path / "two.safetensors"
    whole = numbers([3, 2])
    save_shards(
        one, {ShardSpec("a.x", (0, 0)): whole[:2].clone(), ShardSpec("b.x", ()): numbers([])}
    )
    save_shards(
        two, {ShardSpec("a.x", (2, 0)): whole[2:].clone(), ShardSpec("a.y", ()): torch.tensor(5.0)}
    )
    found = load_full([one, two], "a.")
    assert {name: one.tolist() for name, one in found.items()} == {"x": whole.tolist(), "y": 5.0}
    with pytest.raises(ShardedTensorError, match=r"a\.x"):
        load_full([two], "a.")


@given(st.dictionaries(st.builds(ShardSpec, st.text()), st.integers(0, 1000)), st.integers(1, 9))
def test_each_piece_is_dealt_once_and_loads_are_near_equal(
    sizes: dict[ShardSpec, int], processes: int
) -> None:
    dealt = partition_by_size(sizes, processes)
    assert sorted(box.name for boxes in dealt for box in boxes) == sorted(box.name for box in sizes)
    loads = [sum(sizes[box] for box in boxes) for boxes in dealt]
    assert max(loads) - min(loads) <= max(sizes.values(), default=0)
