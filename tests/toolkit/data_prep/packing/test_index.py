"""``sm-train index``: creates the index of shards that sm-train did not pack."""

from __future__ import annotations

import gzip
import io
import json
import os
import stat
import tarfile
from pathlib import Path
from typing import Any

import pytest
from sm_train.entrypoints.shards.shard_index import ShardIndex
from sm_train.entrypoints.shards.shard_verification import verify_shard

from tests.conftest import Aws, Cli
from tests.support.cluster.training_jobs import png, sample, write_shard, write_shards
from tests.support.run_files import write_run


def test_index_of_a_folder_is_written_next_to_it(cli: Cli, tmp_path: Path) -> None:
    write_shards(tmp_path / "shards" / "a", shards=2, each=3)
    write_shard(
        tmp_path / "shards" / "b.tar", {"0": {"png": png(3, side=24), "txt": b"x"}, "1": sample(1)}
    )
    run = cli("index", "shards", "--json")
    assert run.returncode == 0
    result = json.loads(run.stdout)
    assert result == {
        "index": "index.parquet",
        "shards": 3,
        "samples": 8,
        "colors": {
            "profiles": {"none": 8},
            "depths": {"8": 8},
            "cmyk": 0,
            "hdr": 0,
            "unconverted": {},
        },
        "damaged": [],
        "unusable": {},
        "described": 3,
        "up_to_date": False,
        "bytes": sum(path.stat().st_size for path in (tmp_path / "shards").rglob("*.tar")),
    }
    index = ShardIndex(tmp_path / "index.parquet")
    assert index.names == ["a/shard-000.tar", "a/shard-001.tar", "b.tar"]
    sizes = index.image_sizes(2)
    assert sizes is not None
    assert [values.tolist() for values in sizes] == [[24, 8], [24, 8]]
    for number, name in enumerate(index.names):
        shard = index.shard(number)
        without_sizes = type(shard)(
            shard.name, shard.bytes, shard.blake3, shard.keys, shard.offsets
        )
        verify_shard(tmp_path / "shards" / name, without_sizes)
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".index")] == []


@pytest.mark.slow
def test_an_up_to_date_index_is_not_rewritten(cli: Cli, tmp_path: Path) -> None:
    write_shards(tmp_path / "shards", shards=2, each=3)
    assert cli("index", "shards").returncode == 0
    before = (tmp_path / "index.parquet").stat().st_mtime_ns
    again = cli("index", "shards", "--json")
    assert json.loads(again.stdout)["up_to_date"] is True
    assert "is up to date" in again.stderr
    assert (tmp_path / "index.parquet").stat().st_mtime_ns == before
    write_shards(tmp_path / "shards", shards=3, each=3)
    assert json.loads(cli("index", "shards", "--json").stdout)["shards"] == 3


@pytest.mark.slow
def test_each_folder_has_an_index_of_its_own(cli: Cli, tmp_path: Path) -> None:
    """img2dataset gives the shards of every folder the same names."""
    for name, count in (("train", 3), ("val", 2)):
        write_shards(tmp_path / "data" / name, shards=2, each=count)
    for name, count in (("train", 3), ("val", 2), ("train", 3)):
        result = json.loads(cli("index", f"data/{name}", "--json").stdout)
        assert result["index"] == f"data/{name}.index.parquet"
        assert result["samples"] == 2 * count
    assert not list((tmp_path / "data").glob("*/*.parquet")), "never among the shards"
    # From inside the folder, and with a slash.
    for arguments, folder in ((("index", "."), "data/val"), (("index", "val/"), "data")):
        again = cli(*arguments, "--json", cwd=tmp_path / folder)
        assert json.loads(again.stdout)["up_to_date"] is True, again.stderr
    header = ShardIndex(tmp_path / "data" / "val.index.parquet").header
    assert header.prefix == "val"


def test_an_index_of_other_shards_is_not_overwritten(cli: Cli, tmp_path: Path) -> None:
    for name in ("train", "val"):
        write_shards(tmp_path / name, shards=1, each=2)
    assert cli("index", "train").returncode == 0
    index = (tmp_path / "train.index.parquet").rename(tmp_path / "val.index.parquet")
    content = index.read_bytes()
    refused = cli("index", "val")
    assert refused.returncode == 2
    assert refused.stderr == (
        "sm-train: val.index.parquet: is the index of other shards, of train/; move it or rename "
        "val/\n"
    )
    assert index.read_bytes() == content


