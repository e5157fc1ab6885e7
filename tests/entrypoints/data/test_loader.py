"""Loading: each sample once an epoch, the same batches every time, on from anywhere."""

from __future__ import annotations

import io
import tarfile
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from sm_train.entrypoints.common.sample_rng import CAPTION, TIMESTEP, SampleRng
from sm_train.entrypoints.data import loader as loading
from sm_train.entrypoints.data.aspect_buckets import aspect_shapes, nearest_shape
from sm_train.entrypoints.data.bad_samples import BadSampleTracker
from sm_train.entrypoints.data.batches import Batch
from sm_train.entrypoints.data.sampler import DataPosition, SamplerState
from sm_train.entrypoints.data.shard_catalog import DataError
from sm_train.entrypoints.data.shard_index import write_index
from sm_train.entrypoints.data.shard_reader import BadSample
from sm_train.entrypoints.data.shard_verification import scan_shard

from tests.support.cluster.training_jobs import png, sample, write_shard, write_shards
from tests.support.data_channels import DATA, Cluster, deal, epoch_of, first, index, seen

DRAWS = SampleRng(0, kinds=2, channels=3, scale=2)
SHARDS, EACH = 7, 9
ALL = Counter(f"a grey of {number}" for number in range(SHARDS * EACH))


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Shards in which a window holds a few samples, so that an epoch has many windows."""
    folder = tmp_path_factory.mktemp("data") / "shards"
    write_shards(folder, shards=SHARDS, each=EACH)
    index(folder)
    return sorted(folder.glob("*.tar"))


@pytest.fixture(autouse=True)
def small_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "READ_BYTES", 2000)
    monkeypatch.setattr(loading, "SHUFFLE_BLOCK_BYTES", 14000)


def cluster(
    shards: list[Path], folder: Path, instances: int = 1, processes: int = 1, index: bool = True
) -> Cluster:
    where = shards[0].parent.parent / "index.parquet" if index else None
    return Cluster(deal(shards, instances, folder), processes, folder / "notes", where)


@settings(max_examples=25, deadline=None)
@given(
    instances=st.integers(1, 4),
    processes=st.integers(1, 3),
    batch_size=st.integers(1, 5),
    index=st.booleans(),
)
def test_each_sample_is_read_once_an_epoch(
    shards: list[Path],
    tmp_path_factory: pytest.TempPathFactory,
    instances: int,
    processes: int,
    batch_size: int,
    index: bool,
) -> None:
    """Whatever instances see; all make the same number of steps, and what repeats is counted."""
    folder = tmp_path_factory.mktemp("cluster")
    loaders = cluster(shards, folder, instances, processes, index).loaders(batch_size=batch_size)
    assert len({loader.epoch_size() for loader in loaders}) == 1
    batches = [batch for loader in loaders for batch in epoch_of(loader)]
    read = seen(batches)
    assert set(read) == set(ALL)
    repeated = (read - ALL).total()
    assert (
        repeated == loaders[0].epoch_size().repeated == sum(batch.num_repeated for batch in batches)
    )
    assert loaders[0].epoch_size().samples == ALL.total()


@settings(max_examples=15, deadline=None)
@given(
    worlds=st.lists(
        st.tuples(st.integers(1, 4), st.integers(1, 3), st.integers(1, 4)), min_size=2, max_size=4
    ),
    steps=st.integers(0, 4),
    buckets=st.booleans(),
)
def test_a_changed_world_reads_what_is_left_and_that_alone(
    pictures: list[Path],
    tmp_path_factory: pytest.TempPathFactory,
    worlds: list[tuple[int, int, int]],
    steps: int,
    buckets: bool,
) -> None:
    """4 nodes, then 8, then 2 …: of an epoch no sample is lost and none is seen twice."""
    data = replace(DATA, aspect_buckets=buckets)
    record: bytes | None = None
    fresh: Counter[str] = Counter()
    for number, (instances, processes, batch_size) in enumerate(worlds):
        folder = tmp_path_factory.mktemp("world")
        loaders = cluster(pictures, folder, instances, processes).loaders(
            batch_size=batch_size, state=record, data=data, resolution=16
        )
        last = number == len(worlds) - 1
        for loader in loaders:
            if loader.position.epoch:  # the epoch was over before
                break
            for batch in epoch_of(loader, None if last else steps):
                fresh.update(batch.captions[: len(batch.captions) - batch.num_repeated])
        [record] = {loader.state_bytes() for loader in loaders}
    assert fresh == Counter(dict.fromkeys(fresh, 1))
    expected = {f"picture {number}" for number in range(30)}
    assert set(fresh) == expected


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Thirty pictures of several shapes in five shards, with an index that knows their sides."""
    folder = tmp_path_factory.mktemp("pictures") / "shards"
    folder.mkdir()
    sides = [(16, 16), (16, 32), (30, 16), (18, 16), (16, 40)]
    written = []
    for shard in range(5):
        numbers = range(shard * 6, shard * 6 + 6)
        chosen = [sides[number % 5] for number in numbers]
        samples = {
            f"{number:02d}": {"png": picture(*side), "txt": f"picture {number}".encode()}
            for number, side in zip(numbers, chosen, strict=True)
        }
        path = folder / f"{shard}.tar"
        write_shard(path, samples)
        widths, heights = zip(*chosen, strict=True)
        written.append(replace(scan_shard(path), widths=widths, heights=heights))
    write_index(folder.parent / "index.parquet", written)
    return sorted(folder.glob("*.tar"))


