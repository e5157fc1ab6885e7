"""Reading shards: every sample once an epoch, in a known order, and on from any point."""

from __future__ import annotations

import io
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from sm_train.entrypoints import data
from sm_train.entrypoints.data import (
    BadSamples,
    Batch,
    DataError,
    Loader,
    Position,
    ShardReader,
    find_shards,
    share,
    to_pixels,
)
from sm_train.entrypoints.settings import Data

from tests.cluster.jobs import sample, write_shard, write_shards

DATA = Data(image_key="jpg;png", caption_key="txt")


@pytest.fixture(scope="module")
def channel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("train")
    write_shards(folder, shards=5, each=6)
    return folder


def reader(channel: Path, **changes: Any) -> ShardReader:
    options: dict[str, Any] = {
        "resolution": 8, "batch_size": 1, "seed": 0, "local_rank": 0, "local_processes": 1,
        "workers": 1, "positions": {}, "next_reader": 0,
    }  # fmt: skip
    return ShardReader(find_shards(channel), DATA, **(options | changes))


def epoch(source: ShardReader, number: int, worker: int) -> list[str]:
    """Captions of one whole epoch of one reader."""
    captions = []
    for batch in source._batches(worker, Position(number)):
        if batch.position.epoch != number:
            return captions
        captions += batch.captions
    raise AssertionError("a reader's stream ended")


@settings(max_examples=40, deadline=None)
@given(processes=st.integers(1, 6), workers=st.integers(1, 4), number=st.integers(0, 3))
def test_each_sample_is_read_once_an_epoch_on_an_instance(
    channel: Path, processes: int, workers: int, number: int
) -> None:
    """Whatever the split, shards enough for all readers or not."""
    captions: list[str] = []
    for rank in range(processes):
        source = reader(channel, local_rank=rank, local_processes=processes, workers=workers)
        for worker in range(workers):
            captions += epoch(source, number, worker)
    assert sorted(captions) == sorted(f"a grey of {index}" for index in range(30))


@given(st.integers(1, 40), st.integers(1, 20), st.integers(0, 5))
def test_shards_are_shared_without_loss(shards: int, readers: int, number: int) -> None:
    paths = tuple(Path(f"{index}.tar") for index in range(shards))
    parts = [share(paths, one, readers, seed=1, epoch=number) for one in range(readers)]
    taken = [
        (path, place)
        for part in parts
        for path in part.shards
        for place in (range(readers) if part.stride == 1 else [part.offset])
    ]
    assert sorted(taken) == sorted((path, place) for path in paths for place in range(readers))


def test_the_order_depends_on_seed_and_epoch_alone(channel: Path) -> None:
    first = epoch(reader(channel), 0, 0)
    assert epoch(reader(channel), 0, 0) == first
    assert epoch(reader(channel), 1, 0) != first
    assert epoch(reader(channel, seed=1), 0, 0) != first


@pytest.mark.parametrize(("workers", "stop"), [(0, 1), (0, 4), (0, 9), (2, 5)])
def test_a_resumed_loader_goes_on_with_the_next_batch(
    channel: Path, workers: int, stop: int
) -> None:
    def loader(state: dict[str, Any] | None) -> Loader:
        return Loader(
            find_shards(channel), DATA, resolution=8, batch_size=4, seed=0, local_rank=0,
            local_processes=1, workers=workers, state=state,
        )  # fmt: skip

    whole = [batch.captions for batch, _ in zip(loader(None), range(14), strict=False)]
    cut = loader(None)
    for _ in zip(range(stop), cut, strict=False):
        pass
    resumed = loader(cut.state())
    rest = [batch.captions for batch, _ in zip(resumed, range(14 - stop), strict=False)]
    assert rest == whole[stop:]


def test_another_number_of_workers_starts_the_epoch_anew(channel: Path) -> None:
    state = {"readers": 4, "next": 2, "positions": {"0": [3, 5], "1": [2, 9]}}
    loader = Loader(
        find_shards(channel), DATA, resolution=8, batch_size=4, seed=0, local_rank=0,
        local_processes=1, workers=0, state=state,
    )  # fmt: skip
    assert loader.state()["positions"] == {"0": [2, 0]}


def image(mode: str, size: tuple[int, int], kind: str) -> bytes:
    content = io.BytesIO()
    Image.new(mode, size).save(content, kind)
    return content.getvalue()


