"""The steps that saw a sample are those in which the loaders read it."""

from __future__ import annotations

import json
import tarfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from PIL import Image
from sm_train.entrypoints.data_loading.loader import Loader
from sm_train.entrypoints.data_loading.shard_catalog import ShardCatalog, mix_catalogs
from sm_train.entrypoints.job_interface.job_config import DataSource
from sm_train.entrypoints.lineage.data_record import (
    Anchor,
    ChannelRecord,
    DataRecord,
    RecordError,
    ShardTable,
    decode_record,
    decode_shards,
    encode_shards,
)
from sm_train.entrypoints.lineage.replacements import (
    SUFFIX,
    ReplacementNotes,
    ReplacementsFile,
    decode_replacements,
)
from sm_train.entrypoints.shards.shard_index import ShardIndex
from sm_train.entrypoints.storage.store import S3Access
from sm_train.toolkit.data_prep.lineage.recorded_shards import RecordedIndexes
from sm_train.toolkit.data_prep.lineage.seen_steps import Attempt, Place, seen_steps
from sm_train.toolkit.data_prep.packing.pack import PackJob, pack
from sm_train.toolkit.data_prep.packing.shard_set import find_shard_set
from sm_train.toolkit.data_prep.packing.tables import TableOptions
from sm_train.toolkit.data_prep.removal.remove_samples import plan_removal, remove_samples

from tests.conftest import Mount
from tests.entrypoints.data_loading.webdataset_reader_support import write_channel
from tests.support.data_channels import DATA_CONFIG, Cluster, distribute_shards

ACCUMULATION = 2
SHARDS, EACH = 3, 20


@dataclass
class Reading:
    """A stage that is read by loaders, step by step; ``seen`` has the steps of each sample."""

    channel: Path
    folder: Path
    sources: tuple[DataSource, ...] = ()
    index: Path | None = None
    where: str | None = None
    seen: dict[tuple[str, str], list[int]] = field(default_factory=dict)
    attempts: list[Attempt] = field(default_factory=list)
    notes: list[ReplacementNotes] = field(default_factory=list)
    file: ReplacementsFile | None = None
    step: int = 0
    state: bytes | None = None
    digest: str = ""

    def start(self, channels: Sequence[Path], ranks: int, **options: Any) -> list[Loader]:
        """Open the loaders of an attempt, and record its start."""
        scan = self.folder / f"{len(self.attempts)}"
        cluster = Cluster(channels, ranks, scan, self.index, self.where)
        catalogs = cluster.build_catalogs()
        tables = {"train": _table(catalogs[0][1])}
        digest = self.digest = catalogs[0][1].digest
        if self.sources:
            mixed = [
                (rank, mix_catalogs([catalog] * len(self.sources), self.sources))
                for rank, catalog in catalogs
            ]
            tables = {source.channel: tables["train"] for source in self.sources}
            catalogs = mixed
        buckets = options.pop("aspect_buckets", False)
        config = replace(
            DATA_CONFIG, sources=self.sources, aspect_buckets=buckets, max_bad_fraction=0.9
        )
        loaders = cluster.open(catalogs, config, state=self.state, **options)
        weights = {source.channel: source.weight for source in self.sources}
        records = tuple(
            ChannelRecord(
                *(name, None if self.index is None else str(self.index), digest, "content"),
                *(None, self.where, weights.get(name)),
            )
            for name in tables
        )
        record = DataRecord(
            *("run", "8px", None, "indexed", "d", records, ACCUMULATION),
            (Anchor(0, self.step, 0, f"2026-01-0{len(self.attempts) + 1}T00:00:00+00:00"),),
            "shards.parquet",
            loaders[0].state_bytes(),
        )
        decoded = decode_shards(encode_shards(tables), list(tables))
        self.attempts.append(Attempt(decode_record(record.encode(), "r"), decoded))
        self.notes = [ReplacementNotes() for _ in loaders]
        self.file = ReplacementsFile(self.folder / f"{len(self.attempts)}{SUFFIX}")
        return loaders

    def train(self, batches: Sequence[Any], steps: int, *, counted: bool = True) -> None:
        """Take optimizer steps; those that are not ``counted`` are dropped later."""
        for _ in range(steps):
            self.step += 1
            for _ in range(ACCUMULATION):
                for rank, notes in zip(batches, self.notes, strict=True):
                    batch = next(rank)
                    notes.add(batch)
                    for name in batch.names:
                        shard, _, key = name.rpartition(" ")
                        if counted:
                            self.seen.setdefault((shard, key), []).append(self.step)
        self.save_replacements()

    def save_replacements(self) -> None:
        """Append what the present attempt has replaced to its file, and read the file."""
        assert self.file is not None
        rows = [row for notes in self.notes for row in notes.take()]
        self.file.append(self.step, self.notes[0].batches, rows)
        replacements = decode_replacements(self.file.path.read_bytes(), "r")
        self.attempts[-1] = replace(self.attempts[-1], replacements=replacements)

    def require_agreement(self, until: int) -> None:
        """Compare the steps of every sample."""
        channels = [source.channel for source in self.sources] or ["train"]
        for channel in channels:
            for number in range(SHARDS * EACH):
                shard, sample = divmod(number, EACH)
                name = f"{channel}/{shard}.tar" if self.sources else f"{shard}.tar"
                place = Place(channel, f"{shard}.tar", sample)
                found = seen_steps(self.attempts, place, until, None)
                expected = sorted(set(self.seen.get((name, f"{shard}-{sample}"), [])))
                assert (list(found.steps), found.exact) == (expected, True), (name, sample)


