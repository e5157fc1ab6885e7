"""Both readers skip removed samples: at once when they start, and from the next epoch on."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import sm_train
from sm_train.entrypoints.data_loading.loader import Loader, open_loader
from sm_train.entrypoints.data_loading.shard_catalog import DataRank
from sm_train.entrypoints.data_loading.shard_channels import ShardChannel, list_channels
from sm_train.entrypoints.job_interface.index_location import (
    removal_addresses,
    removal_list,
    removal_variables,
)
from sm_train.entrypoints.job_interface.job_config import DataConfig, DataSource
from sm_train.entrypoints.shards import removal_list as lists
from sm_train.entrypoints.shards import removed_samples
from sm_train.entrypoints.shards.removal_list import RemovalList, RemovalListError, decode_list
from sm_train.entrypoints.shards.shard_format import DataError
from sm_train.entrypoints.shards.shard_index import ShardIndex

from tests.conftest import Aws
from tests.support.data_channels import DATA_CONFIG, take_batches
from tests.support.image_files import write_album

IMAGES = 48
BATCH = 4
STREAMED = {"reader": "webdataset", "epoch_samples": IMAGES, "shuffle_buffer": 10}


@pytest.fixture
def packed(tmp_path: Path) -> Path:
    """Return a pack of several shards, whose captions are the numbers of the images."""
    write_album(tmp_path / "in", IMAGES, flat=True)
    for number in range(IMAGES):
        (tmp_path / "in" / f"{number:03}.txt").write_text(str(number))
    sm_train.pack(tmp_path / "in", tmp_path / "out", shard_size=30_000)
    return tmp_path / "out"


def channel(packed: Path, name: str = "train", *, address: str | None = None) -> ShardChannel:
    index = packed / "index.parquet"
    return ShardChannel(name, packed / "shards", index, None, packed / "scans", address)


def own_list(packed: Path) -> str:
    return removal_list(str(packed / "index.parquet"))


def remove(packed: Path, *numbers: int) -> None:
    """List samples as removed."""
    index = ShardIndex(packed / "index.parquet")
    path = Path(own_list(packed))
    removals = decode_list(path.read_bytes(), str(path)) if path.exists() else RemovalList()
    rows = [
        {"shard": shard, "key": key, "source": None, "removed": "2026-11-28T00:00:00+00:00"}
        for row, shard in enumerate(index.names)
        for key in index.keys(row)
        if int(key) in numbers
    ]
    path.write_bytes(removals.with_samples(rows).encode())


def open_channels(
    channels: list[ShardChannel],
    config: DataConfig = DATA_CONFIG,
    warnings: list[str] | None = None,
    **options: Any,
) -> Loader:
    rank = DataRank(("algo-1",), 0, 0, 1)
    listed = list_channels(channels, config, rank, lambda value: [value])
    defaults = {"resolution": 8, "batch_size": BATCH, "seed": 0, "decode_workers": 0}

    def warn(code: str, message: str) -> None:
        if warnings is not None:
            warnings.append(f"{code}: {message}")

    return open_loader(listed, rank, config, warn=warn, **(defaults | options))  # type: ignore[arg-type]


def captions(loader: Loader, batches: int) -> list[int]:
    return [int(text) for batch in take_batches(loader, batches) for text in batch.captions]


EPOCH = IMAGES // BATCH


@pytest.mark.slow
@pytest.mark.parametrize("order", ["rank", "global"])
def test_others_keep_their_places(packed: Path, order: str) -> None:
    """A removed sample's place is taken by another one; batches stay full."""
    options = {"gradient_accumulation_steps": 1} if order == "global" else {}
    whole = captions(open_channels([channel(packed)], **options), EPOCH)
    remove(packed, 3, 17, 40)
    left = captions(open_channels([channel(packed)], **options), EPOCH)
    assert not {3, 17, 40} & set(left)
    changed = [before for before, after in zip(whole, left, strict=True) if before != after]
    assert sorted(changed) == [3, 17, 40]


def test_replacements_count_neither_as_bad_nor_as_new(packed: Path) -> None:
    remove(packed, *range(10))
    loader = open_channels([channel(packed)], replace(DATA_CONFIG, max_bad_fraction=0.0))
    batches = take_batches(loader, EPOCH)
    assert loader.bad_samples.num_bad == 0
    assert sum(int(batch.is_new.sum()) for batch in batches) == IMAGES - 10


@pytest.mark.slow
def test_a_resumed_run_continues_with_the_next_sample(packed: Path) -> None:
    whole = captions(open_channels([channel(packed)]), EPOCH)
    first = open_channels([channel(packed)])
    begin = captions(first, 5)
    remove(packed, whole[30])
    resumed = open_channels([channel(packed)], state=first.state_bytes())
    assert resumed.reader.resume_warning is None
    rest = captions(resumed, EPOCH - 5)
    expected = begin + rest
    assert [number for number, _ in enumerate(whole) if whole[number] != expected[number]] == [30]


