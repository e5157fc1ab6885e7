"""Images that crash their decoder: packing and training skip and name them, in every run."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from sm_train.entrypoints.data.shard_index import ShardIndex

from tests.conftest import clean_environment
from tests.support.cluster.training_jobs import write_shard
from tests.support.data_channels import write_folder_index
from tests.support.deadline import DEADLINE
from tests.support.image_files import image_bytes, write_album, write_pair
from tests.support.images.crashing_decoders import CRASH


def run(folder: Path, *arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "tests.support.images.crashing_programs", *map(str, arguments)],
        env=clean_environment(folder) | {"TMPDIR": str(folder)},
        capture_output=True,
        text=True,
        timeout=DEADLINE,
        check=False,
    )


@pytest.mark.parametrize("workers", [1, 3])
def test_pack_skips_and_names_images_that_crash_their_decoder(tmp_path: Path, workers: int) -> None:
    write_album(tmp_path / "in", 40)
    for name in ("first.jpg", "more/second.jpg"):
        write_pair(tmp_path / "in", name, image_bytes(1) + CRASH, "a picture")
    finished = run(
        tmp_path,
        "pack",
        tmp_path / "in",
        tmp_path / "out",
        "--workers",
        workers,
        "--json",
        "--shard-size",
        "20KB",
    )
    assert finished.returncode == 0, finished.stderr
    document = json.loads(finished.stdout)
    assert (document["samples"], document["rejected"]) == (40, {"decoder-crash": 2})
    rejected = list(ShardIndex(tmp_path / "out/index.parquet").rejected())
    assert [item.source for item in rejected] == ["first.jpg", "more/second.jpg"]
    assert {item.detail for item in rejected} == {"the decoder was killed by SIGSEGV"}
    assert "first.jpg" in finished.stderr


def batches(folder: Path, workers: int, saved_after: int) -> list[dict[str, Any]]:
    scratch = folder / f"{workers}-{saved_after}"
    scratch.mkdir()
    finished = run(folder, "load", folder / "shards", workers, saved_after, scratch)
    assert finished.returncode == 0, finished.stderr
    return [json.loads(line) for line in finished.stdout.splitlines()]


def test_training_skips_images_that_crash_their_decoder_also_after_a_restart(
    tmp_path: Path,
) -> None:
    """The order stays exact, and the replacement is the same one in every run."""
    crashing = {3, 17, 18}
    samples = {}
    for number in range(24):
        image = image_bytes(number) + (CRASH if number in crashing else b"")
        samples[f"{number:04}"] = {"jpg": image, "txt": f"picture {number}".encode()}
    (tmp_path / "shards").mkdir()
    write_shard(tmp_path / "shards" / "a.tar", samples)
    write_folder_index(tmp_path / "shards")
    expected = batches(tmp_path, 2, 0)
    bad = [entry for batch in expected for entry in batch["bad"]]
    assert sorted(key for key, _, _ in bad) == [f"{number:04}" for number in sorted(crashing)]
    assert {tuple(entry[1:]) for entry in bad} == {
        ("decoder-crash", "the decoder was killed by SIGSEGV")
    }
    captions = [caption for batch in expected for caption in batch["captions"]]
    assert len(captions) == 24
    assert set(captions) == {f"picture {number}" for number in set(range(24)) - crashing}
    assert batches(tmp_path, 1, 5) == expected
