"""Writes shards with the product's own writer."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import sm_train
from sm_train.entrypoints.data_prep.packing.plan import sample_key
from sm_train.entrypoints.shards.shard_format import Shard
from sm_train.entrypoints.shards.shard_writer import ShardWriter, sample_parts
from sm_train.entrypoints.storage.storage import LocalFolder

from tests.support.image_files import image_bytes


def encoded_sample(
    number: int, image: bytes, caption: str = "a caption", image_format: str = "jpeg"
) -> bytes:
    """Return the tar members of one sample."""
    parts = sample_parts(sample_key(number), image, caption, image_format, b'{"width": 48}')
    return b"".join(parts)


def write_packed_shard(folder: Path, samples: list[bytes], name: str = "shard-000000.tar") -> Shard:
    """Write encoded samples as a shard; return what the writer recorded for the index."""
    with LocalFolder(folder).atomic_writer(name) as sink, ShardWriter(sink, name) as file:
        for number, content in enumerate(samples):
            file.append(sample_key(number), content)
        return file.finish()


def expiring_index(folder: Path, rows: Sequence[tuple[str | None, str]]) -> bytes:
    """Return the index of ``expiring-pack``, whose samples have these expiries and owners."""
    source = folder / "expiring"
    source.mkdir(parents=True)
    with (source / "list.jsonl").open("w") as table:
        for number, (expiry, owner) in enumerate(rows):
            (source / f"{number}.jpg").write_bytes(image_bytes(number))
            row = {"image": f"{number}.jpg", "caption": "x", "expiry": expiry, "owner": owner}
            table.write(json.dumps(row) + "\n")
    sm_train.pack(source / "list.jsonl", folder / "expiring-pack", index_column=("expiry", "owner"))
    return (folder / "expiring-pack/index.parquet").read_bytes()
