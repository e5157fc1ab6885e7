"""A job that resumes after a removal continues its epoch; removed samples are skipped in place."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from sm_train.entrypoints.data_loading.loader import Loader, open_loader
from sm_train.entrypoints.data_loading.shard_catalog import DataRank
from sm_train.entrypoints.data_loading.shard_channels import (
    ShardChannel,
    as_of_checkpoint,
    list_channels,
)
from sm_train.entrypoints.job_interface.index_location import removal_list
from sm_train.entrypoints.job_interface.job_config import DataSource
from sm_train.entrypoints.shards.shard_index import ShardIndex
from sm_train.entrypoints.storage.store import S3Access
from sm_train.toolkit.data_prep.packing.pack import PackJob, pack
from sm_train.toolkit.data_prep.packing.shard_set import find_shard_set
from sm_train.toolkit.data_prep.packing.tables import TableOptions
from sm_train.toolkit.data_prep.removal.remove_samples import plan_removal, remove_samples

from tests.support.data_channels import DATA_CONFIG, take_batches

IMAGES, BATCH = 48, 2
SIZES = ((64, 32), (32, 64), (48, 48))


@pytest.fixture
def packed(tmp_path: Path) -> Path:
    """Return a pack of images of three shapes, whose captions are their numbers."""
    return write_pack(tmp_path, "a")


def write_pack(folder: Path, name: str) -> Path:
    source = folder / f"in-{name}"
    source.mkdir()
    with (source / "list.jsonl").open("w") as table:
        for number in range(IMAGES):
            size = SIZES[number % 3]
            Image.new("RGB", size, (number, 0, 0)).save(source / f"{number:03}.png")
            row = {"image": f"{number:03}.png", "caption": f"{number}", "owner": "ab"[number % 2]}
            table.write(json.dumps(row) + "\n")
    table_options = TableOptions(index_columns=("owner",))
    destination = folder / name
    job = PackJob(str(source / "list.jsonl"), str(destination), None, 12_000, 1, table_options)
    pack(job, lambda _: None)
    assert len(ShardIndex(destination / "index.parquet")) > 3
    return destination


def remove(packed: Path, *numbers: int, stop: bool = False) -> None:
    """Remove samples; with ``stop``, the removal is interrupted before the index has changed."""

    def progress(done: int, total: int) -> None:
        if stop:
            raise KeyboardInterrupt

    names = [f"{number:09}" for number in numbers]
    shards = find_shard_set(str(packed), S3Access())
    remove_samples(plan_removal(shards, names, None), progress)


def open_reader(
    folders: list[Path],
    state: bytes | None = None,
    *,
    where: str | None = None,
    warnings: list[str] | None = None,
    buckets: bool = False,
    **options: Any,
) -> Loader:
    """Open the loader of a job as a start of it does."""
    mixed = len(folders) > 1
    sources = tuple(DataSource(folder.name, 1.0 + number) for number, folder in enumerate(folders))
    config = replace(DATA_CONFIG, sources=sources if mixed else (), aspect_buckets=buckets)
    channels = [
        ShardChannel(
            *(folder.name if mixed else "train", folder / "shards", folder / "index.parquet"),
            *(where, folder / "scans", removal_list(str(folder / "index.parquet"))),
        )
        for folder in folders
    ]
    rank = DataRank(("algo-1",), 0, 0, 1)

    def gather(value: Any) -> list[Any]:
        return [value]

    listed = list_channels(channels, config, rank, gather)
    listed = as_of_checkpoint(listed, channels, config, state, gather)

    def warn(code: str, message: str) -> None:
        if warnings is not None:
            warnings.append(f"{code}: {message}")

    defaults = {"resolution": 32, "batch_size": BATCH, "seed": 0, "decode_workers": 0}
    return open_loader(
        listed,
        rank,
        config,
        state=state,
        warn=warn,
        **(defaults | options),  # type: ignore[arg-type]
    )


def taken(loader: Loader, batches: int) -> list[tuple[str, str]]:
    """Return the captions and the shards with keys of the next batches."""
    return [
        pair
        for batch in take_batches(loader, batches)
        for pair in zip(batch.captions, batch.names, strict=True)
    ]


CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "global order": {"gradient_accumulation_steps": 2},
    "condition": {"where": "owner = 'a'"},
    "buckets": {"buckets": True},
    "buckets and condition": {"buckets": True, "where": "owner = 'a'"},
}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("mixed", [False, True])
def test_the_epoch_continues_without_the_removed_samples(
    packed: Path, tmp_path: Path, case: str, mixed: bool
) -> None:
    """Also after a second removal, which rewrites shards again and leaves nothing of one."""
    folders = [packed, write_pack(tmp_path, "b")] if mixed else [packed]
    options = CASES[case]
    steps = open_reader(folders, **options).epoch_size().steps
    whole = [caption for caption, _ in taken(open_reader(folders, **options), steps)]
    first = open_reader(folders, **options)
    begin = [caption for caption, _ in taken(first, 3)]
    first_shard = [int(key) for key in ShardIndex(packed / "index.parquet").keys(1)]
    with pytest.raises(KeyboardInterrupt):
        remove(packed, first_shard[0], stop=True)
    remove(packed, 4, 10, 38)
    remove(packed, *first_shard, 44, 39)
    gone = {4, 10, 38, *first_shard, 44, 39}
    resumed = open_reader(folders, first.state_bytes(), **options)
    assert resumed.reader.resume_code == "samples-removed"
    rest = taken(resumed, steps - 3)
    after = [*begin, *(caption for caption, _ in rest)]
    changed = [number for number, before in enumerate(whole) if before != after[number]]
    assert {int(whole[number]) for number in changed} <= gone
    assert changed
    assert all(number >= 3 * BATCH for number in changed)
    if not mixed:
        removed = [number for number, before in enumerate(whole) if int(before) in gone]
        assert changed == [number for number in removed if number >= 3 * BATCH]
        assert not gone & {int(caption) for caption, _ in rest}
    # A job that resumes this one continues with the next sample, too.
    third = open_reader(folders, first.state_bytes(), **options)
    taken(third, 2)
    fourth = open_reader(folders, third.state_bytes(), **options)
    assert [*taken(fourth, steps - 5)] == rest[2 * BATCH :]


def test_the_event_names_the_removal(packed: Path) -> None:
    first = open_reader([packed])
    taken(first, 3)
    remove(packed, 4, 10, 38)
    warnings: list[str] = []
    resumed = open_reader([packed], first.state_bytes(), warnings=warnings)
    taken(resumed, 1)
    list_file = removal_list(str(packed / "index.parquet"))
    assert resumed.reader.resume_warning == (
        f"train: samples removed since the checkpoint: 3 ({list_file}); the epoch continues, and "
        "others take their places"
    )
    assert warnings == [
        f"samples-removed: train: 3 removed samples of {list_file} are not trained on; others take "
        "their places"
    ]
    # A removal while it runs counts from the next epoch on, by the names of the shards of before.
    remove(packed, 5)
    taken(resumed, resumed.epoch_size().steps)
    assert warnings[-1].startswith("samples-removed: train: 4 removed samples")


def test_a_new_run_reads_the_samples_that_are_left_alone(packed: Path) -> None:
    remove(packed, 4, 10, 38)
    loader = open_reader([packed])
    captions = [int(caption) for caption, _ in taken(loader, loader.epoch_size().steps)]
    assert {*captions} == {*range(IMAGES)} - {4, 10, 38}


@pytest.mark.integration
def test_other_changes_restart_the_epoch(packed: Path, tmp_path: Path) -> None:
    first = open_reader([packed])
    taken(first, 3)
    state = first.state_bytes()
    other = open_reader([write_pack(tmp_path, "b")], state)
    assert other.reader.resume_warning is None  # the same images
    remove(packed, 4)
    (packed / "index.parquet.replaced").rename(packed / "kept")
    assert "epoch 0 restarts" in str(open_reader([packed], state).reader.resume_warning)
    (packed / "kept").rename(packed / "index.parquet.replaced")
    remove(packed, *(number for number in range(5, IMAGES)))
    # Too few are left to take the places of the others.
    assert "epoch 0 restarts" in str(open_reader([packed], state).reader.resume_warning)
