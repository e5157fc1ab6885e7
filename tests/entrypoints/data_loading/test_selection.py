"""``data.where``: both readers read the selected samples, as if there were no others."""

from __future__ import annotations

import json
import shutil
import tarfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sm_train
from sm_train.entrypoints.data_loading import shard_reader
from sm_train.entrypoints.data_loading.loader import Loader, open_loader
from sm_train.entrypoints.data_loading.shard_catalog import DataRank
from sm_train.entrypoints.data_loading.shard_reader import ShardReader, run_inline
from sm_train.entrypoints.data_loading.webdataset_reader import list_stream
from sm_train.entrypoints.sample_metadata.row_filter import ConditionError
from sm_train.entrypoints.shards.selection import select_samples
from sm_train.entrypoints.shards.shard_format import DataError
from sm_train.entrypoints.shards.shard_index import ShardIndex
from sm_train.estimators.bundle.bundle import job_requirements
from sm_train.estimators.bundle.job_configs import job_configs
from sm_train.estimators.config.load import RunFileError, load_document

from tests.support.data_channels import (
    DATA_CONFIG,
    Cluster,
    caption_counts,
    rest_of_epoch,
    take_batches,
    write_folder_index,
)
from tests.support.image_files import write_album
from tests.support.run_documents import config, run

IMAGES = 60
WHERE = "license = 'CC0' OR contributor >= 50"


def fields(number: int) -> dict[str, Any]:
    return {"license": ("CC0", "agency", None)[number % 3], "contributor": number}


def is_wanted(number: int) -> bool:
    return number % 3 == 0 or number >= 50


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a pack of several shards, of which one has no selected sample."""
    folder = tmp_path_factory.mktemp("pack")
    write_album(folder / "in", IMAGES, flat=True)
    rows = [{"image": f"{n:03}.jpg", "caption": f"{n}", **fields(n)} for n in range(IMAGES)]
    table = folder / "in" / "list.jsonl"
    table.write_text("".join(json.dumps(row) + "\n" for row in rows))
    columns = ("license", "contributor", "source")
    sm_train.pack(table, folder / "out", index_column=columns, shard_size=20_000)
    return folder / "out"


@pytest.fixture(scope="module")
def remaining(packed: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the same shards without the other samples, and their index."""
    folder = tmp_path_factory.mktemp("remaining") / "shards"
    folder.mkdir()
    for shard in sorted((packed / "shards").iterdir()):
        with tarfile.open(shard) as tar, tarfile.open(folder / shard.name, "w") as copy:
            for member in tar:
                if is_wanted(int(member.name.partition(".")[0])):
                    copy.addfile(member, tar.extractfile(member))
    write_folder_index(folder)
    return folder


def cluster(folder: Path, scan: Path, ranks: int = 1, where: str | None = None) -> Cluster:
    index = folder.parent / "index.parquet"
    return Cluster([folder], ranks, scan, index, where)


def captions(loader: Loader, batches: int) -> list[str]:
    return [caption for batch in take_batches(loader, batches) for caption in batch.captions]


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("buckets", [False, True])
def test_order_is_that_of_the_remaining_samples(
    packed: Path, remaining: Path, tmp_path: Path, ranks: int, buckets: bool
) -> None:
    """For two epochs, and whether the order is global or of each rank."""
    config = replace(DATA_CONFIG, aspect_buckets=buckets)
    options = {} if buckets else {"gradient_accumulation_steps": 1}
    for given in ({}, options):
        selected = cluster(packed / "shards", tmp_path / "a", ranks, WHERE)
        alone = cluster(remaining, tmp_path / "b", ranks)
        pairs = zip(selected.loaders(config, **given), alone.loaders(config, **given), strict=True)
        for loader, other in pairs:
            assert captions(loader, 30) == captions(other, 30)