def _table(catalog: ShardCatalog) -> ShardTable:
    names = catalog.names if isinstance(catalog.names, list) else catalog.names.to_pylist()
    return ShardTable(names, catalog.shard_sizes)


@pytest.fixture
def channel(tmp_path: Path) -> Path:
    return write_channel(tmp_path / "shards", SHARDS)


@pytest.mark.slow
@pytest.mark.parametrize("order", ["rank", "global"])
@pytest.mark.parametrize("ranks", [1, 3])
def test_steps_are_those_that_loaders_read(
    channel: Path, tmp_path: Path, ranks: int, order: str
) -> None:
    """For several epochs, whose last batches are padded with samples that were read before."""
    options = {"gradient_accumulation_steps": ACCUMULATION} if order == "global" else {}
    reading = Reading(channel, tmp_path)
    loaders = reading.start([channel], ranks, batch_size=4, **options)
    reading.train([iter(loader) for loader in loaders], 20)
    reading.require_agreement(20)


def test_nodes_that_see_different_shards(channel: Path, tmp_path: Path) -> None:
    shards = sorted(channel.iterdir())
    channels = distribute_shards(shards, 2, tmp_path / "nodes")
    reading = Reading(channel, tmp_path)
    loaders = reading.start(channels, 2, batch_size=3)
    reading.train([iter(loader) for loader in loaders], 17)
    reading.require_agreement(17)


def test_a_mixture_has_copies_of_its_sources(channel: Path, tmp_path: Path) -> None:
    sources = (DataSource("train", 1.0), DataSource("art", 3.0))
    reading = Reading(channel, tmp_path, sources)
    loaders = reading.start([channel], 2, batch_size=3)
    reading.train([iter(loader) for loader in loaders], 40)
    reading.require_agreement(40)


def test_what_a_later_attempt_repeats_counts_once(channel: Path, tmp_path: Path) -> None:
    """An attempt resumes at step 6 of the first one's 9, on another number of ranks."""
    reading = Reading(channel, tmp_path)
    loaders = reading.start([channel], 1, batch_size=3)
    batches = [iter(loader) for loader in loaders]
    reading.train(batches, 6)
    reading.state = loaders[0].state_bytes()
    reading.train(batches, 3, counted=False)
    reading.step = 6
    later = reading.start([channel], 3, batch_size=2)
    reading.train([iter(loader) for loader in later], 11)
    reading.require_agreement(17)