@pytest.mark.slow
def test_a_shard_replaced_by_one_of_equal_size_is_indexed_again(cli: Cli, tmp_path: Path) -> None:
    write_shards(tmp_path / "photos", shards=2, each=3)
    assert cli("index", "photos").returncode == 0
    shard, index = tmp_path / "photos" / "shard-000.tar", tmp_path / "photos.index.parquet"
    before, size = ShardIndex(index).content_hashes()[0], shard.stat().st_size
    write_shard(shard, {f"{number:04d}": sample(number + 100) for number in range(3)})
    assert shard.stat().st_size == size
    assert json.loads(cli("index", "photos", "--json").stdout)["up_to_date"] is False
    assert ShardIndex(index).content_hashes()[0] != before


def test_an_existing_index_keeps_its_mode_and_what_is_no_file_stays(
    cli: Cli, tmp_path: Path
) -> None:
    write_shards(tmp_path / "shards", shards=1, each=1)
    (tmp_path / "other").mkdir()
    index, target = tmp_path / "index.parquet", tmp_path / "other" / "target"
    target.write_bytes(b"old")
    target.chmod(0o640)
    index.symlink_to(target)
    assert cli("index", "shards").returncode == 0
    assert ShardIndex(target).names == ["shard-000.tar"]
    assert (index.is_symlink(), stat.S_IMODE(target.stat().st_mode)) == (True, 0o640)
    index.unlink()
    os.mkfifo(index)
    refused = cli("index", "shards")
    assert (refused.returncode, "index.parquet: is no file" in refused.stderr) == (2, True)
    assert index.is_fifo()


@pytest.mark.slow
def test_damage_is_listed_and_intact_samples_are_indexed(cli: Cli, tmp_path: Path) -> None:
    write_shards(tmp_path / "shards", shards=3, each=5)
    cut = tmp_path / "shards" / "shard-001.tar"
    cut.write_bytes(cut.read_bytes()[:4000])
    (tmp_path / "shards" / "shard-002.tar").write_bytes(b"")
    run = cli("index", "shards", "--json")
    result = json.loads(run.stdout)
    # The truncated shard has an intact sample and one without its caption.
    assert (result["shards"], result["samples"]) == (3, 5 + 2)
    assert [damage["shard"] for damage in result["damaged"]] == ["shard-001.tar", "shard-002.tar"]
    assert "damaged: shard-001.tar: offset " in run.stderr
    assert (run.returncode, result["unusable"]["no-caption"]["count"]) == (3, 1)


@pytest.mark.slow
def test_samples_that_cannot_be_trained_on_are_counted_and_named(cli: Cli, tmp_path: Path) -> None:
    image, text = png(0), b"text"
    samples: dict[str, list[tuple[str, bytes]]] = {
        "dotted": [(f"v1.{n}.{end}", image) for n in range(5) for end in ("png", "txt")],
        "apart": [("a.png", image), ("b.png", image), ("a.txt", text), ("b.txt", text)],
        "partial": [("a.txt", text), ("b.png", image), ("c.png", image), ("c.txt", text)],
        "fields": [("a.png", image), ("a.json", b'{"alt": {"long": "text"}, "empty": ""}')],
        "texts": [("a.jpg", b"aGVsbG8="), ("a.txt", text), ("b.png", b""), ("b.txt", text)],
    }
    (tmp_path / "shards").mkdir()
    for name, files in samples.items():
        write_tar(tmp_path / "shards" / f"{name}.tar", files)
    packed = gzip.compress((tmp_path / "shards" / "fields.tar").read_bytes())
    (tmp_path / "shards" / "inside.tar").write_bytes(packed)
    (tmp_path / "shards" / "other.tar.gz").write_bytes(packed)

    first = cli("index", "shards", "--json")
    assert first.returncode == 3
    unusable = {
        "compressed": {"count": 2, "first": ["other.tar.gz", "inside.tar"]},
        "dotted-name": {"count": 5, "first": [f"dotted.tar v1.{n}.png" for n in range(3)]},
        "separated": {"count": 4, "first": ["apart.tar a", "apart.tar b", "apart.tar a"]},
        "no-caption": {"count": 2, "first": ["fields.tar a", "partial.tar b"]},
        "no-image": {"count": 1, "first": ["partial.tar a"]},
        "image-unreadable": {"count": 2, "first": ["texts.tar a", "texts.tar b"]},
    }
    assert json.loads(first.stdout)["unusable"] == unusable
    assert json.loads(first.stdout)["damaged"] == []
    assert (
        "error: 5 images with a dot in the name: dotted.tar v1.0.png, dotted.tar v1.1.png, "
        "dotted.tar v1.2.png, …; a sample's key ends at the first dot: rename the files, or run "
        "`sm-train pack`\n" in first.stderr
    )
    again = cli("index", "shards", "--json")
    assert (again.returncode, json.loads(again.stdout)["up_to_date"]) == (3, True)
    assert json.loads(again.stdout)["unusable"] == unusable

    def counts(data: dict[str, Any]) -> dict[str, int]:
        data = {"uri": "s3://ai-bucket/shards/"} | data
        run = cli("index", "shards", "--json", "--for", write_run(tmp_path, data=data))
        found: dict[str, Any] = json.loads(run.stdout)["unusable"]
        return {reason: samples["count"] for reason, samples in found.items()}

    long = {"json": [{"field": "alt.long"}], "txt": 1}
    assert counts({"caption": long})["no-caption"] == 1
    assert counts({"caption": {"json": [{"field": "empty"}], "txt": 1}})["no-caption"] == 2
    assert counts({"caption": long, "transform": "samples:prepare"}) == {"compressed": 2}