@pytest.mark.parametrize(
    ("mode", "kind"),
    [("RGB", "JPEG"), ("L", "JPEG"), ("CMYK", "JPEG"), ("P", "PNG"), ("RGBA", "PNG"),
     ("LA", "PNG"), ("RGB", "WEBP")],
)  # fmt: skip
def test_every_kind_of_picture_becomes_rgb(mode: str, kind: str) -> None:
    pixels = to_pixels(image(mode, (40, 24), kind), 16)
    assert tuple(pixels.shape) == (3, 16, 16)


def test_the_middle_square_is_kept() -> None:
    wide = np.zeros((8, 24, 3), np.uint8)
    wide[:, 8:16] = 200
    content = io.BytesIO()
    Image.fromarray(wide).save(content, "PNG")
    assert to_pixels(content.getvalue(), 8).unique().tolist() == [200]


def test_bad_samples_come_with_the_batch_that_follows(tmp_path: Path) -> None:
    samples = {f"{index:02d}": sample(index) for index in range(8)}
    samples["03"]["png"] = b"no picture"
    del samples["05"]["txt"]
    write_shard(tmp_path / "a.tar", samples)
    source = reader(tmp_path)
    bad = []
    for batch in source._batches(0, Position()):
        bad += batch.bad
        if batch.position.epoch:
            break
    assert {(one.shard, one.key) for one in bad[:2]} == {("a.tar", "03"), ("a.tar", "05")}


def chunk(kind: bytes, content: bytes) -> bytes:
    check = zlib.crc32(kind + content)
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", check)


def test_a_picture_that_breaks_its_decoder_is_one_bad_sample(tmp_path: Path) -> None:
    """Pillow raises SyntaxError, which is no ValueError, for a PNG with a nameless chunk."""
    header = struct.pack(">IIBBBBB", 8, 8, 8, 2, 0, 0, 0)
    rows = zlib.compress(bytes(8 * (1 + 24)))
    broken = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header)
    broken += chunk(b"IDAT", rows[:5]) + chunk(bytes(4), rows[5:]) + chunk(b"IEND", b"")
    with pytest.raises(SyntaxError):
        to_pixels(broken, 8)
    write_shard(tmp_path / "a.tar", {"0": {"png": broken, "txt": b"x"}, "1": sample(1)})
    stream = reader(tmp_path)._batches(0, Position())
    bad = [one for _ in range(2) for one in next(stream).bad]
    assert {(one.key, one.reason.split(":")[0]) for one in bad} == {("0", "SyntaxError")}


def test_damage_late_in_an_epoch_is_told_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also when the shuffle does not hold the whole epoch, as it never does in earnest."""
    monkeypatch.setattr(data, "SHUFFLE_SAMPLES", 2)
    write_shards(tmp_path, shards=3, each=10)
    order = share(find_shards(tmp_path), 0, 1, seed=0, epoch=0).shards
    order[-1].write_bytes(order[-1].read_bytes()[:9000])
    bad = []
    for batch in reader(tmp_path)._batches(0, Position()):
        bad += batch.bad
        if batch.position.epoch:
            break
    assert (order[-1].name, "ReadError: unexpected end of data") in {
        (one.shard, one.reason) for one in bad
    }


def test_shards_without_one_good_sample_are_an_error(tmp_path: Path) -> None:
    write_shard(tmp_path / "a.tar", {"0": {"png": b"no picture", "txt": b"x"}})
    with pytest.raises(DataError, match=r"a\.tar"):
        next(iter(reader(tmp_path)))


def test_one_percent_of_bad_samples_is_the_limit() -> None:
    import torch

    def batch(good: int, bad: int) -> Batch:
        from sm_train.entrypoints.data import Bad

        spoilt = tuple(Bad("rotten.tar", str(index), "x") for index in range(bad))
        return Batch(torch.zeros(1), ["x"] * good, 0, Position(), spoilt)

    counter = BadSamples()
    counter.add(batch(2000, 20))
    with pytest.raises(DataError, match=r"21 of 2021 samples.*rotten\.tar"):
        counter.add(batch(0, 1))
    few = BadSamples()
    few.add(batch(5, 10))


def test_an_image_of_another_extension_is_found(tmp_path: Path) -> None:
    write_shard(tmp_path / "a.tar", {"0": {"jpg": image("RGB", (9, 9), "JPEG"), "txt": b"x"}})
    assert next(iter(reader(tmp_path))).captions == ["x"]