def picture(width: int, height: int, colour: int = 90) -> bytes:
    content = io.BytesIO()
    Image.new("RGB", (width, height), (colour,) * 3).save(content, "PNG")
    return content.getvalue()


@pytest.mark.parametrize("workers", [0, 1, 3])
@pytest.mark.parametrize("stop", [1, 10, 31])
def test_a_resumed_loader_goes_on_with_the_next_batch(
    shards: list[Path], tmp_path: Path, workers: int, stop: int
) -> None:
    """In a fresh loader, whatever the number of its threads: over the end of the epoch, too."""
    alone = cluster(shards, tmp_path)
    [whole] = alone.loaders(rng=DRAWS)
    batches = first(whole, 40)
    [cut] = alone.loaders()
    first(cut, stop)
    [resumed] = alone.loaders(state=cut.state_bytes(), decode_workers=workers, rng=DRAWS)
    assert resumed.resume_warning is None
    for batch, expected in zip(first(resumed, 40 - stop), batches[stop:], strict=True):
        assert batch.captions == expected.captions
        assert batch.position == expected.position
        assert torch.equal(batch.pixels, expected.pixels)
        assert torch.equal(batch.noise, expected.noise)
        assert np.array_equal(batch.timestep_uniform, expected.timestep_uniform)
        assert np.array_equal(batch.dropout_uniform, expected.dropout_uniform)


def test_what_is_random_of_a_sample_belongs_to_it_and_the_epoch(tmp_path: Path) -> None:
    """That of a bad sample's substitute to the substitute; in another epoch it is another."""
    samples = {f"{number}": sample(number) for number in range(6)}
    samples["2"]["png"] = b"no image"
    write_shard(tmp_path / "a.tar", samples)
    data = replace(DATA, max_bad_fraction=1.0)
    [loader] = Cluster([tmp_path], 1, tmp_path / "notes").loaders(data=data, rng=DRAWS)
    levels = []
    for number, batch in enumerate(first(loader, 6)):
        epoch = number // 3
        levels += batch.timestep_uniform.tolist()
        assert batch.noise.shape == (2, 2, 3, 4, 4)
        assert np.array_equal(batch.timestep_uniform, DRAWS.uniform(TIMESTEP, epoch, batch.origins))
        assert np.array_equal(batch.dropout_uniform, DRAWS.uniform(CAPTION, epoch, batch.origins))
        for place, (shard, one) in enumerate(batch.origins):
            expected = torch.empty(2, 3, 4, 4)
            DRAWS.fill_normal(expected, epoch, shard, one)
            assert torch.equal(batch.noise[:, place], expected)
    assert len(set(levels[:6]) & set(levels[6:])) == 0


