"""Packing for a run: what goes in, what stays out, and from where to where."""

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
from sm_train.entrypoints.data.shard_index import ShardIndex
from sm_train.entrypoints.data.shard_verification import verify_shard

from tests.conftest import Aws, Cli, clean_environment
from tests.support.image_files import album, picture, tree, write_pair
from tests.support.run_documents import stage
from tests.support.run_files import write_run


def facts(folder: Path) -> list[dict[str, Any]]:
    urls = [str(path) for path in sorted((folder / "shards").iterdir())]
    read = webdataset.WebDataset(urls, shardshuffle=False)
    return [json.loads(each["json"]) for each in read]


def rejected(run: Any) -> dict[str, int]:
    result: dict[str, int] = json.loads(run.stdout)["rejected"]
    return result


def test_missing_facts_are_made(cli: Cli, tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    content = io.BytesIO()
    Image.new("RGB", (64, 32), (9, 99, 200)).save(content, "JPEG", exif=exif)
    write_pair(tmp_path / "in", "a.jpg", content.getvalue(), "größer")
    assert cli("pack", "in", "out").returncode == 0
    [found] = facts(tmp_path / "out")
    assert found.pop("sha256")
    assert len(found.pop("phash")) == 16
    assert found == {
        "width": 32,
        "height": 64,
        "orientation": 6,
        "format": "jpeg",
        "aspect_bucket": "768x1344",
        "caption_length": 6,
        "source": "a.jpg",
    }
    sides = ShardIndex(tmp_path / "out/index.parquet").image_sizes(0)
    assert sides is not None
    assert [one.tolist() for one in sides] == [[32], [64]]


def test_a_run_gets_as_many_shards_as_its_largest_stage_divides(cli: Cli, tmp_path: Path) -> None:
    album(tmp_path / "in", 40)
    stages = [stage(instances=2), stage("512px", resolution=512, instances=6)]
    run = write_run(tmp_path, stages=stages)
    packed = cli("pack", "in", "out", "--for", run, "--shard-size", "30KB", "--json")
    assert packed.returncode == 0, packed.stderr
    index = ShardIndex(tmp_path / "out/index.parquet")
    assert len(index) == 6
    assert index.bytes.max() - index.bytes.min() <= 2 * 5120
    few = cli("pack", "in", "few", "--for", run, "--json")
    assert json.loads(few.stdout)["shards"] == 6
    album(tmp_path / "tiny", 5)
    none = cli("pack", "tiny", "none", "--for", run)
    assert none.returncode == 2
    assert "5 images for 6 instances" in none.stderr
    assert not (tmp_path / "none").exists()


def test_small_and_long_images_stay_out_when_asked(cli: Cli, tmp_path: Path) -> None:
    for name, size in [("good", (64, 48)), ("small", (64, 20)), ("long", (300, 40))]:
        write_pair(tmp_path / "in", f"{name}.jpg", picture(size=size), "x")
    run = cli("pack", "in", "out", "--min-side", "32", "--max-aspect", "3", "--json")
    assert rejected(run) == {"image-small": 1, "image-long": 1}
    assert [one["source"] for one in facts(tmp_path / "out")] == ["good.jpg"]


def test_the_first_of_duplicates_stays(cli: Cli, tmp_path: Path) -> None:
    """By bytes, or by looks; whatever shard they would be in, and whoever looks at them."""
    for number in range(6):
        blocks = picture(number, size=(256, 256), kind="PNG")
        write_pair(tmp_path / "in", f"{number}-a.png", blocks, "first")
        write_pair(tmp_path / "in", f"{number}-b.png", blocks, "same bytes")
        with Image.open(io.BytesIO(blocks)) as image:
            scaled = io.BytesIO()
            image.resize((200, 200), Image.Resampling.LANCZOS).save(scaled, "JPEG", quality=80)
        write_pair(tmp_path / "in", f"{number}-c.jpg", scaled.getvalue(), "the same, smaller")
    sizes = ("--shard-size", "15KB", "--json")
    assert rejected(cli("pack", "in", "all", *sizes)) == {}
    assert rejected(cli("pack", "in", "bytes", "--drop-duplicates", *sizes)) == {"duplicate": 6}
    looks = cli("pack", "in", "looks", "--near-duplicates", "4", *sizes, "--workers", "1")
    assert rejected(looks) == {"duplicate": 6, "near-duplicate": 6}
    assert [one["source"] for one in facts(tmp_path / "looks")] == [f"{n}-a.png" for n in range(6)]
    details = {one.detail for one in ShardIndex(tmp_path / "looks/index.parquet").rejected()}
    assert "looks like 3-a.png" in details
    assert "has the same bytes as 3-a.png" in details
    again = cli("pack", "in", "again", "--near-duplicates", "4", *sizes, "--workers", "3")
    assert again.returncode == 0
    assert tree(tmp_path / "again") == tree(tmp_path / "looks")


def test_images_are_encoded_anew_when_asked(cli: Cli, tmp_path: Path) -> None:
    write_pair(tmp_path / "in", "large.png", picture(size=(400, 300), kind="PNG"), "x")
    write_pair(tmp_path / "in", "small.png", picture(size=(100, 80), kind="PNG"), "x")
    assert cli("pack", "in", "out", "--max-side", "200").returncode == 0
    large, small = facts(tmp_path / "out")
    assert (large["format"], large["width"], large["height"]) == ("jpeg", 200, 150)
    assert (small["format"], small["width"]) == ("png", 100)
    assert cli("pack", "in", "all", "--quality", "70").returncode == 0
    assert [one["format"] for one in facts(tmp_path / "all")] == ["jpeg", "jpeg"]


def test_headers_only_lets_damage_through(cli: Cli, tmp_path: Path) -> None:
    content = picture(size=(400, 300))
    write_pair(tmp_path / "in", "cut.jpg", content[: len(content) // 2], "x")
    assert cli("pack", "in", "out", "--headers-only").returncode == 0
    assert facts(tmp_path / "out")[0]["phash"] is None
    assert cli("pack", "in", "full").returncode == 2
    both = cli("pack", "in", "b", "--headers-only", "--near-duplicates", "3")
    assert (both.returncode, both.stderr.count("\n")) == (2, 1)


def test_a_pattern_names_its_images(cli: Cli, tmp_path: Path) -> None:
    album(tmp_path / "in", 6)
    write_pair(tmp_path / "in", "other/9.png", picture(kind="PNG"), "x")
    run = cli("pack", "in/**/*.jpg", "out", "--json")
    assert json.loads(run.stdout)["samples"] == 6
    assert {one["source"] for one in facts(tmp_path / "out")} >= {"000.jpg", "more/002.jpg"}
    assert "no images in it" in cli("pack", "in/*.webp", "none").stderr


# ------------------------------------------------------------------ S3


def upload(aws: Aws, folder: Path, prefix: str) -> None:
    objects = {
        f"{prefix}{path.relative_to(folder).as_posix()}": path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }
    aws.make_bucket("raw", **objects)


def below(aws: Aws, bucket: str, prefix: str) -> dict[str, bytes]:
    s3 = aws.client("s3")
    listed = s3.list_objects_v2(Bucket=bucket, Prefix=prefix).get("Contents", [])
    return {
        one["Key"].removeprefix(prefix): s3.get_object(Bucket=bucket, Key=one["Key"])["Body"].read()
        for one in listed
    }


@pytest.fixture
def cloud(cli: Cli, aws: Aws) -> Any:
    def run(*arguments: object) -> Any:
        options = {"network": "loopback", "env": aws.environment}
        return cli("--region", "us-east-1", *arguments, **options)

    return run


def test_a_prefix_becomes_shards_in_a_prefix(
    cli: Cli, cloud: Any, aws: Aws, tmp_path: Path
) -> None:
    """The same bytes as from a folder to a folder, and nothing else left behind."""
    album(tmp_path / "in", 12)
    write_pair(tmp_path / "in", "cut.jpg", picture()[:300], "x")
    write_pair(tmp_path / "in", "silent.jpg", picture(), None)
    upload(aws, tmp_path / "in", "photos/")
    aws.make_bucket("packed")
    run = cloud("pack", "s3://raw/photos/", "s3://packed/set", "--shard-size", "20KB", "--json")
    assert run.returncode == 0, run.stderr
    assert json.loads(run.stdout)["shards_path"] == "s3://packed/set/shards"
    assert rejected(run) == {"image-corrupt": 1, "caption-missing": 1}
    assert cli("pack", "in", "out", "--shard-size", "20KB").returncode == 0
    here = {name: content for name, content in tree(tmp_path / "out").items() if "." in name}
    assert below(aws, "packed", "set/") == here
    again = cloud("pack", "s3://raw/photos/", "s3://packed/set", "--shard-size", "20KB")
    assert "already packed 12 samples" in again.stderr


def test_a_prefix_that_was_left_unfinished_goes_on(
    cli: Cli, cloud: Any, aws: Aws, tmp_path: Path
) -> None:
    """Killed in the middle: finished shards are not written again, the rest is byte for byte."""
    for number in range(24):
        content = picture(number, size=(700, 500), kind="PNG")
        write_pair(tmp_path / "in", f"{number:02}.png", content, "x")
    upload(aws, tmp_path / "in", "photos/")
    aws.make_bucket("packed")
    arguments = ["pack", "s3://raw/photos/", "s3://packed/set", "--shard-size", "30KB"]
    program = "import sys; from sm_train.toolkit.cli import main; main(sys.argv[1:])"
    process = subprocess.Popen(
        [sys.executable, "-c", program, "--region", "us-east-1", *arguments, "--workers", "2"],
        env=clean_environment(tmp_path) | aws.environment,
        start_new_session=True,
    )
    deadline = time.monotonic() + 60
    while not any(".parquet" in name for name in below(aws, "packed", "set/.packing/")):
        assert process.poll() is None
        assert time.monotonic() < deadline
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    # A shard without its record counts for nothing: it is made again, with the same bytes.
    records = below(aws, "packed", "set/.packing/")
    finished = {
        key: when
        for key, when in times(aws, "packed", "set/shards/").items()
        if f"{key.rpartition('/')[2]}.parquet" in records
    }
    assert finished
    assert "index.parquet" not in below(aws, "packed", "set/")
    # The parts of an upload that was cut off are billed until somebody gives them up.
    names = (f"set/shards/shard-{number:06d}.tar" for number in range(24))
    cut_off = next(key for key in names if key not in finished)
    for key in (cut_off, "set/shards/theirs.tar"):
        aws.client("s3").create_multipart_upload(Bucket="packed", Key=key)
    time.sleep(1.1)  # S3's own times are whole seconds: what is written again would show
    assert cloud(*arguments).returncode == 0
    assert finished.items() <= times(aws, "packed", "set/shards/").items()
    assert cli("pack", "in", "out", "--shard-size", "30KB").returncode == 0
    here = {name: content for name, content in tree(tmp_path / "out").items() if "." in name}
    assert below(aws, "packed", "set/") == here
    left = aws.client("s3").list_multipart_uploads(Bucket="packed")["Uploads"]
    assert [one["Key"] for one in left] == ["set/shards/theirs.tar"]


def times(aws: Aws, bucket: str, prefix: str) -> dict[str, Any]:
    listed = aws.client("s3").list_objects_v2(Bucket=bucket, Prefix=prefix).get("Contents", [])
    return {one["Key"]: one["LastModified"] for one in listed}


def test_a_table_may_name_objects(cloud: Any, aws: Aws, tmp_path: Path) -> None:
    album(tmp_path / "in", 4)
    upload(aws, tmp_path / "in", "photos/")
    rows = [
        {"image": f"s3://raw/photos/{name}", "caption": name}
        for name in ("000.jpg", "more/002.jpg", "gone.jpg")
    ]
    (tmp_path / "list.jsonl").write_text("\n".join(map(json.dumps, rows)))
    run = cloud("pack", tmp_path / "list.jsonl", tmp_path / "out", "--json")
    assert run.returncode == 0, run.stderr
    assert rejected(run) == {"image-missing": 1}
    assert [one["source"] for one in facts(tmp_path / "out")] == [
        "s3://raw/photos/000.jpg",
        "s3://raw/photos/more/002.jpg",
    ]
    for number, name in enumerate(ShardIndex(tmp_path / "out/index.parquet").names):
        expected = ShardIndex(tmp_path / "out/index.parquet").shard(number)
        verify_shard(tmp_path / "out/shards" / name, expected)


def test_without_a_bucket_it_is_one_line(cloud: Any, aws: Aws, tmp_path: Path) -> None:
    album(tmp_path / "in", 4)
    nowhere = cloud("pack", "s3://raw/photos/", tmp_path / "out")
    assert nowhere.returncode != 0
    assert nowhere.stderr.startswith("sm-train: s3://raw/photos/: AWS answers NoSuchBucket")
    into = cloud("pack", tmp_path / "in", "s3://raw/set")
    assert into.returncode != 0
    assert into.stderr.count("\n") == 1
    assert "s3://raw/set" in into.stderr