def write_tar(path: Path, files: list[tuple[str, bytes]]) -> None:
    """Write files in this order."""
    with tarfile.open(path, "w", format=tarfile.USTAR_FORMAT) as tar:
        for name, content in files:
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))


def test_a_folder_without_shards_is_an_error(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "shards").mkdir()
    run = cli("index", "shards")
    assert (run.returncode, run.stderr) == (
        2,
        "sm-train: shards: no .tar in it; create shards with `sm-train pack`\n",
    )
    assert list(tmp_path.iterdir()) == [tmp_path / "shards"]
    assert "no such folder" in cli("index", "nowhere").stderr


@pytest.mark.slow
def test_index_of_an_s3_prefix_is_written_next_to_it(cli: Cli, aws: Aws, tmp_path: Path) -> None:
    write_shards(tmp_path / "local", shards=2, each=3)
    objects = {
        f"set/shards/{path.name}": path.read_bytes() for path in (tmp_path / "local").iterdir()
    }
    aws.make_bucket("ai-bucket", **objects)
    arguments = ["--region", "us-east-1", "index", "s3://ai-bucket/set/shards/", "--json"]
    run = cli(*arguments, network="loopback", env=aws.environment)
    assert run.returncode == 0, run.stderr
    result = json.loads(run.stdout)
    assert result["index"] == "s3://ai-bucket/set/index.parquet"
    aws.client("s3").download_file(
        "ai-bucket", "set/index.parquet", str(tmp_path / "index.parquet")
    )
    assert ShardIndex(tmp_path / "index.parquet").names == ["shard-000.tar", "shard-001.tar"]
    assert (
        json.loads(cli(*arguments, network="loopback", env=aws.environment).stdout)["up_to_date"]
        is True
    )


@pytest.mark.slow
@pytest.mark.integration
def test_submit_rejects_a_run_without_its_index(cli: Cli, aws: Aws, tmp_path: Path) -> None:
    """The index channel would be empty, and the job would fail after its start."""
    aws.make_bucket("ai-bucket", **{f"set/shards/{n}.tar": b"x" for n in range(4)})
    run = write_run(tmp_path, data={"uri": "s3://ai-bucket/set/shards/"}, bucket="ai-bucket")
    submitted = cli("submit", run, "--yes", network="loopback", env=aws.environment)
    assert submitted.returncode == 3
    assert submitted.stderr.strip().splitlines()[-1] == (
        "sm-train: data.index: s3://ai-bucket/set/index.parquet does not exist; run `sm-train "
        "index s3://ai-bucket/set/shards/`, or write index: false, and every start reads the "
        "headers of all shards"
    )
    assert aws.bodies("CreateTrainingJob") == []
    checked = cli("check", run, "--json", network="loopback", env=aws.environment)
    findings = json.loads(checked.stdout)["findings"]
    assert "index-missing" in {finding["code"] for finding in findings}


@pytest.mark.slow
def test_check_compares_shards_with_their_index(cli: Cli, tmp_path: Path) -> None:
    write_shards(tmp_path / "shards", shards=4, each=5)
    assert cli("index", "shards").returncode == 0
    run = write_run(tmp_path, data={"uri": "s3://ai-bucket/shards/", "local": "shards"})
    assert "index-stale" not in cli("check", run, "--offline").stderr
    (tmp_path / "shards" / "shard-003.tar").unlink()
    cut = tmp_path / "shards" / "shard-001.tar"
    cut.write_bytes(cut.read_bytes()[:4000])
    checked = cli("check", run, "--offline")
    assert checked.returncode == 3
    assert "shard-001.tar has 4,000 bytes, but the index lists " in checked.stderr
    assert "shard-003.tar does not exist, but the index lists " in checked.stderr
