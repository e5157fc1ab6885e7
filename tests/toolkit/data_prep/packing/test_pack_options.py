"""Options of ``sm-train pack``: filters, duplicates, re-encoding, and S3."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import webdataset
from PIL import Image
from sm_train.entrypoints.shards.shard_index import ShardIndex
from sm_train.entrypoints.shards.shard_verification import verify_shard

from tests.conftest import Aws, Cli, clean_environment
from tests.support.deadline import DEADLINE
from tests.support.image_files import image_bytes, read_tree, write_album, write_pair
from tests.support.run_documents import stage
from tests.support.run_files import write_run
from tests.toolkit.data_prep.packing.pack_options_support import (
    read_objects,
    upload_folder,
    without_root,
)


def sample_metadata(folder: Path) -> list[dict[str, Any]]:
    urls = [str(path) for path in sorted((folder / "shards").iterdir())]
    samples = webdataset.WebDataset(urls, shardshuffle=False)
    return [json.loads(sample["json"]) for sample in samples]


def rejected_counts(run: Any) -> dict[str, int]:
    counts: dict[str, int] = json.loads(run.stdout)["rejected"]
    return counts


def test_samples_have_metadata(cli: Cli, tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    content = io.BytesIO()
    Image.new("RGB", (64, 32), (9, 99, 200)).save(content, "JPEG", exif=exif)
    write_pair(tmp_path / "in", "a.jpg", content.getvalue(), "größer")
    assert cli("pack", "in", "out").returncode == 0
    [metadata] = sample_metadata(tmp_path / "out")
    assert metadata.pop("sha256")
    assert len(metadata.pop("phash")) == 16
    assert metadata == {
        "width": 32,
        "height": 64,
        "orientation": 6,
        "format": "jpeg",
        "aspect_bucket": "768x1344",
        "caption_length": 6,
        "source": "a.jpg",
    }
    sizes = ShardIndex(tmp_path / "out/index.parquet").image_sizes(0)
    assert sizes is not None
    assert [values.tolist() for values in sizes] == [[32], [64]]


@pytest.mark.slow
def test_the_shard_count_is_a_multiple_of_the_largest_stages_instances(
    cli: Cli, tmp_path: Path
) -> None:
    write_album(tmp_path / "in", 40)
    stages = [stage(instances=2), stage("512px", resolution=512, instances=6)]
    run = write_run(tmp_path, stages=stages)
    packed = cli("pack", "in", "out", "--for", run, "--shard-size", "30KB", "--json")
    assert packed.returncode == 0, packed.stderr
    index = ShardIndex(tmp_path / "out/index.parquet")
    assert len(index) == 6
    assert index.bytes.max() - index.bytes.min() <= 2 * 5120
    few = cli("pack", "in", "few", "--for", run, "--json")
    assert json.loads(few.stdout)["shards"] == 6
    write_album(tmp_path / "tiny", 5)
    none = cli("pack", "tiny", "none", "--for", run)
    assert none.returncode == 2
    assert "5 images for 6 instances" in none.stderr
    assert not (tmp_path / "none").exists()


def test_min_side_rejects_smaller_images_and_accepts_the_exact_size(
    cli: Cli, tmp_path: Path
) -> None:
    for name, size in [
        ("wide", (64, 32)),
        ("high", (32, 64)),
        ("flat", (64, 31)),
        ("thin", (31, 64)),
    ]:
        write_pair(tmp_path / "in", f"{name}.jpg", image_bytes(size=size), "x")
    run = cli("pack", "in", "out", "--min-side", "32", "--json")
    assert rejected_counts(run) == {"image-small": 2}
    assert [item["source"] for item in sample_metadata(tmp_path / "out")] == [
        "high.jpg",
        "wide.jpg",
    ]


def test_max_aspect_rejects_longer_images_and_accepts_the_exact_ratio(
    cli: Cli, tmp_path: Path
) -> None:
    for name, size in [
        ("wide", (120, 40)),
        ("high", (40, 120)),
        ("wider", (121, 40)),
        ("higher", (40, 121)),
    ]:
        write_pair(tmp_path / "in", f"{name}.jpg", image_bytes(size=size), "x")
    run = cli("pack", "in", "out", "--max-aspect", "3", "--json")
    assert rejected_counts(run) == {"image-long": 2}
    assert [item["source"] for item in sample_metadata(tmp_path / "out")] == [
        "high.jpg",
        "wide.jpg",
    ]


def test_filters_combine(cli: Cli, tmp_path: Path) -> None:
    for name, size in [("good", (64, 48)), ("small", (64, 20)), ("long", (300, 40))]:
        write_pair(tmp_path / "in", f"{name}.jpg", image_bytes(size=size), "x")
    run = cli("pack", "in", "out", "--min-side", "32", "--max-aspect", "3", "--json")
    assert rejected_counts(run) == {"image-small": 1, "image-long": 1}
    assert [item["source"] for item in sample_metadata(tmp_path / "out")] == ["good.jpg"]


def test_max_side_scales_larger_images_and_keeps_the_bytes_of_the_exact_size(
    cli: Cli, tmp_path: Path
) -> None:
    for name, size in [("exact", (200, 150)), ("over", (201, 150)), ("tall", (150, 201))]:
        write_pair(tmp_path / "in", f"{name}.png", image_bytes(size=size, kind="PNG"), "x")
    assert cli("pack", "in", "out", "--max-side", "200").returncode == 0
    exact, over, tall = sample_metadata(tmp_path / "out")
    assert (exact["format"], exact["width"], exact["height"]) == ("png", 200, 150)
    assert (over["format"], over["width"]) == ("jpeg", 200)
    assert (tall["format"], tall["height"]) == ("jpeg", 200)


@pytest.mark.slow
@pytest.mark.integration
def test_the_first_of_several_duplicates_is_kept(cli: Cli, tmp_path: Path) -> None:
    """Duplicate bytes or similar hashes, in any shard and with any number of workers."""
    for number in range(6):
        blocks = image_bytes(number, size=(256, 256), kind="PNG")
        write_pair(tmp_path / "in", f"{number}-a.png", blocks, "first")
        write_pair(tmp_path / "in", f"{number}-b.png", blocks, "same bytes")
        with Image.open(io.BytesIO(blocks)) as image:
            scaled = io.BytesIO()
            image.resize((200, 200), Image.Resampling.LANCZOS).save(scaled, "JPEG", quality=80)
        write_pair(tmp_path / "in", f"{number}-c.jpg", scaled.getvalue(), "the same, smaller")
    sizes = ("--shard-size", "15KB", "--json")
    assert rejected_counts(cli("pack", "in", "all", *sizes)) == {}
    assert rejected_counts(cli("pack", "in", "bytes", "--drop-duplicates", *sizes)) == {
        "duplicate": 6
    }
    similar = cli("pack", "in", "similar", "--near-duplicates", "4", *sizes, "--workers", "1")
    assert rejected_counts(similar) == {"duplicate": 6, "near-duplicate": 6}
    assert [item["source"] for item in sample_metadata(tmp_path / "similar")] == [
        f"{n}-a.png" for n in range(6)
    ]
    details = {item.detail for item in ShardIndex(tmp_path / "similar/index.parquet").rejected()}
    assert "looks like 3-a.png" in details
    assert "has the same bytes as 3-a.png" in details
    again = cli("pack", "in", "again", "--near-duplicates", "4", *sizes, "--workers", "3")
    assert again.returncode == 0
    assert read_tree(tmp_path / "again") == read_tree(tmp_path / "similar")


def test_images_are_re_encoded_on_request(cli: Cli, tmp_path: Path) -> None:
    write_pair(tmp_path / "in", "large.png", image_bytes(size=(400, 300), kind="PNG"), "x")
    write_pair(tmp_path / "in", "small.png", image_bytes(size=(100, 80), kind="PNG"), "x")
    assert cli("pack", "in", "out", "--max-side", "200").returncode == 0
    large, small = sample_metadata(tmp_path / "out")
    assert (large["format"], large["width"], large["height"]) == ("jpeg", 200, 150)
    assert (small["format"], small["width"]) == ("png", 100)
    assert cli("pack", "in", "all", "--quality", "70").returncode == 0
    assert [metadata["format"] for metadata in sample_metadata(tmp_path / "all")] == [
        "jpeg",
        "jpeg",
    ]


def test_headers_only_does_not_detect_corruption(cli: Cli, tmp_path: Path) -> None:
    content = image_bytes(size=(400, 300))
    write_pair(tmp_path / "in", "cut.jpg", content[: len(content) // 2], "x")
    assert cli("pack", "in", "out", "--headers-only").returncode == 0
    assert sample_metadata(tmp_path / "out")[0]["phash"] is None
    assert cli("pack", "in", "full").returncode == 2
    both = cli("pack", "in", "b", "--headers-only", "--near-duplicates", "3")
    assert (both.returncode, both.stderr.count("\n")) == (2, 1)


def test_a_pattern_selects_images(cli: Cli, tmp_path: Path) -> None:
    write_album(tmp_path / "in", 6)
    write_pair(tmp_path / "in", "other/9.png", image_bytes(kind="PNG"), "x")
    run = cli("pack", "in/**/*.jpg", "out", "--json")
    assert json.loads(run.stdout)["samples"] == 6
    assert {item["source"] for item in sample_metadata(tmp_path / "out")} >= {
        "000.jpg",
        "more/002.jpg",
    }
    assert "no images in it" in cli("pack", "in/*.webp", "none").stderr


# ------------------------------------------------------------------ S3


@pytest.fixture
def cloud(cli: Cli, aws: Aws) -> Any:
    def run(*arguments: object) -> Any:
        options = {"network": "loopback", "env": aws.environment}
        return cli("--region", "us-east-1", *arguments, **options)

    return run


@pytest.mark.integration
def test_packing_from_s3_to_s3(cli: Cli, cloud: Any, aws: Aws, tmp_path: Path) -> None:
    """Gives the same bytes as from folder to folder, and leaves no other objects."""
    write_album(tmp_path / "in", 12)
    write_pair(tmp_path / "in", "cut.jpg", image_bytes()[:300], "x")
    write_pair(tmp_path / "in", "uncaptioned.jpg", image_bytes(), None)
    upload_folder(aws, tmp_path / "in", "photos/")
    aws.make_bucket("packed")
    run = cloud("pack", "s3://raw/photos/", "s3://packed/set", "--shard-size", "20KB", "--json")
    assert run.returncode == 0, run.stderr
    assert json.loads(run.stdout)["shards_path"] == "s3://packed/set/shards"
    assert rejected_counts(run) == {"image-corrupt": 1, "caption-missing": 1}
    assert cli("pack", "in", "out", "--shard-size", "20KB").returncode == 0
    local = {name: content for name, content in read_tree(tmp_path / "out").items() if "." in name}
    assert without_root(read_objects(aws, "packed", "set/")) == without_root(local)
    again = cloud("pack", "s3://raw/photos/", "s3://packed/set", "--shard-size", "20KB")
    assert "already packed 12 samples" in again.stderr


@pytest.mark.slow
@pytest.mark.integration
def test_an_interrupted_pack_to_s3_is_resumed(
    cli: Cli, cloud: Any, aws: Aws, tmp_path: Path
) -> None:
    """After a kill, finished shards are not written again, and the result has the same bytes."""
    for number in range(24):
        content = image_bytes(number, size=(700, 500), kind="PNG")
        write_pair(tmp_path / "in", f"{number:02}.png", content, "x")
    upload_folder(aws, tmp_path / "in", "photos/")
    aws.make_bucket("packed")
    arguments = ["pack", "s3://raw/photos/", "s3://packed/set", "--shard-size", "30KB"]
    program = "import sys; from sm_train.toolkit.cli import main; main(sys.argv[1:])"
    process = subprocess.Popen(
        [sys.executable, "-c", program, "--region", "us-east-1", *arguments, "--workers", "2"],
        env=clean_environment(tmp_path) | aws.environment,
        start_new_session=True,
    )
    deadline = time.monotonic() + DEADLINE
    while not any(".parquet" in name for name in read_objects(aws, "packed", "set/.packing/")):
        assert process.poll() is None
        assert time.monotonic() < deadline
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    # A shard without a record is unfinished: it is built again, with the same bytes.
    records = read_objects(aws, "packed", "set/.packing/")
    finished = {
        key: when
        for key, when in modification_times(aws, "packed", "set/shards/").items()
        if f"{key.rpartition('/')[2]}.parquet" in records
    }
    assert finished
    assert "index.parquet" not in read_objects(aws, "packed", "set/")
    # The parts of an interrupted upload are billed until it is aborted.
    names = (f"set/shards/shard-{number:06d}.tar" for number in range(24))
    interrupted = next(key for key in names if key not in finished)
    for key in (interrupted, "set/shards/theirs.tar"):
        aws.client("s3").create_multipart_upload(Bucket="packed", Key=key)
    time.sleep(1.1)  # modification times are whole seconds: a rewrite must be visible
    assert cloud(*arguments).returncode == 0
    assert finished.items() <= modification_times(aws, "packed", "set/shards/").items()
    assert cli("pack", "in", "out", "--shard-size", "30KB").returncode == 0
    local = {name: content for name, content in read_tree(tmp_path / "out").items() if "." in name}
    assert without_root(read_objects(aws, "packed", "set/")) == without_root(local)
    uploads = aws.client("s3").list_multipart_uploads(Bucket="packed")["Uploads"]
    assert [upload["Key"] for upload in uploads] == ["set/shards/theirs.tar"]


def modification_times(aws: Aws, bucket: str, prefix: str) -> dict[str, Any]:
    listed = aws.client("s3").list_objects_v2(Bucket=bucket, Prefix=prefix).get("Contents", [])
    return {entry["Key"]: entry["LastModified"] for entry in listed}


def test_a_row_cannot_lead_out_of_a_prefix(cloud: Any, aws: Aws, tmp_path: Path) -> None:
    write_album(tmp_path / "in", 2)
    upload_folder(aws, tmp_path / "in", "photos/")
    upload_folder(aws, tmp_path / "in", "private/")
    rows = [{"image": name, "caption": "a"} for name in ("000.jpg", "../private/001.jpg")]
    (tmp_path / "list.jsonl").write_text("\n".join(map(json.dumps, rows)))
    arguments = ("s3://raw/photos/", tmp_path / "out", "--captions", tmp_path / "list.jsonl")
    run = cloud("pack", *arguments, "--json")
    assert run.returncode == 0, run.stderr
    assert rejected_counts(run) == {"outside-source": 1}


def test_a_table_may_contain_s3_uris(cloud: Any, aws: Aws, tmp_path: Path) -> None:
    write_album(tmp_path / "in", 4)
    upload_folder(aws, tmp_path / "in", "photos/")
    rows = [
        {"image": f"s3://raw/photos/{name}", "caption": name}
        for name in ("000.jpg", "more/002.jpg", "gone.jpg")
    ]
    (tmp_path / "list.jsonl").write_text("\n".join(map(json.dumps, rows)))
    run = cloud("pack", tmp_path / "list.jsonl", tmp_path / "out", "--json")
    assert run.returncode == 0, run.stderr
    assert rejected_counts(run) == {"image-missing": 1}
    assert [item["source"] for item in sample_metadata(tmp_path / "out")] == [
        "s3://raw/photos/000.jpg",
        "s3://raw/photos/more/002.jpg",
    ]
    for number, name in enumerate(ShardIndex(tmp_path / "out/index.parquet").names):
        expected = ShardIndex(tmp_path / "out/index.parquet").shard(number)
        verify_shard(tmp_path / "out/shards" / name, expected)


def test_a_missing_bucket_is_one_line(cloud: Any, aws: Aws, tmp_path: Path) -> None:
    write_album(tmp_path / "in", 4)
    from_missing = cloud("pack", "s3://raw/photos/", tmp_path / "out")
    assert from_missing.returncode != 0
    assert from_missing.stderr.startswith("sm-train: s3://raw/photos/: AWS returned NoSuchBucket")
    to_missing = cloud("pack", tmp_path / "in", "s3://raw/set")
    assert to_missing.returncode != 0
    assert to_missing.stderr.count("\n") == 1
    assert "s3://raw/set" in to_missing.stderr
