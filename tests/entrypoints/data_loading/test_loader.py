"""The loader: each sample once an epoch, equal batches in every run, resumable from any step."""

from __future__ import annotations

import io
import os
import shutil
import subprocess
import sys
import tarfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from itertools import compress
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from sm_train.entrypoints.data_loading import indexed_reader
from sm_train.entrypoints.data_loading.batches import BadSampleTracker, Batch
from sm_train.entrypoints.data_loading.loader import FIRST_DEPTH
from sm_train.entrypoints.data_loading.sample_ranges import aspect_shapes, nearest_shape
from sm_train.entrypoints.data_loading.sampler import DataPosition, SamplerState
from sm_train.entrypoints.data_loading.shard_reader import BadSample
from sm_train.entrypoints.sample_metadata.sample_rng import Purpose, SampleRng
from sm_train.entrypoints.shards.shard_format import DataError
from sm_train.entrypoints.shards.shard_index import ShardIndex, write_index
from sm_train.entrypoints.shards.shard_verification import scan_shard

from tests.support.cluster.training_jobs import png, sample, write_shard, write_shards
from tests.support.data_channels import (
    DATA_CONFIG,
    Cluster,
    caption_counts,
    distribute_shards,
    rest_of_epoch,
    take_batches,
    write_folder_index,
)
from tests.support.deadline import DEADLINE

RNG = SampleRng(0, num_noises=2, channels=3, scale=2)
BUCKETED = replace(DATA_CONFIG, aspect_buckets=True)
SHARDS, EACH = 7, 9
ALL_CAPTIONS = Counter(f"a grey of {number}" for number in range(SHARDS * EACH))


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Indexed shards of gray images."""
    folder = tmp_path_factory.mktemp("data") / "shards"
    write_shards(folder, shards=SHARDS, each=EACH)
    write_folder_index(folder)
    return sorted(folder.glob("*.tar"))


@pytest.fixture(autouse=True)
def small_shuffle_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a shuffle block hold a few samples, so that an epoch has many blocks."""
    monkeypatch.setattr(indexed_reader, "READ_BYTES", 2000)
    monkeypatch.setattr(indexed_reader, "SHUFFLE_BLOCK_BYTES", 14000)


def cluster(
    shards: list[Path],
    folder: Path,
    num_nodes: int = 1,
    local_world_size: int = 1,
    indexed: bool = True,
) -> Cluster:
    index = shards[0].parent.parent / "index.parquet" if indexed else None
    channels = distribute_shards(shards, num_nodes, folder)
    return Cluster(channels, local_world_size, folder / "scan", index)


def new_captions(batch: Batch) -> list[str]:
    return list(compress(batch.captions, batch.is_new))


@settings(max_examples=25, deadline=None)
@given(
    num_nodes=st.integers(1, 4),
    local_world_size=st.integers(1, 3),
    batch_size=st.integers(1, 5),
    indexed=st.booleans(),
)
def test_each_sample_is_read_once_an_epoch(
    shards: list[Path],
    tmp_path_factory: pytest.TempPathFactory,
    num_nodes: int,
    local_world_size: int,
    batch_size: int,
    indexed: bool,
) -> None:
    """Under any topology all ranks take the same number of steps and count what they repeat."""
    folder = tmp_path_factory.mktemp("cluster")
    loaders = cluster(shards, folder, num_nodes, local_world_size, indexed).loaders(
        batch_size=batch_size
    )
    [size] = {loader.epoch_size() for loader in loaders}
    batches = [batch for loader in loaders for batch in rest_of_epoch(loader)]
    counts = caption_counts(batches)
    assert set(counts) == set(ALL_CAPTIONS)
    repeated = (counts - ALL_CAPTIONS).total()
    assert repeated == size.repeated == sum(np.count_nonzero(~batch.is_new) for batch in batches)
    assert size.samples == ALL_CAPTIONS.total()