def test_a_rollback_continues_with_the_next_data(channel: Path, tmp_path: Path) -> None:
    """Steps 5 to 8 are dropped; the step after them is step 5 again, with other samples."""
    reading = Reading(channel, tmp_path)
    batches = [iter(loader) for loader in reading.start([channel], 2, batch_size=2)]
    reading.train(batches, 4)
    reading.train(batches, 4, counted=False)
    reading.step = 4
    [attempt] = reading.attempts
    anchors = (*attempt.record.anchors, Anchor(8 * ACCUMULATION, 4, 0, "2026-01-01T01:00:00+00:00"))
    reading.attempts = [replace(attempt, record=replace(attempt.record, anchors=anchors))]
    reading.train(batches, 7)
    reading.require_agreement(11)


@pytest.mark.slow
@pytest.mark.parametrize("order", ["rank", "global"])
@pytest.mark.parametrize("mixed", [False, True])
def test_samples_that_take_the_places_of_bad_ones_are_found(
    channel: Path, tmp_path: Path, mixed: bool, order: str
) -> None:
    """A fifth of the samples is damaged: these are in no step, and others are in more steps."""
    damage(channel)
    sources = (DataSource("train", 1.0), DataSource("art", 2.0)) if mixed else ()
    options = {"gradient_accumulation_steps": ACCUMULATION} if order == "global" else {}
    reading = Reading(channel, tmp_path, sources)
    loaders = reading.start([channel], 2, batch_size=3, **options)
    batches = [iter(loader) for loader in loaders]
    reading.train(batches, 9)
    reading.train(batches, 9)
    reading.require_agreement(18)
    assert len({key for _, key in reading.seen}) == SHARDS * EACH * 4 // 5
    [attempt] = reading.attempts
    assert attempt.replacements is not None
    assert len(attempt.replacements.rows) > 20


def damage(channel: Path) -> None:
    """Make the image of every fifth sample unreadable; the shards keep their sizes."""
    for shard in range(SHARDS):
        path = channel / f"{shard}.tar"
        content = bytearray(path.read_bytes())
        with tarfile.open(path) as tar:
            for member in tar:
                name, _, extension = member.name.partition(".")
                if extension == "png" and int(name.partition("-")[2]) % 5 == 0:
                    start = member.offset_data
                    content[start : start + member.size] = bytes(member.size)
        path.write_bytes(content)


def test_steps_are_exact_only_if_replacements_are_known(channel: Path, tmp_path: Path) -> None:
    """A job was killed after step 12, before the replacements after step 8 were stored."""
    reading = Reading(channel, tmp_path)
    batches = [iter(loader) for loader in reading.start([channel], 1, batch_size=3)]
    reading.train(batches, 8)
    known = reading.attempts[0]
    reading.train(batches, 4)
    place = Place("train", "1.tar", 7)
    assert seen_steps(reading.attempts, place, 12, None).exact
    assert seen_steps([known], place, 8, None).exact
    unknown = seen_steps([known], place, 12, None)
    assert unknown.steps == (1, 12)
    assert unknown.reason == "the samples that took the places of others are not recorded"
    assert not seen_steps([replace(known, replacements=None)], place, 8, None).exact


def test_a_line_that_is_cut_short_covers_nothing(tmp_path: Path) -> None:
    file = ReplacementsFile(tmp_path / "replaced")
    file.append(4, 8, [(7, 0, 1, 0, 2)])
    file.append(6, 12, [(9, 0, 3, 0, 4)])
    content = file.path.read_bytes()
    whole = decode_replacements(content, "r")
    cut = decode_replacements(content[:-1], "r")
    assert whole is not None
    assert cut is not None
    assert (whole.step, whole.batches, whole.used((0,), 3).tolist()) == (6, 12, [9])
    assert (cut.step, cut.batches, cut.used((0,), 3).tolist()) == (4, 8, [])
    assert cut.skipped((0,), 2).tolist() == [7]
    assert decode_replacements(content[:9], "r") is None
    with pytest.raises(RecordError, match=r"^r: not the replaced samples of a job: "):
        decode_replacements(b"{}\n", "r")


