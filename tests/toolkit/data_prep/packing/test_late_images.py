"""Images that a pack has rejected are packed by ``--append`` once they can be."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from sm_train.entrypoints.shards.shard_index import ShardIndex
from sm_train.toolkit.base.errors import ExitCode

from tests.conftest import Cli
from tests.support.image_files import image_bytes, write_album, write_pair


def rejected(packed: Path) -> list[tuple[str, str]]:
    index = ShardIndex(packed / "index.parquet")
    return [(item.source, item.reason) for item in index.rejected()]


def append(cli: Cli, *arguments: str) -> dict[str, Any]:
    done = cli("pack", *arguments, "out", "--append", "--json")
    assert done.returncode == ExitCode.OK, done.stderr
    document: dict[str, Any] = json.loads(done.stdout)
    return document


@pytest.mark.slow
def test_a_late_caption_and_a_repaired_image_are_packed(cli: Cli, tmp_path: Path) -> None:
    write_album(tmp_path / "in", 4, flat=True)
    (tmp_path / "in/001.txt").unlink()
    whole = (tmp_path / "in/002.jpg").read_bytes()
    (tmp_path / "in/002.jpg").write_bytes(whole[:600])
    write_pair(tmp_path / "in", "late.jpg", image_bytes(9)[:500], "stays damaged")
    assert cli("pack", "in", "out").returncode == 0
    packed = tmp_path / "out"
    reasons = {
        "001.jpg": "caption-missing",
        "002.jpg": "image-corrupt",
        "late.jpg": "image-corrupt",
    }
    assert dict(rejected(packed)) == reasons
    assert "nothing to append" in cli("pack", "in", "out", "--append").stderr
    (tmp_path / "in/001.txt").write_text("a caption that came late")
    appended = append(cli, "in")["appended"]
    assert (appended["samples"], appended["changed"]["count"], appended["missing"]) == (1, 0, 0)
    assert [source for source, _ in rejected(packed)] == ["002.jpg", "late.jpg"]
    (tmp_path / "in/002.jpg").write_bytes(whole)
    assert append(cli, "in")["appended"]["samples"] == 1
    assert rejected(packed) == [("late.jpg", "image-corrupt")]
    # Another damaged version is rejected once, not twice.
    write_pair(tmp_path / "in", "late.jpg", image_bytes(9)[:700], "still damaged")
    done = cli("pack", "in", "out", "--append")
    assert done.returncode == 0, done.stderr
    assert rejected(packed) == [("late.jpg", "image-corrupt")]
    (tmp_path / "in/late.jpg").unlink()
    assert "not in the source" not in cli("pack", "in", "out", "--append").stderr
    # What is packed stays as it is: a change of it is not appended.
    (tmp_path / "in/001.txt").write_text("yet another caption " * 60)
    done = cli("pack", "in", "out", "--append")
    assert "1 image not packed, because another size" in done.stderr
    index = ShardIndex(packed / "index.parquet")
    assert index.header.samples == 4


def test_rows_of_a_table_get_their_captions_later(cli: Cli, tmp_path: Path) -> None:
    write_album(tmp_path / "in", 3, flat=True)
    table = tmp_path / "in" / "list.jsonl"

    def write(*captions: str | None) -> None:
        rows = [
            {"image": f"{number:03}.jpg", "caption": caption}
            for number, caption in enumerate(captions)
        ]
        table.write_text("".join(json.dumps(row) + "\n" for row in rows))

    write("zero", None, "two")
    assert cli("pack", "in/list.jsonl", "out").returncode == 0
    assert rejected(tmp_path / "out") == [("001.jpg", "caption-missing")]
    write("zero", "one", "two")
    assert append(cli, "in/list.jsonl")["appended"]["samples"] == 1
    assert rejected(tmp_path / "out") == []