@settings(max_examples=15, deadline=None)
@given(
    topologies=st.lists(
        st.tuples(st.integers(1, 4), st.integers(1, 3), st.integers(1, 4)), min_size=2, max_size=4
    ),
    steps=st.integers(0, 4),
    buckets=st.booleans(),
)
def test_changed_topology_reads_exactly_the_remaining_samples(
    pictures: list[Path],
    tmp_path_factory: pytest.TempPathFactory,
    topologies: list[tuple[int, int, int]],
    steps: int,
    buckets: bool,
) -> None:
    """With 4 nodes, then 8, then 2 …, no sample of an epoch is lost or read twice."""
    config = replace(DATA_CONFIG, aspect_buckets=buckets)
    state: bytes | None = None
    captions: Counter[str] = Counter()
    for number, (num_nodes, local_world_size, batch_size) in enumerate(topologies):
        folder = tmp_path_factory.mktemp("topology")
        loaders = cluster(pictures, folder, num_nodes, local_world_size).loaders(
            batch_size=batch_size, state=state, config=config, resolution=16
        )
        is_last = number == len(topologies) - 1
        for loader in loaders:
            if loader.position.epoch:  # an earlier topology has finished the epoch
                break
            for batch in rest_of_epoch(loader, None if is_last else steps):
                captions.update(new_captions(batch))
        [state] = {loader.state_bytes() for loader in loaders}
    assert captions == Counter(f"picture {number}" for number in range(30))


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Thirty images of several shapes in five shards, with an index that has their sizes."""
    folder = tmp_path_factory.mktemp("pictures") / "shards"
    folder.mkdir()
    sizes = [(16, 16), (16, 32), (30, 16), (18, 16), (16, 40)]
    described = []
    for shard in range(5):
        numbers = range(shard * 6, shard * 6 + 6)
        shard_sizes = [sizes[number % 5] for number in numbers]
        samples = {
            f"{number:02d}": {"png": plain_png(*size), "txt": f"picture {number}".encode()}
            for number, size in zip(numbers, shard_sizes, strict=True)
        }
        path = folder / f"{shard}.tar"
        write_shard(path, samples)
        widths, heights = zip(*shard_sizes, strict=True)
        described.append(replace(scan_shard(path), widths=widths, heights=heights))
    write_index(folder.parent / "index.parquet", described)
    return sorted(folder.glob("*.tar"))


def plain_png(width: int, height: int, level: int = 90) -> bytes:
    content = io.BytesIO()
    Image.new("RGB", (width, height), (level,) * 3).save(content, "PNG")
    return content.getvalue()


@pytest.mark.slow
@pytest.mark.parametrize("decode_workers", [0, 3, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("steps", [1, 31])
def test_resumed_loader_continues_with_the_next_batch(
    shards: list[Path], tmp_path: Path, decode_workers: int, steps: int
) -> None:
    """With any number of decode workers, and across the end of the epoch."""
    node = cluster(shards, tmp_path)
    [uninterrupted] = node.loaders(rng=RNG)
    batches = take_batches(uninterrupted, 40)
    [interrupted] = node.loaders()
    take_batches(interrupted, steps)
    [resumed] = node.loaders(
        state=interrupted.state_bytes(), decode_workers=decode_workers, rng=RNG
    )
    assert resumed.reader.resume_warning is None
    for batch, expected in zip(take_batches(resumed, 40 - steps), batches[steps:], strict=True):
        assert batch.captions == expected.captions
        assert batch.position == expected.position
        assert torch.equal(batch.pixels, expected.pixels)
        assert torch.equal(batch.noise, expected.noise)
        assert np.array_equal(batch.timestep_uniform, expected.timestep_uniform)
        assert np.array_equal(batch.dropout_uniform, expected.dropout_uniform)


FORK_SERVER = """
import torch.multiprocessing
from sm_train.entrypoints.data_loading import loader

if __name__ == "__main__":
    loader.start_fork_server()
    pool = torch.multiprocessing.get_context("forkserver").Pool(1)
    print(pool.apply(eval, (f"{loader.__name__!r} in __import__('sys').modules",)))
    # To leave a `with` block would send SIGTERM, which processes of this fork server block.
    pool.close()
    pool.join()
"""


@pytest.mark.integration
def test_processes_of_the_loader_start_with_its_modules(tmp_path: Path) -> None:
    """Importing them takes seconds, which the trainer would wait for at its first batch."""
    script = tmp_path / "script.py"
    script.write_text(FORK_SERVER)
    finished = subprocess.run([sys.executable, script], capture_output=True, text=True, check=False)
    assert finished.stdout == "True\n", finished.stderr[-2000:]


OPEN_ITERATOR = """
import sys
from pathlib import Path
from tests.support.data_channels import Cluster