def test_each_selected_sample_is_read_once_an_epoch(packed: Path, tmp_path: Path) -> None:
    [loader] = cluster(packed / "shards", tmp_path, 1, WHERE).loaders(batch_size=1)
    counts = caption_counts(rest_of_epoch(loader))
    assert counts == {str(number): 1 for number in range(IMAGES) if is_wanted(number)}


def test_a_resumed_run_reads_the_very_next_sample(packed: Path, tmp_path: Path) -> None:
    nodes = cluster(packed / "shards", tmp_path, 1, WHERE)
    [whole] = nodes.loaders()
    expected = captions(whole, 24)
    [first] = nodes.loaders()
    begin = captions(first, 7)
    [resumed] = nodes.loaders(state=first.state_bytes())
    assert begin + captions(resumed, 17) == expected


def test_another_selection_is_other_data(packed: Path, tmp_path: Path) -> None:
    """An epoch restarts with it, and says so; the same samples by another condition continue."""
    [(_, catalog)] = cluster(packed / "shards", tmp_path, 1, WHERE).build_catalogs()
    [(_, same)] = cluster(packed / "shards", tmp_path, 1, f"({WHERE}) AND TRUE").build_catalogs()
    [(_, other)] = cluster(packed / "shards", tmp_path, 1, "contributor < 7").build_catalogs()
    [(_, every)] = cluster(packed / "shards", tmp_path).build_catalogs()
    assert catalog.digest == same.digest
    assert len({catalog.digest, other.digest, every.digest}) == 3
    assert catalog.total_bytes < every.total_bytes