def test_replacements_that_find_a_full_disk_are_written_later(tmp_path: Path, mount: Mount) -> None:
    disk = mount("size=64k")
    file = ReplacementsFile(disk / "replaced")
    file.append(4, 8, [(7, 0, 1, 0, 2)])
    ballast = disk / "ballast"
    with suppress(OSError), ballast.open("wb", buffering=0) as output:
        while True:
            output.write(bytes(4096))
    rows = [(9, 0, number, 0, 4) for number in range(2000)]
    with pytest.raises(OSError, match="No space left"):
        file.append(6, 12, rows)
    known = decode_replacements(file.path.read_bytes(), "r")
    assert known is not None
    assert (known.step, len(known.rows)) == (4, 1)
    ballast.unlink()
    file.append(8, 16, [(13, 0, 1, 0, 2)])
    known = decode_replacements(file.path.read_bytes(), "r")
    assert known is not None
    assert (known.step, len(known.rows)) == (8, 2002)


@pytest.fixture
def packed(tmp_path: Path) -> Path:
    """Return a pack of images of three shapes with a column ``owner`` in its index."""
    add_images(tmp_path / "in", range(36))
    pack(pack_job(tmp_path), lambda _: None)
    return tmp_path / "out"


def add_images(folder: Path, numbers: range) -> None:
    folder.mkdir(exist_ok=True)
    with (folder / "list.jsonl").open("a") as table:
        for number in numbers:
            size = ((64, 32), (32, 64), (48, 48))[number % 3]
            Image.new("RGB", size, (number, 0, 0)).save(folder / f"{number:03}.png")
            row = {"image": f"{number:03}.png", "caption": "x", "owner": "ab"[number % 5 > 2]}
            table.write(json.dumps(row) + "\n")


def pack_job(folder: Path, **changes: Any) -> PackJob:
    table = TableOptions(index_columns=("owner",))
    source, destination = str(folder / "in" / "list.jsonl"), str(folder / "out")
    return PackJob(source, destination, None, 20_000, 1, table, **changes)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("buckets", "where", "mixed", "by_name"),
    [
        (True, None, False, True),
        (False, "owner = 'a'", False, True),
        (False, "owner = 'a'", False, False),
        (True, "owner = 'a'", False, False),
        (True, None, True, False),
        (True, "owner = 'b'", True, True),
    ],
)
def test_an_index_gives_the_order_of_buckets_and_conditions(
    packed: Path, tmp_path: Path, buckets: bool, where: str | None, mixed: bool, by_name: bool
) -> None:
    """Also after images were added and one was removed, and not after the images changed.

    The rows of an index need not be in the order of the names: shards that are appended to a
    streamed pack follow later ones.
    """
    if not by_name:
        reverse_rows(packed / "index.parquet")
    sources = (DataSource("train", 1.0), DataSource("art", 2.0)) if mixed else ()
    reading = Reading(
        packed / "shards", tmp_path, sources, index=packed / "index.parquet", where=where
    )
    options = {"batch_size": 2, "aspect_buckets": buckets, "resolution": 64}
    loaders = reading.start([packed / "shards"], 2, **options)
    batches = [iter(loader) for loader in loaders]
    reading.train(batches, 4)
    reading.state = loaders[0].state_bytes()
    later = reading.start([packed / "shards"], 3, **options)  # the rest of the epoch is resharded
    reading.train([iter(loader) for loader in later], 6)
    require_steps_by_index(reading, packed)
    add_images(tmp_path / "in", range(36, 45))
    pack(pack_job(tmp_path, append=True), lambda _: None)
    remove_one(packed, "000000021")
    require_steps_by_index(reading, packed)
    reading.attempts = [
        replace(attempt, record=replace(attempt.record, channels=changed(attempt.record)))
        for attempt in reading.attempts
    ]
    with RecordedIndexes(S3Access()) as indexes:
        place = Place("train", "shard-000000.tar", 0)
        found = seen_steps(reading.attempts, place, 10, None, indexes.shards_of)
    option = "data.aspect_buckets" if buckets else "data.where"
    digest = reading.digest
    assert found.reason == (
        f"{option}: the order depends on the index of the shards: {packed}/index.parquet gives "
        f"digest {digest}, and the job recorded another"
    )
    (packed / "index.parquet").unlink()
    with RecordedIndexes(S3Access()) as indexes:
        found = seen_steps(reading.attempts, place, 10, None, indexes.shards_of)
    assert found.reason is not None
    assert "no such index" in found.reason