batches = None
if __name__ == "__main__":
    shards, scan, index = map(Path, sys.argv[2:])
    [loader] = Cluster([shards], 1, scan, index).loaders(decode_workers=1)
    batches = iter(loader)
    print(len(next(batches).captions), flush=True)
    for batch in loader:
        if sys.argv[1] == "fails":
            raise ValueError
        break
"""


@pytest.mark.slow
@pytest.mark.integration
@pytest.mark.parametrize(("end", "code"), [("returns", 0), ("fails", 1)])
def test_program_that_leaves_an_iterator_open_ends(
    shards: list[Path], tmp_path: Path, end: str, code: int
) -> None:
    """Multiprocessing would wait for the loader's process, which waits until a batch is taken."""
    script = tmp_path / "script.py"
    script.write_text(OPEN_ITERATOR)
    folder = shards[0].parent
    paths = (folder, tmp_path / "scan", folder.parent / "index.parquet")
    repository = Path(__file__).parents[3]
    finished = subprocess.run(
        [sys.executable, script, end, *paths],
        env=os.environ | {"PYTHONPATH": f"{repository}:{os.environ.get('PYTHONPATH', '')}"},
        capture_output=True,
        text=True,
        timeout=DEADLINE,
        check=False,
    )
    assert (finished.stdout, finished.returncode) == ("2\n", code), finished.stderr[-2000:]


@pytest.mark.integration
def test_closed_iterator_ends_its_process_first(shards: list[Path], tmp_path: Path) -> None:
    """Also a process that waits until a batch is taken, which PyTorch gives ten seconds."""
    [loader] = cluster(shards, tmp_path).loaders(decode_workers=1)
    batches = iter(loader)
    next(batches)
    time.sleep(1)  # by now it waits
    del batches
    assert not torch.multiprocessing.active_children()


def test_process_of_the_loader_ends_only_at_the_trainers_sigterm(
    shards: list[Path], tmp_path: Path
) -> None:
    """Slurm sends it to all processes, and the trainer needs batches until it has stopped."""
    [loader] = cluster(shards, tmp_path).loaders(decode_workers=1)
    batches = iter(loader)
    next(batches)
    [process] = torch.multiprocessing.active_children()
    subprocess.run(["kill", "-TERM", str(process.pid)], check=True)
    for _ in range(2 * FIRST_DEPTH):
        next(batches)
    process.terminate()
    process.join(DEADLINE)
    assert process.exitcode == 0


def test_random_numbers_are_a_function_of_sample_and_epoch(tmp_path: Path) -> None:
    """The replacement of a bad sample has its own numbers; another epoch has others."""
    samples = {f"{number}": sample(number) for number in range(6)}
    samples["2"]["png"] = b"no image"
    write_shard(tmp_path / "a.tar", samples)
    config = replace(DATA_CONFIG, max_bad_fraction=1.0)
    [loader] = Cluster([tmp_path], 1, tmp_path / "scan").loaders(config=config, rng=RNG)
    timesteps = []
    for number, batch in enumerate(take_batches(loader, 6)):
        epoch = number // 3
        timesteps += batch.timestep_uniform.tolist()
        assert batch.noise.shape == (2, 2, 3, 4, 4)
        assert np.array_equal(
            batch.timestep_uniform, RNG.uniform(Purpose.TIMESTEP, epoch, batch.origins)
        )
        assert np.array_equal(
            batch.dropout_uniform, RNG.uniform(Purpose.CAPTION_DROPOUT, epoch, batch.origins)
        )
        for row, origin in enumerate(batch.origins):
            expected = torch.empty(2, 3, 4, 4)
            RNG.fill_normal(expected, epoch, *origin)
            assert torch.equal(batch.noise[:, row], expected)
    assert len(set(timesteps[:6]) & set(timesteps[6:])) == 0


@pytest.mark.slow
@pytest.mark.parametrize("steps", range(0, 20, 3))
def test_bucketed_loader_resumes_exactly(pictures: list[Path], tmp_path: Path, steps: int) -> None:
    node = cluster(pictures, tmp_path)
    options: dict[str, Any] = {"config": BUCKETED, "batch_size": 3, "resolution": 16}
    [uninterrupted] = node.loaders(**options)
    batches = take_batches(uninterrupted, 24)
    [interrupted] = node.loaders(**options)
    take_batches(interrupted, steps)
    [resumed] = node.loaders(**options, state=interrupted.state_bytes())
    for batch, expected in zip(take_batches(resumed, 24 - steps), batches[steps:], strict=True):
        assert batch.captions == expected.captions
        assert torch.equal(batch.pixels, expected.pixels)


