"""Images that crash their decoder: packing and training skip and name them, in every run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from sm_train.entrypoints.shards.shard_index import ShardIndex
from sm_train.toolkit.records.job_logs import parse_event

from tests.conftest import clean_environment
from tests.support.cluster import crashing_train
from tests.support.cluster.training_jobs import Job, sample, tiny_run, write_shard, write_shards
from tests.support.data_channels import write_folder_index
from tests.support.deadline import DEADLINE
from tests.support.image_files import image_bytes, write_album, write_pair
from tests.support.images.crashing_decoders import CRASH

pytestmark = pytest.mark.integration

ROOT = Path(__file__).parents[2]
CRASHING_SITE = ROOT / "tests/support/images/crashing_site"


def run(folder: Path, *arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "tests.support.images.crashing_programs", *map(str, arguments)],
        env=clean_environment(folder)
        | {"TMPDIR": str(folder), "PYTHONPATH": f"{CRASHING_SITE}{os.pathsep}{ROOT}"},
        capture_output=True,
        text=True,
        timeout=DEADLINE,
        check=False,
    )


@pytest.mark.slow
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


def evaluated(
    folder: Path, validation: dict[str, dict[str, bytes]], workers: int
) -> list[dict[str, Any]]:
    """Return the events of a run that evaluates twice without changing a weight."""
    settings: dict[str, Any] = {"decode_workers": workers, "evaluation": {"every_steps": 1}}
    job = Job(folder, tiny_run(max_steps=2, learning_rate=1e-12, **settings))
    write_shards(job.train_channel, shards=1, each=8)
    channel = job.base / "input" / "data" / "validation"
    channel.mkdir()
    write_shard(channel / "a.tar", validation)
    with job.start(script=crashing_train.__file__) as running:
        text = "".join(running.lines())
        assert running.process.wait(timeout=DEADLINE) == 0, text
    return [event for line in text.splitlines() if (event := parse_event(line))]


@pytest.mark.slow
def test_validation_skips_and_names_an_image_that_crashes_its_decoder(tmp_path: Path) -> None:
    """The loss is that of the other samples."""
    samples = {f"{number:04}": sample(number) for number in range(7)}
    crashing = {"png": sample(7)["png"] + crashing_train.CRASH, "txt": b"a grey of 7"}
    expected, found = (
        evaluated(tmp_path / "without", samples, workers=0),
        evaluated(tmp_path / "with", samples | {"0007": crashing}, workers=1),
    )
    losses = [
        [event["losses"] for event in events if event["kind"] == "eval"]
        for events in (expected, found)
    ]
    assert len(losses[0]) == len(losses[1]) == 2
    assert losses[1][0] == pytest.approx(losses[0][0], rel=1e-5)
    [warning] = [event for event in found if event.get("code") == "bad-sample"]
    assert warning["reasons"] == {"decoder-crash": 1}
    assert "validation set: skipped 1 samples" in warning["message"]
    assert "0007" in warning["message"]