@pytest.mark.parametrize("stop", range(0, 20, 3))
def test_buckets_resume_as_exactly(pictures: list[Path], tmp_path: Path, stop: int) -> None:
    data = replace(DATA, aspect_buckets=True)
    alone = cluster(pictures, tmp_path)
    [whole] = alone.loaders(data=data, batch_size=3, resolution=16)
    batches = first(whole, 24)
    [cut] = alone.loaders(data=data, batch_size=3, resolution=16)
    first(cut, stop)
    [resumed] = alone.loaders(data=data, batch_size=3, resolution=16, state=cut.state_bytes())
    for batch, expected in zip(first(resumed, 24 - stop), batches[stop:], strict=True):
        assert batch.captions == expected.captions
        assert torch.equal(batch.pixels, expected.pixels)


def test_a_bucket_batch_has_the_shape_of_its_images(pictures: list[Path], tmp_path: Path) -> None:
    data = replace(DATA, aspect_buckets=True)
    [loader] = cluster(pictures, tmp_path).loaders(data=data, batch_size=2, resolution=16)
    shapes = aspect_shapes(16)
    of_picture = nearest_shape(shapes, [16, 32, 16, 16, 40], [16, 16, 30, 18, 16])
    batches = epoch_of(loader)
    assert len({tuple(batch.pixels.shape) for batch in batches}) > 2
    for batch in batches:
        numbers = [int(caption.split()[1]) for caption in batch.captions]
        assert {shapes[of_picture[number % 5]] for number in numbers} == {
            tuple(batch.pixels.shape[1:3])
        }


@given(st.integers(4, 40).map(lambda side: side * 32))
def test_shapes_have_about_one_area_and_sides_that_networks_divide(resolution: int) -> None:
    shapes = aspect_shapes(resolution)
    step = min(64, resolution // 4)
    assert shapes[0] == (resolution, resolution)
    for height, width in shapes:
        assert height * width <= resolution**2
        assert (height, width) == (resolution, resolution) or not (height % step or width % step)
        assert max(height, width) <= 2 * min(height, width)
        assert (width, height) in shapes


def test_buckets_without_sizes_are_an_error(shards: list[Path], tmp_path: Path) -> None:
    data = replace(DATA, aspect_buckets=True)
    [walking] = cluster(shards, tmp_path / "a", index=False).loaders(data=data)
    bare = tmp_path / "bare.parquet"
    write_index(bare, [scan_shard(path) for path in shards])
    [unsized] = Cluster(deal(shards, 1, tmp_path / "b"), 1, tmp_path, bare).loaders(data=data)
    for loader in (walking, unsized):
        with pytest.raises(DataError, match="sm-train index"):
            first(loader, 1)


def test_seed_and_epoch_make_the_order(shards: list[Path], tmp_path: Path) -> None:
    alone = cluster(shards, tmp_path)
    [one], [same], [other] = alone.loaders(), alone.loaders(), alone.loaders(seed=1)
    epoch, next_epoch = epoch_of(one), epoch_of(one)
    captions = [batch.captions for batch in epoch]
    assert [batch.captions for batch in epoch_of(same)] == captions
    assert [batch.captions for batch in epoch_of(other)] != captions
    assert [batch.captions for batch in next_epoch] != captions
    assert seen(next_epoch[:31]) <= ALL


def test_other_shards_or_another_seed_begin_the_epoch_anew_and_say_so(
    shards: list[Path], tmp_path: Path
) -> None:
    [loader] = cluster(shards, tmp_path / "a").loaders()
    first(loader, 3)
    [other] = cluster(shards, tmp_path / "b").loaders(state=loader.state_bytes(), seed=5)
    assert other.position == DataPosition(0, 0)
    assert other.resume_warning is not None
    assert "restarts" in other.resume_warning


def test_the_record_reads_as_it_was_written(shards: list[Path], tmp_path: Path) -> None:
    """It is some hundred bytes and one small number for each shard."""
    two = cluster(shards, tmp_path / "two", instances=2)
    loaders = two.loaders()
    first(loaders[0], 3)
    [alone] = cluster(shards, tmp_path / "one").loaders(state=loaders[0].state_bytes())
    record = SamplerState.from_bytes(alone.state_bytes())
    assert record.position == DataPosition(0, 0)
    assert [segment.steps for segment in record.finished_segments] == [3]
    assert record.finished_segments[0].topology.owner.tolist() == [0, 1, 0, 1, 0, 1, 0]
    assert record.to_bytes() == alone.state_bytes()
    assert len(alone.state_bytes()) < 2000


# ------------------------------------------------------------------ faults


def bad(batches: list[Batch]) -> set[tuple[str, str, str]]:
    return {(one.shard, one.key, one.reason) for batch in batches for one in batch.bad_samples}


def cut_within_a_member(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: scan_shard(path).offsets[7] + 600])