def test_bucketed_batch_has_the_shape_of_its_images(pictures: list[Path], tmp_path: Path) -> None:
    [loader] = cluster(pictures, tmp_path).loaders(config=BUCKETED, batch_size=2, resolution=16)
    shapes = aspect_shapes(16)
    shape_numbers = nearest_shape(shapes, [16, 32, 16, 16, 40], [16, 16, 30, 18, 16])
    batches = rest_of_epoch(loader)
    assert len({tuple(batch.pixels.shape) for batch in batches}) > 2
    for batch in batches:
        numbers = [int(caption.split()[1]) for caption in batch.captions]
        assert {shapes[shape_numbers[number % 5]] for number in numbers} == {
            tuple(batch.pixels.shape[1:3])
        }


@given(st.integers(4, 40).map(lambda side: side * 32))
def test_aspect_shapes_have_equal_area_and_divisible_sides(resolution: int) -> None:
    shapes = aspect_shapes(resolution)
    step = min(64, resolution // 4)
    assert shapes[0] == (resolution, resolution)
    for height, width in shapes:
        assert height * width <= resolution**2
        assert (height, width) == (resolution, resolution) or not (height % step or width % step)
        assert max(height, width) <= 2 * min(height, width)
        assert (width, height) in shapes


def test_buckets_without_image_sizes_raise(shards: list[Path], tmp_path: Path) -> None:
    [unindexed] = cluster(shards, tmp_path / "a", indexed=False).loaders(config=BUCKETED)
    index = tmp_path / "without-sizes.parquet"
    write_index(index, [scan_shard(path) for path in shards])
    channels = distribute_shards(shards, 1, tmp_path / "b")
    [unsized] = Cluster(channels, 1, tmp_path, index).loaders(config=BUCKETED)
    for loader in (unindexed, unsized):
        with pytest.raises(DataError, match="sm-train index"):
            take_batches(loader, 1)


def test_order_is_a_function_of_seed_and_epoch(shards: list[Path], tmp_path: Path) -> None:
    node = cluster(shards, tmp_path)
    [loader], [same], [other] = node.loaders(), node.loaders(), node.loaders(seed=1)
    epoch, next_epoch = rest_of_epoch(loader), rest_of_epoch(loader)
    captions = [batch.captions for batch in epoch]
    assert [batch.captions for batch in rest_of_epoch(same)] == captions
    assert [batch.captions for batch in rest_of_epoch(other)] != captions
    assert [batch.captions for batch in next_epoch] != captions
    assert caption_counts(next_epoch[:31]) <= ALL_CAPTIONS


def test_changed_seed_restarts_the_epoch_and_warns(shards: list[Path], tmp_path: Path) -> None:
    [loader] = cluster(shards, tmp_path / "a").loaders()
    take_batches(loader, 3)
    [other] = cluster(shards, tmp_path / "b").loaders(state=loader.state_bytes(), seed=5)
    assert other.position == DataPosition(0, 0)
    assert other.reader.resume_warning == (
        "the shards, their weights or the seed changed: epoch 0 restarts"
    )


def test_changed_topology_warns(shards: list[Path], tmp_path: Path) -> None:
    [loader] = cluster(shards, tmp_path / "one").loaders()
    resumed, _ = cluster(shards, tmp_path / "two", num_nodes=2).loaders(state=loader.state_bytes())
    assert resumed.reader.resume_warning == (
        "the data topology changed from 1 nodes × 1 ranks × batch 2 to 2 × 1 × 2, or the nodes "
        "see other shards: the rest of epoch 0 is resharded"
    )


def test_sampler_state_round_trips(shards: list[Path], tmp_path: Path) -> None:
    """It is a few hundred bytes and one small number for each shard."""
    loaders = cluster(shards, tmp_path / "two", num_nodes=2).loaders()
    take_batches(loaders[0], 3)
    [resharded] = cluster(shards, tmp_path / "one").loaders(state=loaders[0].state_bytes())
    state = SamplerState.from_bytes(resharded.state_bytes())
    assert state.position == DataPosition(0, 0)
    assert [segment.steps for segment in state.finished_segments] == [3]
    assert state.finished_segments[0].topology.owner.tolist() == [0, 1, 0, 1, 0, 1, 0]
    assert state.to_bytes() == resharded.state_bytes()
    assert len(resharded.state_bytes()) < 2000


# ------------------------------------------------------------------ faults


def bad_samples(batches: list[Batch]) -> set[tuple[str, str, str]]:
    return {(bad.shard, bad.key, bad.reason) for batch in batches for bad in batch.bad_samples}


def truncate_within_sample_7(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: scan_shard(path).offsets[7] + 600])


