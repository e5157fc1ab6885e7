"""`data-preview` shows what the loader gives, and counts the whole index."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sm_train import ShardDataset
from sm_train.entrypoints.job_interface.job_config import ColorPolicy
from sm_train.entrypoints.shards.shard_index import ShardIndex
from sm_train.entrypoints.storage.store import S3Access
from sm_train.toolkit.data_prep.data_preview.data_preview import (
    _conversion,
    preview_set,
    preview_sources,
)

from tests.conftest import Cli
from tests.support.image_files import write_album, write_pair
from tests.support.images.color_pictures import CHART, cmyk_profile, encode, png_with
from tests.support.images.icc_profiles import rgb_profile
from tests.support.moto_server import Aws

RUN = """
name: preview
model: {preset: tiny-sd2}
data: {uri: DATA, icc_profile: ignore, flip: true}
cluster: {instance_type: ml.p4de.24xlarge}
stages:
  - name: 64px
    resolution: 64
    instances: 1
    per_device_batch_size: 1
    max_steps: 10
    learning_rate: 1.0e-4
  - name: 96px
    resolution: 96
    instances: 1
    per_device_batch_size: 1
    max_steps: 10
    learning_rate: 1.0e-4
"""


@pytest.fixture
def packed(cli: Cli, tmp_path: Path) -> Path:
    """Return a pack of 14 images: 12 without a profile, one in Adobe RGB, one in CMYK."""
    source = tmp_path / "in"
    write_album(source, 12)
    adobe = rgb_profile("Adobe RGB")
    write_pair(source, "adobe.jpg", encode(CHART, "JPEG", icc_profile=adobe), "a <b>chart</b>")
    cmyk = encode(CHART.convert("CMYK"), "JPEG", icc_profile=cmyk_profile())
    write_pair(source, "cmyk.jpg", cmyk, "a chart for print")
    write_pair(source, "hdr.png", png_with((b"cICP", b"\x09\x10\x00\x01")), "left out")
    with (source / "list.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["image", "caption", "license"])
        for path in sorted(source.rglob("*.[jp][pn]g")):
            license_name = "CC0" if path.stem in ("adobe", "cmyk") else "own"
            name = path.relative_to(source).as_posix()
            writer.writerow([name, path.with_suffix(".txt").read_text(), license_name])
    options = ("--index-column", "license", "--shard-size", "60KB")
    done = cli("pack", "in", "packed", "--captions", "in/list.csv", *options)
    assert done.returncode == 0, done.stderr
    return tmp_path / "packed"


def document(cli: Cli, *arguments: object, **options: Any) -> dict[str, Any]:
    run = cli("data-preview", *arguments, "--json", **options)
    assert run.returncode == 0, run.stderr
    found: dict[str, Any] = json.loads(run.stdout)
    return found


def test_the_page_has_samples_and_counts(cli: Cli, packed: Path, tmp_path: Path) -> None:
    [shown] = document(cli, "packed", "--resolution", "64")["sets"]
    assert (shown["samples"], shown["indexed"], len(shown["seen"])) == (14, 14, 14)
    assert shown["profiles"] == {"none": 12, "Adobe RGB": 1, "CMYK": 1}
    assert shown["rejected"] == {"image-hdr": 1}
    assert shown["sides"] == {"below 256 px": 14}
    assert shown["enlarged"] == 12
    facts = {sample["caption"]: sample for sample in shown["seen"]}
    assert facts["a <b>chart</b>"]["conversion"] == "Adobe RGB → sRGB"
    assert facts["a <b>chart</b>"]["columns"] == {"license": "CC0"}
    assert facts["picture 0"]["conversion"] == "no profile, taken as sRGB"
    page = (tmp_path / "data-preview.html").read_text()
    assert page.count("data:image/jpeg;base64,") == 14
    assert "a &lt;b&gt;chart&lt;/b&gt;" in page
    assert "<b>" not in page
    assert "<script" not in page


def test_pixels_and_captions_are_those_of_the_loader(packed: Path) -> None:
    [source] = preview_sources(str(packed), None, 64, None)
    preview = preview_set(source, 14, 0, S3Access())
    seen = {sample.crop.caption: sample.crop.pixels for sample in preview.seen}
    dataset = ShardDataset(packed / "shards", batch_size=7, resolution=64, seed=5, decode_workers=0)
    trained: dict[str, Any] = {}
    for _, batch in zip(range(2), dataset, strict=False):
        for caption, pixels in zip(batch["captions"], batch["pixel_values"], strict=True):
            trained[caption] = pixels.permute(1, 2, 0).numpy()
    assert seen.keys() == trained.keys()
    for caption, pixels in seen.items():
        assert np.array_equal(pixels, trained[caption]), caption


def test_a_run_file_states_how_samples_are_read(cli: Cli, packed: Path, tmp_path: Path) -> None:
    text = RUN.replace("uri: DATA", "uri: s3://none/set, local: packed/shards")
    (tmp_path / "run.yaml").write_text(text)
    [shown] = document(cli, "run.yaml", "--stage", "96px", "--where", "license = 'CC0'")["sets"]
    assert (shown["samples"], shown["indexed"], shown["resolution"]) == (2, 14, 96)
    conversions = {sample["conversion"] for sample in shown["seen"]}
    assert conversions == {"Adobe RGB, levels as stored", "CMYK, levels as stored"}
    assert any("icc_profile: ignore takes 2 images" in text for text in shown["warnings"])
    refused = cli("data-preview", "run.yaml", "--stage", "1024px")
    assert refused.returncode == 2
    assert refused.stderr == "sm-train: --stage: 1024px: no such stage; the run has 64px, 96px\n"


def test_a_transform_prints_next_to_the_document(cli: Cli, packed: Path, tmp_path: Path) -> None:
    (tmp_path / "code").mkdir()
    (tmp_path / "code/samples.py").write_text(
        "def prepare(sample):\n    print('seen', flush=True)\n    return sample\n"
    )
    text = RUN.replace(
        "uri: DATA", "uri: s3://none/set, local: packed/shards, transform: 'samples:prepare'"
    )
    (tmp_path / "run.yaml").write_text(f"{text}code: code\n")
    run = cli("data-preview", "run.yaml", "--json")
    assert run.returncode == 0, run.stderr
    assert len(json.loads(run.stdout)["sets"]) == 1
    assert "seen" in run.stderr


def test_removed_and_unusable_samples(cli: Cli, packed: Path, tmp_path: Path) -> None:
    assert cli("remove", "packed", "--where", "license = 'CC0'", "--yes").returncode == 0
    [shown] = document(cli, "packed", "--resolution", "64", "--samples", "1000")["sets"]
    assert shown["samples"] == 12
    assert {sample["columns"]["license"] for sample in shown["seen"]} == {"own"}
    shard = sorted((packed / "shards").glob("*.tar"))[0]
    content = bytearray(shard.read_bytes())
    start = content.index(b"\xff\xd8\xff")
    content[start + 2 : start + 40] = bytes(38)
    shard.write_bytes(content)
    [shown] = document(cli, "packed", "--resolution", "64")["sets"]
    [left_out] = shown["unusable"]
    assert left_out["reason"] == "image-corrupt"
    assert len(shown["seen"]) == 11
    assert "Left out by training" in (tmp_path / "data-preview.html").read_text()


def test_buckets_and_shards_that_were_cut_short(cli: Cli, packed: Path, tmp_path: Path) -> None:
    text = RUN.replace("uri: DATA", "uri: s3://none/set, local: packed/shards")
    bucketed = text.replace("flip: true", "aspect_buckets: true")
    (tmp_path / "run.yaml").write_text(bucketed.replace("64", "256"))
    [shown] = document(cli, "run.yaml")["sets"]
    assert len(shown["seen"]) == 14
    assert len({tuple(sample["shape"]) for sample in shown["seen"]}) > 1
    shard = sorted((packed / "shards").glob("*.tar"))[0]
    samples = ShardIndex(packed / "index.parquet").samples[0]
    shard.write_bytes(b"")
    [shown] = document(cli, "packed", "--resolution", "64")["sets"]
    assert len(shown["unusable"]) == samples
    assert len({(sample["shard"], sample["key"]) for sample in shown["seen"]}) == 14 - samples
    assert len(shown["seen"]) == 14 - samples
    shard.unlink()
    missing = cli("data-preview", "packed")
    assert missing.returncode == 2
    assert "does not exist, but the index lists it" in missing.stderr


def test_a_page_is_written_if_no_sample_can_be_used(cli: Cli, packed: Path) -> None:
    for shard in (packed / "shards").glob("*.tar"):
        shard.write_bytes(bytes(shard.stat().st_size))
    [shown] = document(cli, "packed", "--resolution", "64")["sets"]
    assert (len(shown["seen"]), len(shown["unusable"])) == (0, 14)


@pytest.mark.parametrize(
    ("code", "policy", "expected"),
    [
        ("Adobe RGB/RGB/8", "srgb", "Adobe RGB → sRGB"),
        ("Adobe RGB/gray/8", "srgb", "Adobe RGB → sRGB"),
        ("Adobe RGB/RGB/8", "ignore", "Adobe RGB, levels as stored"),
        ("CMYK/RGB/8", "srgb", "CMYK, levels as stored"),
        ("CMYK/CMYK/8", "srgb", "CMYK → sRGB"),
        ("none/CMYK/8", "srgb", "CMYK, no profile"),
        ("other/RGB/8", "srgb", "other, levels as stored"),
        ("none/RGB/8/gAMA", "srgb", "no profile; gAMA is not converted"),
    ],
)
def test_what_becomes_of_colors(code: str, policy: Any, expected: str) -> None:
    assert _conversion(code, ColorPolicy(icc_profile=policy)) == expected


def test_samples_in_s3_are_read_without_their_shards(
    cli: Cli, packed: Path, aws: Aws, tmp_path: Path
) -> None:
    files = {
        path.relative_to(packed).as_posix(): path.read_bytes()
        for path in packed.rglob("*")
        if path.is_file()
    }
    aws.make_bucket("data", **{f"set/{name}": content for name, content in files.items()})
    environment = {**aws.environment, "AWS_REGION": "us-east-1"}
    options: dict[str, Any] = {"network": "loopback", "env": environment}
    arguments = ("s3://data/set", "--resolution", "64", "--samples", "5")
    [stored] = document(cli, *arguments, **options)["sets"]
    [local] = document(cli, "packed", "--resolution", "64", "--samples", "5")["sets"]
    assert stored["seen"] == local["seen"]
    assert len(stored["seen"]) == 5
    (tmp_path / "run.yaml").write_text(RUN.replace("DATA", "s3://data/set/shards"))
    [of_run] = document(cli, "run.yaml", "--samples", "5", **options)["sets"]
    assert (of_run["address"], of_run["samples"]) == ("s3://data/set/shards/", 14)


def test_what_cannot_be_shown_is_one_line(cli: Cli, packed: Path) -> None:
    missing = cli("data-preview", "nowhere")
    assert missing.returncode == 2
    assert missing.stderr == "sm-train: nowhere: no such folder of shards\n"
    (packed / "index.parquet").unlink()
    unindexed = cli("data-preview", "packed/shards")
    assert unindexed.returncode == 2
    assert unindexed.stderr.endswith("no such index; `sm-train index packed/shards` writes it\n")