def test_bytes_between_selected_samples_are_not_read(
    packed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beyond the size of a request; gaps below it are read, and the samples are the same."""
    [(_, catalog)] = cluster(packed / "shards", tmp_path, 1, WHERE).build_catalogs()
    reader = ShardReader(catalog.paths, catalog.offsets)
    shards = np.repeat(np.arange(len(catalog.shard_sizes)), catalog.shard_sizes)
    samples = np.concatenate([np.arange(count) for count in catalog.shard_sizes])
    read: list[int] = []
    read_fully = shard_reader._read_fully

    def count_bytes(descriptor: int, start: int, size: int) -> memoryview:
        read.append(size)
        return read_fully(descriptor, start, size)

    monkeypatch.setattr(shard_reader, "_read_fully", count_bytes)
    at_once = reader.read_async(shards, samples, run_inline)()
    with_gaps = sum(read)
    read.clear()
    monkeypatch.setattr(shard_reader, "MAX_GAP", 0)
    apart = reader.read_async(shards, samples, run_inline)()
    ends = 1024 * len(catalog.shard_sizes)
    assert sum(read) == catalog.total_bytes - ends < with_gaps
    assert [bytes(content) for content in at_once] == [bytes(content) for content in apart]  # type: ignore[arg-type]


def stream(packed: Path, where: str | None, index: bool = True) -> Loader:
    rank = DataRank(("algo-1",), 0, 0, 1)
    location = packed / "index.parquet" if index else None
    listed = list_stream(packed / "shards", rank, lambda value: [value], location, where)
    config = replace(
        DATA_CONFIG, reader="webdataset", epoch_samples=10, shuffle_buffer=10, where=where
    )
    options = {"resolution": 8, "batch_size": 4, "seed": 0, "decode_workers": 0}
    return open_loader(listed, rank, config, **options)  # type: ignore[arg-type]


def test_streams_have_the_selected_samples_alone(packed: Path) -> None:
    drawn = {int(caption) for caption in captions(stream(packed, WHERE), 200)}
    assert drawn == {number for number in range(IMAGES) if is_wanted(number)}
    assert {int(caption) for caption in captions(stream(packed, None), 200)} > drawn


def test_a_stream_with_one_selected_sample_does_not_search_for_ever(packed: Path) -> None:
    assert set(captions(stream(packed, "source = '017.jpg'"), 3)) == {"17"}


MESSAGES = [
    ("licence = 'CC0'", r"the index has no column licence \(did you mean license\?\); it has "),
    ("contributor > 99", "none of 60 samples fulfils contributor > 99"),
    ("license = ", "syntax error"),
    ("random() > 0.5", r"random\(\) returns another value each time, so a resumed run would"),
    ("contributor < 'x'", "Could not convert"),
]


@pytest.mark.parametrize(("where", "message"), MESSAGES)
def test_conditions_that_cannot_be_used_are_refused_on_all_ranks(
    packed: Path, tmp_path: Path, where: str, message: str
) -> None:
    with pytest.raises(DataError, match=f"^data.where: .*{message}") as error:
        cluster(packed / "shards", tmp_path, 2, where).build_catalogs()
    assert "\n" not in str(error.value)
    with pytest.raises(DataError, match=f"^data.where: .*{message}"):
        stream(packed, where)


def test_an_index_without_columns_and_no_index_are_refused(
    packed: Path, remaining: Path, tmp_path: Path
) -> None:
    with pytest.raises(DataError, match="the index has no columns; pack with --index-column"):
        cluster(remaining, tmp_path, 1, WHERE).build_catalogs()
    shutil.copytree(packed / "shards", tmp_path / "shards")
    with pytest.raises(DataError, match="columns of the index, and the shards have none"):
        Cluster([tmp_path / "shards"], 1, tmp_path, None, WHERE).build_catalogs()
    with pytest.raises(DataError, match="columns of the index, and the shards have none"):
        stream(packed, WHERE, index=False)


def test_groups_of_the_index_are_filtered_one_by_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sm_train.entrypoints.shards.shard_index.GROUP_SAMPLES", 5)
    write_album(tmp_path / "in", 12, flat=True)
    table = tmp_path / "in" / "list.jsonl"
    rows = [{"image": f"{n:03}.jpg", "caption": "a", "n": n} for n in range(12)]
    table.write_text("".join(json.dumps(row) + "\n" for row in rows))
    sm_train.pack(table, tmp_path / "out", index_column="n", shard_size=5_000, workers=1)
    index = ShardIndex(tmp_path / "out" / "index.parquet")
    assert len(index) > 3
    selection = select_samples(index, "n % 4 = 1")
    selected = [selection.is_selected(row).tolist() for row in range(len(index))]
    assert [flag for shard in selected for flag in shard] == [n % 4 == 1 for n in range(12)]
    assert selection.counts.tolist() == [sum(shard) for shard in selected]
    with pytest.raises(ConditionError, match="none of 12"):
        select_samples(index, "n > 12")


@pytest.mark.parametrize("reader", ["indexed", "webdataset"])
def test_a_job_gets_what_its_condition_needs(reader: str) -> None:
    """The index with both readers, and DuckDB; jobs without a condition install none."""
    data = {"uri": "s3://bucket/shards/", "where": WHERE, "reader": reader, "samples": 10}
    selecting = config(data=data)
    assert selecting.index_uri is not None
    assert "\nduckdb==" in job_requirements(selecting, "2.13.0")
    assert {job.data.conditions[0] for job in job_configs(selecting).values()} == {WHERE}
    assert "duckdb" not in job_requirements(config(), "2.13.0")


def test_a_source_may_have_a_condition_of_its_own() -> None:
    sources = [{"channel": "train"}, {"channel": "art", "where": "score > 5"}]
    mixing = config(
        data={"uri": "s3://bucket/shards/", "where": WHERE, "sources": sources},
        channels={"art": {"uri": "s3://bucket/art/shards/"}},
    )
    for job in job_configs(mixing).values():
        assert job.data.conditions == [WHERE, "score > 5"]


def test_a_condition_without_the_index_is_refused() -> None:
    data = {"uri": "s3://bucket/shards/", "where": WHERE, "index": False}
    with pytest.raises(RunFileError, match=r"data.where: .* columns of the index; remove index: f"):
        load_document(run(data=data), [], "run.yaml")
