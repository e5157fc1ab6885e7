"""Sources of data mixed by weight: shares, equal use of all samples, exact resume, both readers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import compress, islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sm_train.entrypoints.data_loading import indexed_reader
from sm_train.entrypoints.data_loading.loader import Loader, open_loader
from sm_train.entrypoints.data_loading.sample_ranges import Mixture, spread_sources
from sm_train.entrypoints.data_loading.shard_catalog import DataRank, mix_catalogs
from sm_train.entrypoints.data_loading.webdataset_reader import list_stream, mix_streams
from sm_train.entrypoints.job_interface.job_config import DataSource

from tests.support.cluster.training_jobs import png, write_shard
from tests.support.data_channels import (
    DATA_CONFIG,
    Cluster,
    caption_counts,
    distribute_shards,
    rest_of_epoch,
    take_batches,
    write_folder_index,
)

SOURCES = (DataSource("photos", 3.0), DataSource("art", 1.0))
PHOTOS, ART = 48, 8


@pytest.fixture(autouse=True)
def small_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let ranges and blocks have a few samples."""
    monkeypatch.setattr(indexed_reader, "READ_BYTES", 4000)
    monkeypatch.setattr(indexed_reader, "SHUFFLE_BLOCK_BYTES", 14000)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """48 photos in 6 shards and 8 works of art in 2, with indexes; captions name them."""
    root = tmp_path_factory.mktemp("sources")
    for name, shards, total in (("photos", 6, PHOTOS), ("art", 2, ART)):
        (root / name / "shards").mkdir(parents=True)
        for shard in range(shards):
            numbers = range(shard * total // shards, (shard + 1) * total // shards)
            write_shard(
                root / name / "shards" / f"{shard}.tar",
                {
                    f"{n:03d}": {"png": png(n, side=8 + 8 * (n % 2)), "txt": f"{name} {n}".encode()}
                    for n in numbers
                },
            )
        write_folder_index(root / name / "shards")
    return [root / "photos" / "shards", root / "art" / "shards"]


def mixed_loaders(
    folders: Sequence[Path],
    folder: Path,
    nodes: int,
    ranks: int,
    *,
    sharded: bool = True,
    weights: Sequence[float] = (3, 1),
    **options: Any,
) -> list[Loader]:
    """Return the loaders of all ranks; each node sees a part of the photos and all of the art."""
    photos, art = folders
    channels = [photos] * nodes
    if sharded:
        target = folder / f"nodes-{nodes}"
        if not target.exists():
            distribute_shards(sorted(photos.iterdir()), nodes, target)
        channels = sorted(target.iterdir())
    indexes = [shards.parent / "index.parquet" for shards in folders]
    each = [
        Cluster(channels, ranks, folder / "scan", indexes[0]).build_catalogs(),
        Cluster([art] * nodes, ranks, folder / "scan", indexes[1]).build_catalogs(),
    ]
    sources = [
        replace(source, weight=weight) for source, weight in zip(SOURCES, weights, strict=True)
    ]
    defaults: dict[str, Any] = {"resolution": 8, "seed": 0, "decode_workers": 0}
    config = options.pop("config", DATA_CONFIG)
    return [
        open_loader(
            mix_catalogs([catalog, others], sources),
            rank,
            config,
            batch_size=8 // (nodes * ranks),
            **(defaults | options),
        )
        for (rank, catalog), (_, others) in zip(*each, strict=True)
    ]


def new_captions(loader: Loader, steps: int | None = None) -> list[str]:
    """Return the captions of new samples in the next ``steps`` batches, or in the epoch's rest."""
    batches = rest_of_epoch(loader) if steps is None else take_batches(loader, steps)
    return [caption for batch in batches for caption in compress(batch.captions, batch.is_new)]


def kinds(captions: Sequence[str]) -> Counter[str]:
    return Counter(caption.split()[0] for caption in captions)


def test_epochs_have_the_share_of_each_source_and_use_all_samples_equally(
    folders: list[Path], tmp_path: Path
) -> None:
    [loader] = mixed_loaders(folders, tmp_path, 1, 1)
    steps = loader.epoch_size().steps
    assert steps == (PHOTOS + ART) // 8
    batches = take_batches(loader, 4 * steps)
    for epoch in range(4):
        captions = [c for b in batches[epoch * steps : (epoch + 1) * steps] for c in b.captions]
        assert kinds(captions) == {"photos": 42, "art": 14}
    # 168 photos of 48 and 56 works of 8: each 3 or 4 times, and exactly 7 times.
    counts = caption_counts(batches)
    assert {count for caption, count in counts.items() if caption[0] == "p"} == {3, 4}
    assert {count for caption, count in counts.items() if caption[0] == "a"} == {7}
    # A work that returns within an epoch has another origin: it gets other noise and crops.
    first = [origin for batch in batches[:steps] for origin in batch.origins]
    assert len(set(first)) == len(first)
    assert {name.split("/")[0] for name in batches[0].names} == {"photos", "art"}


def test_sources_are_spread_over_an_epoch(folders: list[Path], tmp_path: Path) -> None:
    [loader] = mixed_loaders(folders, tmp_path, 1, 1, gradient_accumulation_steps=1)
    half = kinds(new_captions(loader, loader.epoch_size().steps // 2))
    assert 0.5 < half["photos"] / half.total() < 0.95


@pytest.mark.parametrize("sharded", [True, False])
@pytest.mark.parametrize("buckets", [False, True])
def test_a_resumed_mixture_is_exact_also_on_another_cluster(
    folders: list[Path], tmp_path: Path, sharded: bool, buckets: bool
) -> None:
    options: dict[str, Any] = {"config": replace(DATA_CONFIG, aspect_buckets=buckets)}
    if not sharded:
        options |= {"sharded": False, "gradient_accumulation_steps": 1}
    expected = [
        new_captions(loader) for loader in mixed_loaders(folders, tmp_path, 2, 1, **options)
    ]
    whole = Counter(caption for captions in expected for caption in captions)
    assert kinds(list(whole.elements())) == {"photos": 42, "art": 14}

    started = mixed_loaders(folders, tmp_path, 2, 1, **options)
    before = [new_captions(loader, 3) for loader in started]
    [state] = {loader.state_bytes() for loader in started}
    same = mixed_loaders(folders, tmp_path, 2, 1, state=state, **options)
    assert [loader.reader.resume_warning for loader in same] == [None, None]
    assert [b + new_captions(loader) for b, loader in zip(before, same, strict=True)] == expected

    others = mixed_loaders(folders, tmp_path, 1, 2, state=state, **options)
    read = [caption for captions in before for caption in captions]
    read += [caption for other in others for caption in new_captions(other)]
    assert Counter(read) == whole


def test_other_weights_restart_the_epoch(folders: list[Path], tmp_path: Path) -> None:
    [loader] = mixed_loaders(folders, tmp_path, 1, 1)
    take_batches(loader, 3)
    [other] = mixed_loaders(folders, tmp_path, 1, 1, weights=(1, 1), state=loader.state_bytes())
    assert "their weights" in str(other.reader.resume_warning)
    assert kinds(new_captions(other)) == {"photos": 28, "art": 28}


def test_streams_are_mixed_by_weight_and_by_seed(folders: list[Path]) -> None:
    rank = DataRank(("algo-1",), 0, 0, 1)
    config = replace(
        DATA_CONFIG,
        reader="webdataset",
        epoch_samples=80,
        shuffle_buffer=4,
        sources=(SOURCES[0], replace(SOURCES[1], pipe="cat {path}")),
    )
    streams = [list_stream(folder, rank, lambda value: [value]) for folder in folders]
    mixed = mix_streams(streams, config.sources)

    def captions(state: bytes | None = None) -> list[str]:
        loader = open_loader(
            mixed, rank, config, resolution=8, batch_size=8, seed=0, decode_workers=0, state=state
        )
        return [c for batch in islice(loader, 50) for c in batch.captions]

    found = kinds(captions())
    assert 0.7 < found["photos"] / found.total() < 0.8
    assert captions() == captions()


@given(
    st.lists(
        st.tuples(st.floats(0.01, 100), st.lists(st.integers(1, 9), min_size=1, max_size=4)),
        min_size=1,
        max_size=4,
    ),
    st.integers(1, 5),
)
def test_every_source_is_read_in_complete_rounds(
    sources: list[tuple[float, list[int]]], range_size: int
) -> None:
    mixture = Mixture(
        tuple(str(number) for number in range(len(sources))),
        tuple(weight for weight, _ in sources),
        tuple(np.array(sizes) for _, sizes in sources),
    )
    counts: Counter[tuple[int, int, int]] = Counter()
    for epoch in range(4):
        ranges = mixture.ranges(range_size, 7, epoch)
        shard, sample = ranges.locate(np.arange(ranges.num_samples))
        identities = list(zip(shard.tolist(), sample.tolist(), strict=True))
        assert len(set(identities)) == len(identities)
        of_source = Counter(mixture.source[shard].tolist())
        assert of_source == dict(enumerate(mixture.quotas))
        for copy, number in identities:
            counts[int(mixture.source[copy]), int(mixture.original[copy]), number] += 1
    for number, (_, sizes) in enumerate(sources):
        times = [
            counts[number, shard, sample]
            for shard, size in enumerate(sizes)
            for sample in range(size)
        ]
        assert max(times) - min(times) <= 1


@given(st.lists(st.integers(0, 2), min_size=1, max_size=60), st.integers(0, 9))
def test_any_part_has_the_share_of_each_source(numbers: list[int], seed: int) -> None:
    sources = np.array(numbers)
    order = spread_sources(np.arange(len(sources)), sources, seed)
    assert sorted(order.tolist()) == list(range(len(sources)))
    for source in set(numbers):
        seen = np.cumsum(sources[order] == source)
        expected = np.arange(1, len(sources) + 1) * (numbers.count(source) / len(sources))
        assert abs(seen - expected).max() <= 3