def spoil_a_checksum(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[scan_shard(path).offsets[7] + 150] ^= 0x55
    path.write_bytes(content)


def spoil_an_image(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[scan_shard(path).offsets[7] + 520] ^= 0x55
    path.write_bytes(content)


def make_unreadable(path: Path) -> None:
    """Every read of the kernel's own file fails with EIO: nothing is mapped at such places."""
    path.unlink()
    path.symlink_to("/proc/self/mem")


FIRST = {f"{number:04d}" for number in range(20)}


@pytest.mark.parametrize(
    ("spoil", "lost", "reason"),
    [
        (cut_within_a_member, FIRST - {f"{number:04d}" for number in range(7)}, "tar-truncated"),
        (lambda path: path.write_bytes(b""), FIRST, "tar-truncated"),
        (spoil_a_checksum, {"0007"}, "tar-damaged"),
        (spoil_an_image, {"0007"}, "image-corrupt"),
        (lambda path: path.unlink(), FIRST, "shard-missing"),
        (make_unreadable, FIRST, "read-error"),
    ],
)
def test_damage_costs_the_samples_that_it_touches(
    tmp_path: Path, spoil: Callable[[Path], None], lost: set[str], reason: str
) -> None:
    """Of a shard that changed after its index was made, or under a running job."""
    folder = tmp_path / "shards"
    write_shards(folder, shards=2, each=20)
    index(folder)
    [loader] = Cluster([folder], 1, tmp_path / "notes", tmp_path / "index.parquet").loaders()
    spoil(folder / "shard-000.tar")
    batches = epoch_of(loader)
    assert len(batches) == 20
    assert {one.reason for batch in batches for one in batch.bad_samples} == {reason}
    assert sum(len(batch.bad_samples) for batch in batches) == len(lost)
    expected = {f"a grey of {number}" for number in range(40)} - {
        f"a grey of {int(key)}" for key in lost
    }
    assert set(seen(batches)) == expected
    assert sum(batch.num_repeated for batch in batches) == len(lost)


@pytest.mark.parametrize(
    ("spoil", "left"),
    [(cut_within_a_member, 27), (lambda path: path.write_bytes(b""), 20), (spoil_a_checksum, 39)],
)
def test_a_walk_finds_what_is_whole_and_tells_the_rest(
    tmp_path: Path, spoil: Callable[[Path], None], left: int
) -> None:
    folder = tmp_path / "shards"
    write_shards(folder, shards=2, each=20)
    spoil(folder / "shard-000.tar")
    alone = Cluster([folder], 1, tmp_path / "notes")
    [(_, catalogue)] = alone.surveys()
    assert {shard for shard, _ in catalogue.damage} == {"shard-000.tar"}
    [loader] = alone.loaders()
    batches = epoch_of(loader)
    assert len(seen(batches)) == left
    reasons = {one.reason for batch in batches for one in batch.bad_samples}
    assert reasons <= {"caption-missing", "image-missing"}


def test_the_same_faults_give_the_same_batches(tmp_path: Path) -> None:
    """What takes the place of a bad sample is a pure function of the place."""
    folder = tmp_path / "shards"
    write_shards(folder, shards=2, each=20)
    spoil_an_image(folder / "shard-000.tar")
    alone = Cluster([folder], 1, tmp_path / "notes")
    runs = [
        [batch.captions for batch in epoch_of(alone.loaders(decode_workers=n)[0])] for n in (0, 2)
    ]
    assert runs[0] == runs[1]


def test_an_instance_without_shards_stops_all(tmp_path: Path) -> None:
    write_shards(tmp_path / "a", shards=1, each=4)
    (tmp_path / "b").mkdir()
    with pytest.raises(DataError, match=r"^algo-2: no \.tar in the train channel"):
        Cluster([tmp_path / "a", tmp_path / "b"], 2, tmp_path / "notes").surveys()


def test_one_shard_that_two_nodes_see_is_read_by_halves(tmp_path: Path) -> None:
    """As with FullyReplicated: by samples inside the shard, each once."""
    write_shards(tmp_path / "a", shards=1, each=21)
    loaders = Cluster([tmp_path / "a"] * 2, 2, tmp_path / "notes").loaders(batch_size=1)
    parts = [seen(epoch_of(loader)) for loader in loaders]
    read = sum(parts, Counter[str]())
    assert set(read) == {f"a grey of {number}" for number in range(21)}
    assert read.total() == 24 == loaders[0].epoch_size().repeated + 21


def test_shards_without_one_sample_stop_all(tmp_path: Path) -> None:
    write_shard(tmp_path / "a.tar", {})
    with pytest.raises(DataError, match=r"algo-1: no sample that it could read in a\.tar"):
        Cluster([tmp_path], 1, tmp_path / "notes").surveys()


def test_samples_of_which_none_is_good_are_an_error(tmp_path: Path) -> None:
    write_shard(tmp_path / "a.tar", {"0": {"png": b"no picture", "txt": b"x"}})
    [loader] = Cluster([tmp_path], 1, tmp_path / "notes").loaders()
    with pytest.raises(DataError, match=r"a\.tar: image-corrupt"):
        first(loader, 1)
    [beside] = Cluster([tmp_path], 1, tmp_path / "notes").loaders(decode_workers=2)
    with pytest.raises(DataError, match=r"a\.tar: image-corrupt"):
        first(beside, 1)


def test_an_index_of_other_shards_stops_all(tmp_path: Path) -> None:
    write_shards(tmp_path / "shards", shards=1, each=4)
    index(tmp_path / "shards")
    write_shards(tmp_path / "shards", shards=3, each=4)
    alone = Cluster([tmp_path / "shards"], 1, tmp_path / "notes", tmp_path / "index.parquet")
    with pytest.raises(DataError, match=r"2 shards .* not in the index, shard-001\.tar among"):
        alone.surveys()


def test_an_index_that_is_damaged_stops_all(tmp_path: Path) -> None:
    write_shards(tmp_path / "shards", shards=2, each=4)
    (tmp_path / "index.parquet").write_bytes(b"PAR1 no more")
    two = Cluster([tmp_path / "shards"] * 2, 1, tmp_path / "notes", tmp_path / "index.parquet")
    with pytest.raises(DataError, match=r"not a shard index.*`sm-train index` again"):
        two.surveys()


def test_odd_names_are_samples_like_any_other(tmp_path: Path) -> None:
    """A key twice, keys with dots and slashes, and a path that tries to leave the folder."""
    folder = tmp_path / "shards"
    folder.mkdir()
    names = [
        "a/b.c/d",
        "../../escape",
        "/absolute",
        "twice",
        "other",
        "twice",
        "über/猫",
        "x" * 150,
    ]
    with tarfile.open(folder / "odd.tar", "w", format=tarfile.PAX_FORMAT) as tar:
        for number, name in enumerate(names):
            for extension, content in sample(number).items():
                entry = tarfile.TarInfo(f"{name}.{extension}")
                entry.size = len(content)
                tar.addfile(entry, io.BytesIO(content))
    before = sorted(tmp_path.rglob("*"))
    [loader] = Cluster([folder], 1, tmp_path / "notes").loaders(batch_size=1)
    assert seen(epoch_of(loader)) == Counter(f"a grey of {n}" for n in range(len(names)))
    new = set(tmp_path.rglob("*")) - set(before)
    assert {path.relative_to(tmp_path).parts[0] for path in new} == {"notes"}


def test_images_too_large_are_refused_by_their_header(tmp_path: Path) -> None:
    """A decompression bomb of 1 gigapixel in some kilobytes; 100 megapixels are decoded."""
    content = io.BytesIO()
    Image.new("1", (40_000, 25_000)).save(content, "PNG")
    samples = {f"{number}": sample(number) for number in range(4)}
    samples["bomb"] = {"png": content.getvalue(), "txt": b"a bomb"}
    large = io.BytesIO()
    Image.new("L", (10_000, 10_000), 77).save(large, "JPEG", quality=30)
    samples["large"] = {"jpg": large.getvalue(), "txt": b"large"}
    write_shard(tmp_path / "a.tar", samples)
    [loader] = Cluster([tmp_path], 1, tmp_path / "notes").loaders(batch_size=1)
    before = psutil.Process().memory_info().rss
    batches = epoch_of(loader)
    assert bad(batches) == {("a.tar", "bomb", "image-bomb")}
    [found] = [batch for batch in batches if batch.captions == ["large"] and not batch.bad_samples][
        :1
    ]
    assert found.pixels.float().mean() == pytest.approx(77, abs=2)
    assert psutil.Process().memory_info().rss - before < 400e6


def test_captions_that_are_missing_or_odd_have_their_reason(tmp_path: Path) -> None:
    samples = {f"{number}": sample(number) for number in range(8)}
    samples["2"]["txt"] = b"\xff\xfe not UTF-8"
    del samples["3"]["txt"]
    del samples["4"]["png"]
    write_shard(tmp_path / "a.tar", samples)
    [loader] = Cluster([tmp_path], 1, tmp_path / "notes").loaders()
    assert bad(epoch_of(loader)) == {
        ("a.tar", "2", "caption-not-utf8"),
        ("a.tar", "3", "caption-missing"),
        ("a.tar", "4", "image-missing"),
    }


def spoilt(good: int, number: int) -> Batch:
    bad = tuple(
        BadSample("rotten.tar", str(index), "image-corrupt", "x") for index in range(number)
    )
    none = np.zeros(0)
    return Batch(torch.zeros(1), ["x"] * good, DataPosition(), bad, 0, (), none, none)


def test_the_share_of_bad_samples_has_a_limit() -> None:
    counter = BadSampleTracker(0.01)
    counter.add(spoilt(2000, 20))
    with pytest.raises(
        DataError, match=r"21 of 2001 .*\(image-corrupt 21\), in rotten\.tar.*max_bad_fraction"
    ):
        counter.add(spoilt(1, 1))
    BadSampleTracker(0.01).add(spoilt(10, 10))
    BadSampleTracker(0.5).add(spoilt(100, 49))


def test_bad_samples_are_reported_once_by_reason() -> None:
    counter = BadSampleTracker(0.5)
    assert counter.report() is None
    counter.add(spoilt(100, 7))
    report = counter.report()
    assert report is not None
    assert report[0].startswith("skipped 7 samples (image-corrupt 7): rotten.tar 0: x; ")
    assert report[1] == {"image-corrupt": 7}
    assert counter.report() is None


# ------------------------------------------------------------------ ahead of use


def test_a_trainer_that_waits_gets_more_batches_ahead(tmp_path: Path) -> None:
    noise = np.random.default_rng(0).integers(0, 255, (700, 700, 3), np.uint8)
    content = io.BytesIO()
    Image.fromarray(noise).save(content, "PNG")
    write_shard(
        tmp_path / "a.tar",
        {str(number): {"png": content.getvalue(), "txt": b"x"} for number in range(40)},
    )
    [loader] = Cluster([tmp_path], 1, tmp_path / "notes").loaders(decode_workers=1, resolution=64)
    assert loader.prefetch_depth == loading.FIRST_DEPTH
    first(loader, 12)
    assert loader.prefetch_depth > loading.FIRST_DEPTH


@pytest.mark.parametrize("workers", [0, 2])
def test_what_is_kept_of_a_batch_stays_as_it_is(
    shards: list[Path], tmp_path: Path, workers: int
) -> None:
    """Memory of batches is used again, but never while a tensor lies in it."""
    [loader] = cluster(shards, tmp_path).loaders(decode_workers=workers)
    kept = []
    for number, batch in zip(range(60), loader, strict=False):
        if number % 3:
            kept.append((batch.pixels[1], batch.captions[1]))
    assert len(kept) == 40
    for pixels, caption in kept:
        assert pixels.unique().tolist() == [int(caption.split()[-1])]


@pytest.mark.parametrize("workers", [0, 2])
def test_memory_of_batches_that_are_gone_is_used_again(
    shards: list[Path], tmp_path: Path, workers: int
) -> None:
    [loader] = cluster(shards, tmp_path).loaders(decode_workers=workers)
    places = {batch.pixels.data_ptr() for _, batch in zip(range(60), loader, strict=False)}
    # Those made ahead, two that are begun, and two that the loop above holds.
    assert len(places) <= (loader.prefetch_depth + 4 if workers else 2)


# ------------------------------------------------------------------ precomputed latents


def latents(folder: Path, missing: str | None = None) -> Path:
    """Shards that carry moments and text states for 8 pixels, as ``pack --latents`` does."""
    folder.mkdir()
    samples: dict[str, dict[str, bytes]] = {}
    for number in range(6):
        arrays: dict[str, Any] = {
            "moments.npy": np.full((8, 2, 2), number, np.float16),
            "text.npy": np.full((4, 16), number, np.float16),
        }
        samples[f"{number}"] = sample(number)
        for name, array in arrays.items():
            content = io.BytesIO()
            np.save(content, array)
            samples[f"{number}"][name] = content.getvalue()
    if missing:
        del samples["3"][missing]
    write_shard(folder / "a.tar", samples)
    index = folder.parent / f"{folder.name}.parquet"
    options = {"latents": {"resolution": 8, "moments": [8, 2, 2], "text": [4, 16], "model": "m"}}
    write_index(index, [scan_shard(folder / "a.tar")], options=options)
    return index


@pytest.mark.parametrize("workers", [0, 1])
def test_latents_of_the_stages_resolution_are_handed_over(tmp_path: Path, workers: int) -> None:
    index = latents(tmp_path / "shards")
    alone = Cluster([tmp_path / "shards"], 1, tmp_path / "notes", index)
    [loader] = alone.loaders(decode_workers=workers)
    for batch in epoch_of(loader):
        assert batch.moments is not None
        assert batch.text is not None
        numbers = [int(caption.split()[-1]) for caption in batch.captions]
        assert batch.moments[:, 0, 0, 0].tolist() == numbers
        assert batch.text[:, -1, -1].tolist() == numbers
        assert tuple(batch.moments.shape) == (2, 8, 2, 2)
        assert len(batch.pixels[0]) == 0
    [other] = alone.loaders(resolution=4)
    [batch] = first(other, 1)
    assert batch.moments is None
    assert tuple(batch.pixels.shape) == (2, 4, 4, 3)


@pytest.mark.parametrize("missing", ["moments.npy", "text.npy"])
def test_a_sample_without_its_latents_is_bad(tmp_path: Path, missing: str) -> None:
    index = latents(tmp_path / "shards", missing)
    [loader] = Cluster([tmp_path / "shards"], 1, tmp_path / "notes", index).loaders()
    assert bad(epoch_of(loader)) == {("a.tar", "3", "latents-missing")}


def test_pixels_are_those_of_the_picture(tmp_path: Path) -> None:
    write_shard(tmp_path / "a.tar", {"0": {"png": png(123), "txt": b"x"}})
    [loader] = Cluster([tmp_path], 1, tmp_path / "notes").loaders(batch_size=1)
    [batch] = first(loader, 1)
    assert batch.pixels.dtype == torch.uint8
    assert batch.pixels.unique().tolist() == [123]
