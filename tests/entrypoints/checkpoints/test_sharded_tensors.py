"""Sharded tensors load back, whatever the number of writers and readers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from blake3 import blake3
from hypothesis import given, settings
from hypothesis import strategies as st
from sm_train.entrypoints.checkpoints.sharded_tensors import (
    ShardedTensorError,
    ShardSpec,
    load_full,
    load_into,
    partition_by_size,
    save_shards,
)


def test_the_library_reads_every_type_and_layout(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    tensors = {
        "a bool": torch.tensor([True, False, True]),
        "b half": torch.arange(5, dtype=torch.bfloat16),
        "c long": torch.tensor(7),
        "d empty": torch.empty(0, 3),
        "e transposed": counting([3, 4]).T,
        "f byte": torch.arange(3, dtype=torch.uint8),
        "g eight bits": torch.ones(3, dtype=torch.float8_e4m3fn),
    }
    path = tmp_path / "x.safetensors"
    digest = save_shards(path, {ShardSpec(name): tensor for name, tensor in tensors.items()})
    assert digest == blake3(path.read_bytes()).hexdigest()
    read = load_file(path)
    assert read.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert read[name].dtype == tensor.dtype
        assert torch.equal(read[name].float(), tensor.float()), name


def test_a_longer_file_is_overwritten_in_place(tmp_path: Path) -> None:
    path, fresh = tmp_path / "x", tmp_path / "fresh"
    save_shards(path, {ShardSpec("t"): torch.ones(10_000)})
    inode = path.stat().st_ino
    shards = {ShardSpec("t", (3,)): torch.zeros(10)}
    assert save_shards(path, shards) == save_shards(fresh, shards)
    assert path.read_bytes() == fresh.read_bytes()
    assert path.stat().st_ino == inode


SHAPES = st.lists(st.integers(1, 7), max_size=3)


def counting(shape: list[int]) -> torch.Tensor:
    return torch.arange(torch.Size(shape).numel(), dtype=torch.float32).reshape(shape)


def split(full: torch.Tensor, ranks: int) -> list[tuple[tuple[int, ...], torch.Tensor]]:
    """Return start and content of each shard, split along the first dimension as FSDP does.

    There may be fewer shards than ranks.
    """
    if not full.dim():
        return [((), full)]
    rows = -(-len(full) // ranks)
    starts = range(0, len(full), rows)
    rest = (0,) * (full.dim() - 1)
    return [((start, *rest), full[start : start + rows].contiguous()) for start in starts]


@settings(deadline=None)
@given(st.lists(SHAPES, min_size=1, max_size=5), st.integers(1, 5), st.integers(1, 5))
def test_shards_load_back_for_any_number_of_writers_and_readers(
    tmp_path_factory: pytest.TempPathFactory, shapes: list[list[int]], writers: int, readers: int
) -> None:
    folder = tmp_path_factory.mktemp("shards")
    tensors = {f"t{number}": counting(shape) for number, shape in enumerate(shapes)}
    files: list[dict[ShardSpec, torch.Tensor]] = [{} for _ in range(writers)]
    for name, full in tensors.items():
        for rank, (start, shard) in enumerate(split(full, writers)):
            files[rank][ShardSpec(name, start)] = shard
    paths = [folder / f"{rank}.safetensors" for rank in range(writers)]
    for path, shards in zip(paths, files, strict=True):
        save_shards(path, shards)
    for name, full in tensors.items():
        for start, expected in split(full, readers):
            target = torch.full_like(expected, -1.0)
            load_into(paths, {ShardSpec(name, start): target})
            assert torch.equal(target, expected)


def test_incomplete_tensor_is_named(tmp_path: Path) -> None:
    path = tmp_path / "one.safetensors"
    save_shards(path, {ShardSpec("there", (0,)): counting([3])})
    with pytest.raises(ShardedTensorError, match="1 tensors are incomplete: gone, …"):
        load_into(
            [path],
            {ShardSpec("there", (0,)): counting([3]), ShardSpec("gone", (0,)): counting([3])},
        )
    with pytest.raises(ShardedTensorError, match="there"):
        load_into([path], {ShardSpec("there", (0,)): counting([4])})


def test_full_tensors_are_assembled_by_prefix(tmp_path: Path) -> None:
    first, two = tmp_path / "one.safetensors", tmp_path / "two.safetensors"
    full = counting([3, 2])
    save_shards(
        first, {ShardSpec("a.x", (0, 0)): full[:2].clone(), ShardSpec("b.x", ()): counting([])}
    )
    save_shards(
        two, {ShardSpec("a.x", (2, 0)): full[2:].clone(), ShardSpec("a.y", ()): torch.tensor(5.0)}
    )
    loaded = load_full([first, two], "a.")
    assert {name: tensor.tolist() for name, tensor in loaded.items()} == {
        "x": full.tolist(),
        "y": 5.0,
    }
    with pytest.raises(ShardedTensorError, match=r"a\.x"):
        load_full([two], "a.")


@given(st.dictionaries(st.builds(ShardSpec, st.text()), st.integers(0, 1000)), st.integers(1, 9))
def test_each_shard_is_assigned_once_and_loads_are_balanced(
    sizes: dict[ShardSpec, int], ranks: int
) -> None:
    assigned = partition_by_size(sizes, ranks)
    names = [spec.name for specs in assigned for spec in specs]
    assert sorted(names) == sorted(spec.name for spec in sizes)
    loads = [sum(sizes[spec] for spec in specs) for specs in assigned]
    assert max(loads) - min(loads) <= max(sizes.values(), default=0)


@given(st.lists(st.integers(1, 10**9), min_size=1, max_size=40), st.integers(1, 8))
def test_partition_by_size_is_balanced(sizes: list[int], ranks: int) -> None:
    """A rank exceeds the least loaded one by at most its smallest shard."""
    shards = {ShardSpec(str(number)): size for number, size in enumerate(sizes)}
    assigned = partition_by_size(shards, ranks)
    assert sorted(spec.name for specs in assigned for spec in specs) == sorted(
        spec.name for spec in shards
    )
    loads = [sum(shards[spec] for spec in specs) for specs in assigned]
    for specs, load in zip(assigned, loads, strict=True):
        if specs:
            assert load - min(loads) <= min(shards[spec] for spec in specs)
