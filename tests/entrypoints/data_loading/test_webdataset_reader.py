"""``data.reader: webdataset`` streams by a seed per GPU; ``data.transform`` changes samples."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from sm_train.entrypoints.data_loading.batches import BadSampleTracker, Batch
from sm_train.entrypoints.data_loading.loader import Loader, open_loader
from sm_train.entrypoints.data_loading.sampler import DataPosition
from sm_train.entrypoints.data_loading.shard_catalog import DataRank
from sm_train.entrypoints.data_loading.webdataset_reader import list_stream
from sm_train.entrypoints.shards.shard_format import DataError

from tests.entrypoints.data_loading.webdataset_reader_support import (
    EACH,
    SHARDS,
    png,
    write_channel,
)
from tests.support.cluster.training_jobs import write_shard
from tests.support.data_channels import DATA_CONFIG, Cluster, take_batches

STREAMED = replace(
    DATA_CONFIG, max_bad_fraction=1.0, reader="webdataset", epoch_samples=12, shuffle_buffer=10
)


@pytest.fixture(scope="module")
def channel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_channel(tmp_path_factory.mktemp("data") / "shards")


def loader(channel: Path, rank: int = 0, ranks: int = 1, **options: Any) -> Loader:
    """Return the loader of one rank of a node."""
    data_rank = DataRank(("algo-1",), 0, rank, ranks)
    listed = list_stream(channel, replace(data_rank, local_rank=0), lambda value: [value])
    config = replace(STREAMED, **options.pop("config", {}))
    defaults = {"resolution": 8, "batch_size": 2, "seed": 0, "decode_workers": 0}
    return open_loader(listed, data_rank, config, **(defaults | options))


def captions(batches: list[Batch]) -> list[str]:
    return [caption for batch in batches for caption in batch.captions]


def test_same_seed_gives_the_same_batches_in_any_number_of_processes(channel: Path) -> None:
    first = take_batches(loader(channel), 20)
    again = take_batches(loader(channel, decode_workers=2), 20)
    assert captions(first) == captions(again)
    for batch, other in zip(first, again, strict=True):
        assert batch.pixels.equal(other.pixels)
        assert batch.sizes.equal(other.sizes)
        assert batch.timestep_uniform.tolist() == other.timestep_uniform.tolist()


def test_each_rank_and_each_seed_has_an_order_of_its_own(channel: Path) -> None:
    loaders = [loader(channel, rank, 2, seed=seed) for rank in (0, 1) for seed in (0, 1)]
    orders = {tuple(captions(take_batches(loader, 20))) for loader in loaders}
    assert len(orders) == 4


def test_all_samples_are_drawn_about_equally_often(channel: Path) -> None:
    counts = Counter(captions(take_batches(loader(channel, batch_size=20), 180)))
    assert len(counts) == SHARDS * EACH
    # 3,600 draws of whole shards, some 180 in all: 60 of each shard, with a deviation below 20.
    assert 20 < min(counts.values()) <= max(counts.values()) < 110


def test_pixels_and_sizes_are_those_of_the_indexed_reader(channel: Path, tmp_path: Path) -> None:
    [indexed] = Cluster([channel], 1, tmp_path).loaders(batch_size=1)
    expected = {batch.captions[0]: batch for batch in take_batches(indexed, SHARDS * EACH)}
    for batch in take_batches(loader(channel, batch_size=1), 50):
        assert batch.pixels.equal(expected[batch.captions[0]].pixels)
        assert batch.sizes.equal(expected[batch.captions[0]].sizes)
        assert batch.names[0].partition(" ")[2] == batch.captions[0]


def test_first_batch_needs_only_the_start_of_a_shard(channel: Path, tmp_path: Path) -> None:
    """The command prints half a shard and blocks until the batch has arrived."""
    done = tmp_path / "done"
    pipe = f"head -c 20000 {{path}}; while [ ! -e {done} ]; do sleep 0.05; done"
    config = {"pipe": pipe, "shuffle_buffer": 4}
    batches = iter(loader(channel, config=config))
    assert len(next(batches).captions) == 2
    done.touch()


def test_shards_are_read_through_a_command(channel: Path, tmp_path: Path) -> None:
    spaced = write_channel(tmp_path / "with space; touch oops" / "shards", shards=1)
    pipe = f"echo {{name}} >> {tmp_path}/names; cat {{path}}"
    batches = take_batches(loader(spaced, config={"pipe": pipe}), 5)
    assert set(captions(batches)) <= {f"0-{number}" for number in range(EACH)}
    assert "0.tar" in (tmp_path / "names").read_text().split()


def test_resume_continues_the_count_but_not_the_order(channel: Path) -> None:
    uninterrupted = take_batches(loader(channel), 20)
    killed = loader(channel)
    take_batches(killed, 8)
    # 12 samples are an epoch: 6 batches.
    assert killed.position == DataPosition(1, 2)
    resumed = loader(channel, state=killed.state_bytes())
    assert resumed.position == DataPosition(1, 2)
    assert "does not resume exactly" in str(resumed.reader.resume_warning)
    rest = take_batches(resumed, 8)
    assert captions(rest) != captions(uninterrupted[:8])
    assert rest[-1].position == uninterrupted[15].position
    # It is a function of the seed and the position all the same.
    again = loader(channel, state=killed.state_bytes())
    assert captions(take_batches(again, 8)) == captions(rest)
    assert loader(channel).reader.resume_warning is None


def test_changed_number_of_ranks_continues_after_as_many_samples(channel: Path) -> None:
    killed = loader(channel)
    take_batches(killed, 8)
    resumed = loader(channel, 1, 2, state=killed.state_bytes())
    assert resumed.position == DataPosition(1, 1)


def test_a_checkpoint_of_the_other_reader_is_refused(channel: Path, tmp_path: Path) -> None:
    cluster = Cluster([channel], 1, tmp_path)
    [indexed] = cluster.loaders()
    with pytest.raises(DataError, match=r"data\.reader: the checkpoint was written with `indexed`"):
        loader(channel, state=indexed.state_bytes())
    with pytest.raises(DataError, match=r"data\.reader: .* with `webdataset`"):
        cluster.loaders(state=loader(channel).state_bytes())


def test_what_cannot_be_read_is_counted_and_named(tmp_path: Path) -> None:
    channel = write_channel(tmp_path / "shards")
    cut = (channel / "0.tar").read_bytes()
    (channel / "0.tar").write_bytes(cut[: len(cut) // 3])
    (channel / "1.tar").unlink()
    (channel / "1.tar").symlink_to(tmp_path / "absent")
    samples = {f"2-{n}": {"png": png(n), "txt": b"good"} for n in range(EACH)}
    samples["2-3"]["png"] = b"\x89PNG broken"
    del samples["2-4"]["txt"]
    write_shard(channel / "2.tar", samples)
    tracker = BadSampleTracker(1.0)
    for batch in take_batches(loader(channel, batch_size=8), 40):
        assert len(batch.captions) == 8
        tracker.add(batch)
    assert tracker.reasons.keys() >= {"shard-missing", "tar-damaged", "caption-missing"}
    message, _ = tracker.report() or ("", {})
    assert "1.tar: No such file or directory" in message


def test_a_channel_without_a_readable_sample_ends_the_job(tmp_path: Path) -> None:
    for number in range(3):
        (tmp_path / f"{number}.tar").write_bytes(b"no tar" * 1000)
    with pytest.raises(DataError, match="no sample could be read after 64 such errors"):
        take_batches(loader(tmp_path), 1)


def test_shards_without_samples_end_the_job(tmp_path: Path) -> None:
    """They are intact: no error is counted, and the stream would open them for ever."""
    for number in range(3):
        write_shard(tmp_path / f"{number}.tar", {})
    with pytest.raises(DataError, match=r"no sample in any of 3 shards, such as .*index"):
        take_batches(loader(tmp_path), 1)


def test_a_single_shard_with_samples_is_enough(tmp_path: Path) -> None:
    for number in range(6):
        write_shard(tmp_path / f"{number}.tar", {})
    samples = {f"6-{n}": {"png": png(n), "txt": b"good"} for n in range(EACH)}
    write_shard(tmp_path / "6.tar", samples)
    assert len(take_batches(loader(tmp_path), 3)) == 3


def test_a_failing_command_ends_the_job_and_is_named(channel: Path) -> None:
    with pytest.raises(DataError, match="no sample could be read"):
        take_batches(loader(channel, config={"pipe": "exit 3 # {path}"}, decode_workers=1), 1)


def test_a_node_without_shards_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"algo-1 sees no \.tar file"):
        loader(tmp_path)


# ------------------------------------------------------------------ transform

FUNCTIONS = """
def upper(sample):
    return sample | {"txt": sample["txt"].decode().upper() + " " + sample["__key__"]}