def damage_checksum_of_sample_7(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[scan_shard(path).offsets[7] + 150] ^= 0x55
    path.write_bytes(content)


def damage_image_of_sample_7(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[scan_shard(path).offsets[7] + 520] ^= 0x55
    path.write_bytes(content)


def empty_file(path: Path) -> None:
    path.write_bytes(b"")


def make_unreadable(path: Path) -> None:
    """Let every read fail with EIO: nothing is mapped at these addresses of the process."""
    path.unlink()
    path.symlink_to("/proc/self/mem")


KEYS = {f"{number:04d}" for number in range(20)}


@pytest.mark.parametrize(
    ("inject_fault", "lost", "reason"),
    [
        (truncate_within_sample_7, KEYS - {f"{n:04d}" for n in range(7)}, "tar-truncated"),
        (empty_file, KEYS, "tar-truncated"),
        (damage_checksum_of_sample_7, {"0007"}, "tar-damaged"),
        (damage_image_of_sample_7, {"0007"}, "image-corrupt"),
        (Path.unlink, KEYS, "shard-missing"),
        (make_unreadable, KEYS, "read-error"),
    ],
)
def test_damage_costs_only_the_samples_it_touches(
    tmp_path: Path, inject_fault: Callable[[Path], None], lost: set[str], reason: str
) -> None:
    """The shard changes after it was indexed, under a running job."""
    folder = tmp_path / "shards"
    write_shards(folder, shards=2, each=20)
    write_folder_index(folder)
    cluster = Cluster([folder], 1, tmp_path / "scan", tmp_path / "index.parquet")
    [loader] = cluster.loaders(replace(DATA_CONFIG, max_bad_fraction=1.0))
    inject_fault(folder / "shard-000.tar")
    batches = rest_of_epoch(loader)
    assert len(batches) == 20
    assert {bad.reason for batch in batches for bad in batch.bad_samples} == {reason}
    assert sum(len(batch.bad_samples) for batch in batches) == len(lost)
    expected = {f"a grey of {number}" for number in range(40)} - {
        f"a grey of {int(key)}" for key in lost
    }
    assert set(caption_counts(batches)) == expected
    assert sum(np.count_nonzero(~batch.is_new) for batch in batches) == len(lost)


@pytest.mark.parametrize(
    ("inject_fault", "samples_left"),
    [(truncate_within_sample_7, 27), (empty_file, 20), (damage_checksum_of_sample_7, 39)],
)
def test_scanning_reports_damage_and_keeps_intact_samples(
    tmp_path: Path, inject_fault: Callable[[Path], None], samples_left: int
) -> None:
    folder = tmp_path / "shards"
    write_shards(folder, shards=2, each=20)
    inject_fault(folder / "shard-000.tar")
    node = Cluster([folder], 1, tmp_path / "scan")
    [(_, catalog)] = node.build_catalogs()
    assert {shard for shard, _ in catalog.damage} == {"shard-000.tar"}
    [loader] = node.loaders()
    batches = rest_of_epoch(loader)
    assert len(caption_counts(batches)) == samples_left
    reasons = {bad.reason for batch in batches for bad in batch.bad_samples}
    assert reasons <= {"caption-missing", "image-missing"}


def test_replacements_are_equal_in_every_run(tmp_path: Path) -> None:
    folder = tmp_path / "shards"
    write_shards(folder, shards=2, each=20)
    damage_image_of_sample_7(folder / "shard-000.tar")
    node = Cluster([folder], 1, tmp_path / "scan")
    inline, threaded = (
        [batch.captions for batch in rest_of_epoch(node.loaders(decode_workers=workers)[0])]
        for workers in (0, 2)
    )
    assert inline == threaded


def test_node_without_shards_stops_all_ranks(tmp_path: Path) -> None:
    write_shards(tmp_path / "a", shards=1, each=4)
    (tmp_path / "b").mkdir()
    with pytest.raises(DataError, match=r"^algo-2: no \.tar in the train channel"):
        Cluster([tmp_path / "a", tmp_path / "b"], 2, tmp_path / "scan").build_catalogs()


def test_replicated_shard_is_split_between_nodes(tmp_path: Path) -> None:
    """With FullyReplicated, nodes split the samples inside the shard."""
    write_shards(tmp_path / "a", shards=1, each=21)
    loaders = Cluster([tmp_path / "a"] * 2, 2, tmp_path / "scan").loaders(batch_size=1)
    counts = sum((caption_counts(rest_of_epoch(loader)) for loader in loaders), Counter[str]())
    assert set(counts) == {f"a grey of {number}" for number in range(21)}
    assert counts.total() == 24 == loaders[0].epoch_size().repeated + 21


def test_shards_without_samples_stop_all_ranks(tmp_path: Path) -> None:
    write_shard(tmp_path / "a.tar", {})
    with pytest.raises(DataError, match=r"algo-1: no readable sample in a\.tar"):
        Cluster([tmp_path], 1, tmp_path / "scan").build_catalogs()


@pytest.mark.parametrize("decode_workers", [0, 2])
def test_only_bad_samples_raise(tmp_path: Path, decode_workers: int) -> None:
    write_shard(tmp_path / "a.tar", {"0": {"png": b"no picture", "txt": b"x"}})
    node = Cluster([tmp_path], 1, tmp_path / "scan")
    [loader] = node.loaders(decode_workers=decode_workers)
    with pytest.raises(DataError, match=r"a\.tar: image-corrupt.*none of 64 replacement samples"):
        take_batches(loader, 1)


def test_index_of_other_shards_stops_all_ranks(tmp_path: Path) -> None:
    write_shards(tmp_path / "shards", shards=1, each=4)
    write_folder_index(tmp_path / "shards")
    write_shards(tmp_path / "shards", shards=3, each=4)
    node = Cluster([tmp_path / "shards"], 1, tmp_path / "scan", tmp_path / "index.parquet")
    with pytest.raises(DataError, match=r"2 shards .* not in the index, shard-001\.tar among"):
        node.build_catalogs()


def test_a_streamed_shard_may_not_be_in_the_index_yet(tmp_path: Path) -> None:
    """Its images are trained on when the next job starts."""
    write_shards(tmp_path / "shards", shards=2, each=4)
    write_folder_index(tmp_path / "shards")
    shutil.copy(tmp_path / "shards" / "shard-001.tar", tmp_path / "shards/streamed-000000.tar")
    node = Cluster([tmp_path / "shards"], 1, tmp_path / "scan", tmp_path / "index.parquet")
    [(_, catalog)] = node.build_catalogs()
    assert catalog.shard_sizes.tolist() == [4, 4]


def test_damaged_index_stops_all_ranks(tmp_path: Path) -> None:
    write_shards(tmp_path / "shards", shards=2, each=4)
    (tmp_path / "index.parquet").write_bytes(b"PAR1 no more")
    nodes = Cluster([tmp_path / "shards"] * 2, 1, tmp_path / "scan", tmp_path / "index.parquet")
    with pytest.raises(DataError, match=r"not a shard index.*`sm-train index` again"):
        nodes.build_catalogs()


def test_unusual_names_are_ordinary_samples(tmp_path: Path) -> None:
    """A repeated key, keys with dots and slashes, and a path that tries to leave the folder."""
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
    before = set(tmp_path.rglob("*"))
    [loader] = Cluster([folder], 1, tmp_path / "scan").loaders(batch_size=1)
    expected = Counter(f"a grey of {number}" for number in range(len(names)))
    assert caption_counts(rest_of_epoch(loader)) == expected
    new = set(tmp_path.rglob("*")) - before
    assert {path.relative_to(tmp_path).parts[0] for path in new} == {"scan"}


@pytest.mark.slow
def test_too_large_images_are_rejected_by_their_header(tmp_path: Path) -> None:
    """A decompression bomb of 1 gigapixel in a few kilobytes; 100 megapixels are decoded."""
    content = io.BytesIO()
    Image.new("1", (40_000, 25_000)).save(content, "PNG")
    samples = {f"{number}": sample(number) for number in range(4)}
    samples["bomb"] = {"png": content.getvalue(), "txt": b"a bomb"}
    large = io.BytesIO()
    Image.new("L", (10_000, 10_000), 77).save(large, "JPEG", quality=30)
    samples["large"] = {"jpg": large.getvalue(), "txt": b"large"}
    write_shard(tmp_path / "a.tar", samples)
    [loader] = Cluster([tmp_path], 1, tmp_path / "scan").loaders(batch_size=1)
    before = psutil.Process().memory_info().rss
    batches = rest_of_epoch(loader)
    assert bad_samples(batches) == {("a.tar", "bomb", "image-bomb")}
    decoded = next(
        batch for batch in batches if batch.captions == ["large"] and not batch.bad_samples
    )
    assert decoded.pixels.float().mean() == pytest.approx(77, abs=2)
    assert psutil.Process().memory_info().rss - before < 400e6


def test_missing_and_invalid_members_have_their_reason(tmp_path: Path) -> None:
    samples = {f"{number}": sample(number) for number in range(8)}
    samples["2"]["txt"] = b"\xff\xfe not UTF-8"
    del samples["3"]["txt"]
    del samples["4"]["png"]
    write_shard(tmp_path / "a.tar", samples)
    [loader] = Cluster([tmp_path], 1, tmp_path / "scan").loaders()
    assert bad_samples(rest_of_epoch(loader)) == {
        ("a.tar", "2", "caption-not-utf8"),
        ("a.tar", "3", "caption-missing"),
        ("a.tar", "4", "image-missing"),
    }


def batch_with_bad(size: int, num_bad: int) -> Batch:
    bad = tuple(
        BadSample("rotten.tar", str(number), "image-corrupt", "x") for number in range(num_bad)
    )
    empty = np.zeros(0)
    return Batch(torch.zeros(1), ["x"] * size, DataPosition(), bad, 0, (), (), empty, empty)


def test_too_many_bad_samples_raise() -> None:
    tracker = BadSampleTracker(0.01)
    tracker.add(batch_with_bad(2000, 20))
    with pytest.raises(
        DataError, match=r"21 of 2001 .*\(image-corrupt 21\), in rotten\.tar.*max_bad_fraction"
    ):
        tracker.add(batch_with_bad(1, 1))
    BadSampleTracker(0.01).add(batch_with_bad(10, 10))
    BadSampleTracker(0.5).add(batch_with_bad(100, 49))


def test_bad_samples_are_reported_once_with_reasons() -> None:
    tracker = BadSampleTracker(0.5)
    assert tracker.report() is None
    tracker.add(batch_with_bad(100, 7))
    report = tracker.report()
    assert report is not None
    assert report[0].startswith("skipped 7 samples (image-corrupt 7): rotten.tar 0: x; ")
    assert report[1] == {"image-corrupt": 7}
    assert tracker.report() is None


# ------------------------------------------------------------------ prefetching and memory


def test_waiting_trainer_increases_prefetch_depth(tmp_path: Path) -> None:
    noise = np.random.default_rng(0).integers(0, 255, (700, 700, 3), np.uint8)
    content = io.BytesIO()
    Image.fromarray(noise).save(content, "PNG")
    write_shard(
        tmp_path / "a.tar",
        {str(number): {"png": content.getvalue(), "txt": b"x"} for number in range(40)},
    )
    [loader] = Cluster([tmp_path], 1, tmp_path / "scan").loaders(decode_workers=1, resolution=64)
    assert loader.prefetch_depth == FIRST_DEPTH
    take_batches(loader, 12)
    assert loader.prefetch_depth > FIRST_DEPTH


@pytest.mark.parametrize("decode_workers", [0, 2])
def test_kept_tensors_are_never_overwritten(
    shards: list[Path], tmp_path: Path, decode_workers: int
) -> None:
    """Buffers are reused, but not while a tensor or a view of one refers to them."""
    [loader] = cluster(shards, tmp_path).loaders(decode_workers=decode_workers)
    kept = []
    for number, batch in zip(range(60), loader, strict=False):
        if number % 3:
            kept.append((batch.pixels[1], batch.captions[1]))
    assert len(kept) == 40
    for pixels, caption in kept:
        assert pixels.unique().tolist() == [int(caption.split()[-1])]


@pytest.mark.parametrize("decode_workers", [0, 2])
def test_buffers_of_dropped_batches_are_reused(
    shards: list[Path], tmp_path: Path, decode_workers: int
) -> None:
    [loader] = cluster(shards, tmp_path).loaders(decode_workers=decode_workers)
    addresses = {batch.pixels.data_ptr() for _, batch in zip(range(60), loader, strict=False)}
    # Those made ahead, two that are being decoded, and two that the loop above holds.
    assert len(addresses) <= (loader.prefetch_depth + 4 if decode_workers else 2)


# ------------------------------------------------------------------ precomputed latents


def write_latents(folder: Path, missing: str | None = None) -> Path:
    """Write a shard with moments and text states for 8 pixels, as ``pack --latents`` does.

    One sample lacks the member ``missing``. Returns the index.
    """
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
    options["latents"] |= vars(DATA_CONFIG.color)
    write_index(index, [scan_shard(folder / "a.tar")], options=options)
    return index


@pytest.mark.parametrize("decode_workers", [0, 1])
def test_latents_are_used_at_their_resolution_only(tmp_path: Path, decode_workers: int) -> None:
    index = write_latents(tmp_path / "shards")
    node = Cluster([tmp_path / "shards"], 1, tmp_path / "scan", index)
    [loader] = node.loaders(decode_workers=decode_workers)
    for batch in rest_of_epoch(loader):
        assert batch.moments is not None
        assert batch.text is not None
        numbers = [int(caption.split()[-1]) for caption in batch.captions]
        assert batch.moments[:, 0, 0, 0].tolist() == numbers
        assert batch.text[:, -1, -1].tolist() == numbers
        assert tuple(batch.moments.shape) == (2, 8, 2, 2)
        assert len(batch.pixels[0]) == 0
    [other] = node.loaders(resolution=4)
    [batch] = take_batches(other, 1)
    assert batch.moments is None
    assert tuple(batch.pixels.shape) == (2, 4, 4, 3)


def test_latents_of_another_color_policy_are_refused(tmp_path: Path) -> None:
    """A description without a policy means that pixels were taken as stored."""
    index = write_latents(tmp_path / "shards")
    described = ShardIndex(index).header.options["latents"]
    del described["icc_profile"], described["hdr"]
    shards = [scan_shard(tmp_path / "shards" / "a.tar")]
    write_index(index, shards, options={"latents": described})
    node = Cluster([tmp_path / "shards"], 1, tmp_path / "scan", index)
    with pytest.raises(DataError) as raised:
        node.loaders()
    assert "encoded with icc_profile: ignore, hdr: keep, and the run has icc_profile: srgb" in str(
        raised.value
    )
    assert "`sm-train pack SRC DST --latents MODEL --resolution 8 --icc-profile srgb" in str(
        raised.value
    )
    as_stored = replace(DATA_CONFIG, icc_profile="ignore", hdr="keep")
    [loader] = node.loaders(config=as_stored)
    assert next(iter(loader)).moments is not None
    # Images of another resolution are decoded, whatever the latents are of.
    assert node.loaders(resolution=4)


@pytest.mark.parametrize("missing", ["moments.npy", "text.npy"])
def test_sample_without_latents_is_bad(tmp_path: Path, missing: str) -> None:
    index = write_latents(tmp_path / "shards", missing)
    [loader] = Cluster([tmp_path / "shards"], 1, tmp_path / "scan", index).loaders()
    assert bad_samples(rest_of_epoch(loader)) == {("a.tar", "3", "latents-missing")}


def test_pixels_are_those_of_the_image(tmp_path: Path) -> None:
    write_shard(tmp_path / "a.tar", {"0": {"png": png(123), "txt": b"x"}})
    [loader] = Cluster([tmp_path], 1, tmp_path / "scan").loaders(batch_size=1)
    [batch] = take_batches(loader, 1)
    assert batch.pixels.dtype == torch.uint8
    assert batch.pixels.unique().tolist() == [123]
