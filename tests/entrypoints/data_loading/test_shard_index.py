"""The shard index: it reads as it was written, and damage is detected."""

from __future__ import annotations

import io
import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sm_train.entrypoints.shards import shard_index
from sm_train.entrypoints.shards.shard_format import Shard, ShardError
from sm_train.entrypoints.shards.shard_index import (
    VERSION,
    IndexHeader,
    IndexWriter,
    RejectedInput,
    ShardIndex,
    write_index,
)

from tests.support.cluster.training_jobs import sample, write_shard
from tests.support.data_channels import Cluster, write_folder_index

DIGEST = "0123456789abcdef" * 4


def make_shard(name: str, lengths: list[int], *, sizes: bool = True) -> Shard:
    offsets = [0, *np.cumsum(lengths).tolist()]
    keys = tuple(f"{name}/{number:05d}" for number in range(len(lengths)))
    widths = tuple(range(1, len(lengths) + 1)) if sizes else ()
    return Shard(name, offsets[-1] + 1024, DIGEST, keys, tuple(offsets), widths, widths)


names = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=12)
shards = st.lists(
    st.builds(make_shard, names, st.lists(st.integers(0, 2**33), max_size=9), sizes=st.booleans()),
    max_size=12,
)
rejections = st.lists(st.builds(RejectedInput, names, names, names), max_size=5)


@settings(max_examples=60, deadline=None)
@given(shards, rejections, st.integers(1, 20), st.integers(1, 5))
def test_index_round_trips(
    tmp_path_factory: pytest.TempPathFactory,
    shards: list[Shard],
    rejected: list[RejectedInput],
    group_samples: int,
    group_rows: int,
) -> None:
    path = tmp_path_factory.mktemp("index") / "index.parquet"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shard_index, "GROUP_SAMPLES", group_samples)
        patch.setattr(shard_index, "GROUP_ROWS", group_rows)
        write_index(path, shards, rejected, target_bytes=8000, inputs="d", options={"quality": 90})
    index = ShardIndex(path)
    assert [index.shard(number) for number in range(len(index))] == shards
    assert list(index.rejected()) == rejected
    assert index.names == [shard.name for shard in shards]
    assert index.samples.tolist() == [shard.samples for shard in shards]
    assert index.header == IndexHeader(
        shards=len(shards),
        samples=sum(shard.samples for shard in shards),
        bytes=sum(shard.bytes for shard in shards),
        rejected=len(rejected),
        target_bytes=8000,
        inputs="d",
        options={"quality": 90},
    )
    unpickled: ShardIndex = pickle.loads(pickle.dumps(index))
    assert unpickled.names == index.names


def test_equal_content_gives_equal_bytes(tmp_path: Path) -> None:
    rows = [make_shard(f"{number:03d}.tar", [512, 1024]) for number in range(50)]
    for name in ("a", "b"):
        write_index(tmp_path / name, iter(rows), [RejectedInput("x", "y", "z")])
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_names_that_are_not_utf8_are_escaped_or_rejected(tmp_path: Path) -> None:
    write_index(tmp_path / "i", [], [RejectedInput("bad \udcff.jpg", "image-corrupt", "truncated")])
    [rejected] = ShardIndex(tmp_path / "i").rejected()
    assert rejected.source == r"bad \udcff.jpg"
    with pytest.raises(ShardError, match="rename the shard"):
        write_index(tmp_path / "i", [make_shard("a\udcff.tar", [512])])


def foreign_parquet(**metadata: str) -> bytes:
    content = io.BytesIO()
    table = pa.table({"name": ["a"]}).replace_schema_metadata(metadata)
    pq.write_table(table, content)
    return content.getvalue()


def header(**fields: object) -> str:
    return json.dumps({"format": "sm-train-index", "version": VERSION, **fields})


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "not a shard index"),
        (b"not parquet", "not a shard index"),
        (foreign_parquet(), "not a shard index"),
        (foreign_parquet(**{"sm-train": "[1]"}), "not a shard index"),
        (foreign_parquet(**{"sm-train": "[" * 100_000}), "not a shard index"),
        (foreign_parquet(**{"sm-train": header(other=1)}), "damaged"),
        (foreign_parquet(**{"sm-train": header(shards="2")}), "damaged"),
        (foreign_parquet(**{"sm-train": header(samples=-1)}), "damaged"),
        (
            foreign_parquet(**{"sm-train": json.dumps({"format": "sm-train-index", "version": 7})}),
            f"index version 7; this sm-train reads version {VERSION}: run `sm-train index`",
        ),
    ],
)
def test_other_file_is_not_an_index(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "index.parquet"
    path.write_bytes(content)
    with pytest.raises(ShardError) as error:
        ShardIndex(path)
    assert str(error.value).startswith(f"{path}: {message}")
    assert "\n" not in str(error.value)


def test_truncation_is_detected_anywhere(tmp_path: Path) -> None:
    path = tmp_path / "index.parquet"
    write_index(path, [make_shard("a", [512] * 4)], [RejectedInput("a", "b", "c")])
    content = path.read_bytes()
    for length in range(0, len(content), 7):
        path.write_bytes(content[:length])
        with pytest.raises(ShardError, match=r"index\.parquet"):
            ShardIndex(path)


def test_damaged_offsets_are_detected(tmp_path: Path) -> None:
    path = tmp_path / "index.parquet"
    write_index(path, [make_shard("a", [512] * 4000)])
    column: Any = pq.ParquetFile(path).metadata.row_group(0).column(4)
    content = bytearray(path.read_bytes())
    content[column.data_page_offset + column.total_compressed_size - 9] ^= 0xFF
    path.write_bytes(content)
    index = ShardIndex(path)
    with pytest.raises(ShardError, match="damaged"):
        index.offsets(0)


def test_unfinished_index_cannot_be_read(tmp_path: Path) -> None:
    path = tmp_path / "index.parquet"

    def interrupt_writing() -> None:
        with path.open("wb") as file, IndexWriter(file) as writer:
            writer.add(make_shard("a", [512]))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupt_writing()
    with pytest.raises(ShardError, match="not a shard index"):
        ShardIndex(path)


def test_data_digest_covers_the_content_of_the_shards(tmp_path: Path) -> None:
    """Two packs of different pictures with equal names and counts are different data."""
    catalogs = []
    for number, color in enumerate((0, 50)):
        folder = tmp_path / str(number) / "shards"
        folder.mkdir(parents=True)
        write_shard(folder / "a.tar", {f"{n:04d}": sample(color + n) for n in range(4)})
        for index in (write_folder_index(folder), None):
            [(_, catalog)] = Cluster([folder], 1, tmp_path / "scan", index).build_catalogs()
            catalogs.append(catalog)
    first, first_scanned, second, second_scanned = catalogs
    assert first.digest != second.digest
    assert first.digest_covers == "content"
    assert first_scanned.digest == second_scanned.digest
    assert first_scanned.digest_covers == "names and sample counts of the shards"