def rename(sample):
    return {"jpg": sample["png"], "txt": b"x"}

def odd_only(sample):
    return sample if int(sample["__key__"].split("-")[1]) % 2 else None

def broken(sample):
    raise KeyError("depth")

def wrong(sample):
    return sample["txt"]
"""


@pytest.fixture
def functions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    (tmp_path / "sample_functions.py").write_text(FUNCTIONS)
    monkeypatch.syspath_prepend(tmp_path)
    yield
    sys.modules.pop("sample_functions", None)


@pytest.mark.usefixtures("functions")
@pytest.mark.parametrize("reader", ["indexed", "webdataset"])
def test_a_transform_changes_the_files_of_a_sample(
    channel: Path, tmp_path: Path, reader: str
) -> None:
    def batches(function: str, count: int = 4, decode_workers: int = 0) -> list[Batch]:
        transform = f"sample_functions:{function}"
        if reader == "webdataset":
            opened = loader(channel, config={"transform": transform}, decode_workers=decode_workers)
        else:
            cluster = Cluster([channel], 1, tmp_path / "scan")
            config = replace(DATA_CONFIG, transform=transform, max_bad_fraction=1.0)
            [opened] = cluster.loaders(config, decode_workers=decode_workers)
        return take_batches(opened, count)

    for workers in (0, 1):
        changed = captions(batches("upper", decode_workers=workers))
        assert all(caption.split()[0] == caption.split()[1] for caption in changed)
    assert set(captions(batches("rename"))) == {"x"}
    kept = batches("odd_only", 20)
    assert all(int(caption.split("-")[1]) % 2 for caption in captions(kept))
    reasons = {bad.reason for batch in kept for bad in batch.bad_samples}
    assert reasons == {"transform-skipped"}
    for function, detail in (("broken", "KeyError: 'depth'"), ("wrong", "returned bytes")):
        with pytest.raises(DataError, match=f"transform-failed: .*{detail}"):
            batches(function, 1)