def reverse_rows(path: Path) -> None:
    index = ShardIndex(path)
    rows = pa.concat_tables(index.shard_rows())
    assert len(rows) > 1
    with path.with_suffix(".new").open("wb") as file, index.rewriter(file) as writer:
        writer.add_rows(rows.take(list(reversed(range(len(rows))))))
    path.with_suffix(".new").replace(path)


def changed(record: DataRecord) -> tuple[ChannelRecord, ...]:
    return tuple(replace(channel, digest="another") for channel in record.channels)


def remove_one(packed: Path, key: str) -> None:
    shards = find_shard_set(str(packed), S3Access())
    remove_samples(plan_removal(shards, [key], None), lambda done, total: None, None)


def require_steps_by_index(reading: Reading, packed: Path) -> None:
    """Compare the steps of every sample that the attempts could read."""
    index = ShardIndex(packed / "index.parquet")
    names = reading.attempts[0].shards["train"].names
    replaced = packed / "index.parquet.replaced"
    indexes = [index, *([ShardIndex(replaced)] if replaced.exists() else [])]
    places = {
        (name, key): (name, number)
        for found in indexes
        for row, name in enumerate(found.names)
        if name in names
        for number, key in enumerate(found.keys(row))
    }
    assert len(places) == 36
    channels = [source.channel for source in reading.sources] or ["train"]
    with RecordedIndexes(S3Access()) as recorded:
        for channel in channels:
            for (shard, key), (name, number) in places.items():
                place = Place(channel, name, number)
                found_steps = seen_steps(reading.attempts, place, 10, None, recorded.shards_of)
                seen = (f"{channel}/{shard}" if reading.sources else shard, key)
                expected = sorted(set(reading.seen.get(seen, [])))
                assert (list(found_steps.steps), found_steps.exact) == (expected, True), seen


def test_random_draws_are_an_upper_bound(channel: Path, tmp_path: Path) -> None:
    reading = Reading(channel, tmp_path)
    reading.start([channel], 1, batch_size=4)
    [attempt] = reading.attempts
    record = replace(attempt.record, state=None, reader="webdataset")
    attempts = [replace(attempt, record=record)]
    found = seen_steps(attempts, Place("train", "1.tar", 7), 20, None)
    assert found.steps == (1, 20)
    assert found.reason == "data.reader: webdataset draws samples at random"
    assert seen_steps(attempts, Place("train", "9.tar", 7), 20, None).steps == ()
    assert seen_steps(attempts, Place("train", "1.tar", 7), 20, "2025-01-01").steps == ()


@pytest.mark.parametrize("content", [b"", b"[]", b"{}", b'{"version": 1}', b'{"version": 9}'])
def test_damaged_records_are_named(content: bytes) -> None:
    with pytest.raises(RecordError, match=r"^a\.json: "):
        decode_record(content, "a.json")
