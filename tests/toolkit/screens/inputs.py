"""Writes what the screens show: run files, images, shards, logs, and prices that do not get old."""

from __future__ import annotations

import io
import json
import shutil
import tarfile
from dataclasses import asdict
from pathlib import Path

import yaml
from PIL import Image
from sm_train.cost.prices import shipped_prices
from sm_train.toolkit.submit.run_bundle import bundle_of

from tests.support.cluster.training_jobs import tiny_run, write_shards
from tests.support.data_channels import write_folder_index
from tests.support.job_log_lines import SimulatedJob
from tests.support.run_documents import run, stage
from tests.toolkit.analysis.diagnose.log_corpus import log_folder

_DATE = "2999-01-01"
"""A price of this date is never reported as old."""


def write_inputs(folder: Path) -> None:
    """Write all inputs of the screens to ``folder``."""
    _write_prices(folder / ".cache" / "sm-train" / "prices.json")
    document = run(
        name="my-model",
        stages=[
            stage("256px"),
            stage("512px", resolution=512, instances=8, per_device_batch_size=4)
            | {"steps_per_second": None},
        ],
        budget={"usd": 100, "on_exceed": "warn"},
    )
    _write(folder / "run.yaml", document)
    _write(folder / "other.yaml", document | {"stages": [stage("256px", max_steps=2000)]})
    # With an image of one's own, no finding depends on the support dates of AWS's images.
    image = "210987654321.dkr.ecr.us-east-1.amazonaws.com/own:1"
    cluster = {"instance_type": "ml.p4de.24xlarge", "image": image, "framework_version": "2.13.0"}
    _write(folder / "owned.yaml", document | {"cluster": cluster, "bucket": "my-bucket"})
    wrong = stage(lr=1e-4, batch_size=8) | {"resolution": "big"}
    mistakes = {"region": "us-est-1", "stages": [wrong]}
    _write(folder / "wrong.yaml", document | mistakes)
    (folder / "prompts.txt").write_text("a cat\n")
    _write_images(folder / "photos")
    (folder / "scores.py").write_text(
        'def area(batch):\n    return {"area": [i.width * i.height for i in batch.images]}\n'
    )
    write_shards(folder / "photos-packed" / "shards", shards=2, each=2)
    write_shards(folder / "photos-indexed", shards=3, each=2)
    write_folder_index(folder / "photos-indexed")
    _write_local_run(folder / "local-runs" / "tiny", seed=0, speed=1.8)
    _write_local_run(folder / "local-runs" / "other", seed=1, speed=2.1)
    shutil.copy(log_folder() / "accelerate-cuda-oom-sdscripts.log", folder / "failed.log")


def _write(path: Path, document: dict[str, object]) -> None:
    path.write_text(yaml.safe_dump(document, sort_keys=False))


def _write_prices(path: Path) -> None:
    rows = [
        asdict(row) | {"usd_per_hour": str(row.usd_per_hour), "date": _DATE}
        for row in shipped_prices().rows.values()
        if row.usd_per_hour is not None
    ]
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps({"version": 1, "listed": {}, "rows": rows}))


def _write_images(folder: Path) -> None:
    folder.mkdir()
    for number in range(4):
        Image.new("RGB", (64, 48), (number * 50, 90, 120)).save(folder / f"{number}.png")
        (folder / f"{number}.txt").write_text(f"picture {number}\n")
    Image.new("RGB", (64, 48)).save(folder / "no-caption.png")
    (folder / "broken.jpg").write_bytes(b"\xff\xd8\xff")
    (folder / "broken.txt").write_text("broken\n")
    (folder / "notes.pdf").write_bytes(b"%PDF")


def _write_local_run(folder: Path, *, seed: int, speed: float) -> None:
    stage_folder = folder / "8px"
    stage_folder.mkdir(parents=True)
    job = SimulatedJob(nodes=1, intervals=20, seed=seed, speed=lambda share: speed)
    lines = [line for _, line in job.lines()]
    (stage_folder / "events.log").write_text("".join(f"{line}\n" for line in ("ready", *lines)))
    bundle = bundle_of(tiny_run(max_steps=30_000), folder)
    with tarfile.open(fileobj=io.BytesIO(bundle.archive)) as archive:
        archive.extractall(stage_folder / "bundle", filter="data")
    (folder / ".command").write_text("sm-train submit run.yaml --local\n")