@pytest.mark.integration
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("reader", ["indexed", "webdataset"])
def test_running_jobs_skip_them_from_the_next_epoch_on(
    packed: Path, reader: str, workers: int
) -> None:
    """The list is read again from where it lies; that of the index channel is of the start."""
    config = DATA_CONFIG if reader == "indexed" else replace(DATA_CONFIG, **STREAMED)  # type: ignore[arg-type]
    warnings: list[str] = []
    loader = open_channels(
        [channel(packed, address=own_list(packed))], config, warnings, decode_workers=workers
    )
    batches = iter(loader)
    next(batches)
    assert warnings == []
    half = set(range(0, IMAGES, 2))
    remove(packed, *half)
    seen = [int(text) for _ in range(4 * EPOCH) for text in next(batches).captions]
    assert not half & set(seen[EPOCH * BATCH + 20 * BATCH :])
    assert half & set(seen)
    assert warnings[0] == (
        f"samples-removed: train: 24 removed samples of {own_list(packed)} are not trained on; "
        "others take their places"
    )


@pytest.mark.integration
def test_streams_skip_removed_samples_without_an_index(packed: Path) -> None:
    remove(packed, 5, 6)
    config = replace(DATA_CONFIG, **STREAMED)  # type: ignore[arg-type]
    listed = replace(channel(packed, address=own_list(packed)), index=None)
    seen = captions(open_channels([listed], config), 6 * EPOCH)
    assert set(range(IMAGES)) - set(seen) >= {5, 6}
    assert len(set(seen)) > IMAGES // 2


@pytest.mark.slow
@pytest.mark.parametrize("reader", ["indexed", "webdataset"])
def test_each_source_of_a_mixture_has_a_list(packed: Path, tmp_path: Path, reader: str) -> None:
    write_album(tmp_path / "art", 20, flat=True)
    for number in range(20):
        (tmp_path / "art" / f"{number:03}.txt").write_text(str(100 + number))
    sm_train.pack(tmp_path / "art", tmp_path / "other", shard_size=30_000)
    remove(packed, 1)
    remove(tmp_path / "other", 7)
    sources = (DataSource("train", 1.0), DataSource("art", 5.0))
    options = STREAMED if reader == "webdataset" else {}
    config = replace(DATA_CONFIG, sources=sources, **options)  # type: ignore[arg-type]
    channels = [channel(packed), channel(tmp_path / "other", "art")]
    seen = set(captions(open_channels(channels, config), 150))
    assert not seen & {1, 107}
    assert seen >= {7, 101}


def test_a_list_in_s3_is_read_and_an_unreadable_one_is_reported(
    packed: Path, aws: Aws, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Training continues with what was known, and says that more is unknown."""
    for name, value in {**aws.environment, "AWS_REGION": "us-east-1"}.items():
        monkeypatch.setenv(name, value)
    removed_samples._open_store.cache_clear()
    remove(packed, 3)
    content = Path(own_list(packed)).read_bytes()
    aws.make_bucket("photos", **{"index.parquet.removed": content})
    Path(own_list(packed)).unlink()
    warnings: list[str] = []
    source = channel(packed, address="s3://photos/index.parquet.removed")
    batches = iter(open_channels([source], warnings=warnings))
    first = [int(text) for _ in range(EPOCH) for text in next(batches).captions]
    assert 3 not in first, warnings
    aws.client("s3").put_object(Bucket="photos", Key="index.parquet.removed", Body=b"no list")
    second = [int(text) for _ in range(EPOCH) for text in next(batches).captions]
    assert 3 not in second
    assert [line.partition(":")[0] for line in warnings] == ["samples-removed", "removals-unknown"]
    assert "not a list of removed samples" in warnings[1]


def test_without_a_list_nothing_is_said(packed: Path, aws: Aws) -> None:
    warnings: list[str] = []
    captions(open_channels([channel(packed, address=own_list(packed))], warnings=warnings), 2)
    assert warnings == []


def test_a_job_whose_samples_are_all_removed_says_what_to_do(packed: Path) -> None:
    remove(packed, *range(IMAGES))
    with pytest.raises(DataError, match="was removed, and none of 64 replacement samples"):
        captions(open_channels([channel(packed)]), 1)


def test_channels_of_a_job_take_the_lists_from_the_environment() -> None:
    lists = {"train": "s3://photos/a=b.index.parquet.removed", "art": "/data/index.parquet.removed"}
    variables = removal_variables(lists)
    assert removal_addresses({**variables, "PATH": "x"}) == lists
    assert removal_variables({"train": "s3://photos/" + 600 * "x"}) == {}


@pytest.mark.parametrize("content", [b"", b"PAR1", b"x" * 100])
def test_damaged_lists_are_named(content: bytes) -> None:
    with pytest.raises(RemovalListError, match=r"^s3://a/b\.removed: not a list of removed"):
        decode_list(content, "s3://a/b.removed")


def test_a_list_of_another_version_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A change of the format changes its number, which is 2 today."""
    assert b'"version": 2' in RemovalList().encode()
    with monkeypatch.context() as patch:
        patch.setattr(lists, "VERSION", 1)
        other = RemovalList().encode()
    with pytest.raises(RemovalListError, match=r"^a: not a list .* of version 2; delete it"):
        decode_list(other, "a")
