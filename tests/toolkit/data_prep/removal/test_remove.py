"""``sm-train remove``: the images leave the shards, the others keep their keys and bytes."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import sys
import tarfile
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from sm_train.entrypoints.lineage.data_record import (
    Anchor,
    ChannelRecord,
    DataRecord,
    RecordWriter,
    ShardTable,
)
from sm_train.entrypoints.shards.removal_list import RemovalList, decode_list
from sm_train.entrypoints.shards.shard_index import ShardIndex
from sm_train.entrypoints.shards.shard_verification import verify_shard
from sm_train.entrypoints.storage.store import S3Access
from sm_train.toolkit.base.errors import UserError
from sm_train.toolkit.data_prep.packing.shard_set import find_shard_set
from sm_train.toolkit.data_prep.removal.removal_report import plan_lines
from sm_train.toolkit.data_prep.removal.remove_samples import plan_removal, remove_samples
from sm_train.toolkit.data_prep.removal.rewrite_shards import successor

from tests.conftest import Aws, Cli
from tests.support.image_files import image_bytes, read_tree, write_album, write_pair
from tests.support.run_files import write_run
from tests.toolkit.data_prep.packing.pack_options_support import read_objects, upload_folder

IMAGES = 30
SIZE = ("--shard-size", "20KB")
COLUMNS = ("--index-column", "owner", "--index-column", "key_number")
Members = dict[str, bytes]


@pytest.fixture
def packed(cli: Cli, tmp_path: Path) -> Path:
    """Return a pack with a column ``owner`` in its index."""
    write_album(tmp_path / "in", IMAGES, flat=True)
    rows = [
        {
            "image": f"{n:03}.jpg",
            "caption": f"{n}",
            "owner": "ada" if n < 9 else "bob",
            "key_number": n,
        }
        for n in range(IMAGES)
    ]
    (tmp_path / "in" / "list.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    done = cli("pack", "in/list.jsonl", "out", *SIZE, *COLUMNS)
    assert done.returncode == 0, done.stderr
    return tmp_path / "out"


def members(folder: Path) -> Members:
    """Return the content of every file in the shards that the index lists."""
    index = ShardIndex(folder / "index.parquet")
    found = {}
    for row, name in enumerate(index.names):
        verify_shard(folder / "shards" / name, index.shard(row))
        with tarfile.open(folder / "shards" / name) as tar:
            for member in tar:
                assert member.name not in found
                found[member.name] = tar.extractfile(member).read()  # type: ignore[union-attr]
    return found


def without(content: Members, *numbers: int) -> Members:
    keys = {f"{number:09}" for number in numbers}
    return {name: text for name, text in content.items() if name.partition(".")[0] not in keys}


def removals(folder: Path) -> RemovalList:
    path = folder / "index.parquet.removed"
    return decode_list(path.read_bytes(), str(path))


@pytest.mark.integration
def test_others_keep_their_keys_bytes_and_columns(cli: Cli, packed: Path) -> None:
    """By key, by the image's name, and by a condition on the index; repeatedly."""
    before = members(packed)
    removed = []
    for arguments, numbers in (
        (("000000012", "020.jpg"), (12, 20)),
        (("--where", "owner = 'ada'"), tuple(range(9))),
        (("013.jpg",), (13,)),
    ):
        done = cli("remove", "out", *arguments, "--yes")
        assert done.returncode == 0, done.stderr
        removed += numbers
        assert members(packed) == without(before, *removed)
    assert sorted(removals(packed).sources) == sorted(f"{number:03}.jpg" for number in removed)
    index = ShardIndex(packed / "index.parquet")
    assert {owner for row in range(len(index)) for owner in index.shard(row).columns["owner"]} == {
        "bob"
    }
    # Nothing else is left behind.
    assert sorted(path.name for path in (packed / "shards").iterdir()) == sorted(index.names)
    assert sorted(path.name for path in packed.iterdir()) == [
        "index.parquet",
        "index.parquet.removed",
        "index.parquet.replaced",
        "inputs",
        "shards",
    ]


@pytest.mark.integration
def test_what_is_removed_is_shown_and_confirmed(cli: Cli, packed: Path) -> None:
    before = read_tree(packed)
    shown = cli("remove", "out", "004.jpg", "000000005", "--dry-run")
    assert shown.returncode == 0
    assert shown.stderr == (
        "removes 2 of 30 samples from out/shards:\n"
        "  000000004 in shard-000001.tar (004.jpg)\n"
        "  000000005 in shard-000001.tar (005.jpg)\n"
        "rewrites 1 of 7 shards under new names: 0.0 MB are read and written through this "
        "computer\n"
    )
    unanswered = cli("remove", "out", "004.jpg")
    assert unanswered.returncode == 2
    assert "not confirmed; --yes starts without asking" in unanswered.stderr
    declined = cli("remove", "out", "004.jpg", stdin="n\n")
    assert declined.returncode == 130
    assert read_tree(packed) == before
    agreed = cli("remove", "out", "004.jpg", "--json", stdin="y\n")
    assert agreed.returncode == 0
    document = json.loads(agreed.stdout)
    assert document["rewritten"] == {"shard-000001.tar": "shard-000001-r1.tar"}
    assert document["deleted"] == ["shard-000001.tar"]
    assert (document["kept"], document["used_by"], document["versions_kept"]) == ([], [], None)


@pytest.mark.integration
def test_mistakes_change_nothing(cli: Cli, packed: Path) -> None:
    before = read_tree(packed)
    for arguments, message in (
        (("nope", "004.jpg"), "nope: neither a key nor an image of shards"),
        (("x", "y", "z"), "x and 2 others: neither a key nor an image of shards"),
        (("--where", "licence = 'x'"), "--where: the index has no column licence"),
        (("--where", "owner = 'eve'"), "--where: none of 30 samples fulfils owner = 'eve'"),
        (("--where", "TRUE"), "out/shards: no sample would be left; delete the whole set"),
        (("004.jpg", "--where", "TRUE"), "--where: is given with KEYS; use one of them"),
    ):
        done = cli("remove", "out", *arguments, "--yes")
        assert done.returncode == 2
        assert message in done.stderr
        assert read_tree(packed) == before


@pytest.mark.integration
def test_keys_may_come_from_a_file_and_without_any_there_is_nothing_to_do(
    cli: Cli, packed: Path
) -> None:
    assert "nothing to remove" in cli("remove", "out").stderr
    done = cli("remove", "out", "--from", "-", "--yes", stdin="004.jpg\n\n000000005\n")
    assert done.returncode == 0, done.stderr
    assert removals(packed).sources == {"004.jpg", "005.jpg"}
    assert "elsewhere: no such folder of shards" in cli("remove", "elsewhere", "004.jpg").stderr


@pytest.mark.slow
def test_shards_of_others_lose_samples_by_their_keys(cli: Cli, packed: Path) -> None:
    """The index of any folder lies next to it, as does the list."""
    folder = packed.parent / "data" / "train"
    folder.parent.mkdir()
    (packed / "shards").rename(folder)
    assert cli("index", "data/train").returncode == 0
    done = cli("remove", "data/train", "000000003", "--yes")
    assert done.returncode == 0, done.stderr
    assert sorted(path.name for path in folder.parent.iterdir()) == [
        "train",
        "train.index.parquet",
        "train.index.parquet.listing",
        "train.index.parquet.removed",
        "train.index.parquet.replaced",
    ]
    assert "000000003" not in ShardIndex(folder.parent / "train.index.parquet").keys(0)
    again = cli("index", "data/train", "--json")
    assert json.loads(again.stdout)["described"] == 1, again.stderr


@pytest.mark.slow
def test_packing_never_adds_them_again(cli: Cli, packed: Path, tmp_path: Path) -> None:
    """Neither with --append, also as changed images, nor into an emptied or another folder."""
    assert cli("remove", "out", "004.jpg", "020.jpg", "--yes").returncode == 0
    write_pair(tmp_path / "in", "004.jpg", image_bytes(999), "another picture")
    write_pair(tmp_path / "in", "new.jpg", image_bytes(998), "new")
    others = {"owner": "bob", "key_number": 99}
    rows = [{"image": f"{n:03}.jpg", "caption": f"{n}", **others} for n in (4, 20)]
    rows += [{"image": "new.jpg", "caption": "new", **others}]
    (tmp_path / "in" / "more.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    before = members(packed)
    done = cli("pack", "in/more.jsonl", "out", *SIZE, *COLUMNS, "--append")
    assert done.returncode == 0, done.stderr
    assert "rejected 2: 2 image-removed (004.jpg, 020.jpg)" in done.stderr
    after = members(packed)
    assert {name.partition(".")[0] for name in after.keys() - before.keys()} == {f"{IMAGES:09}"}
    assert after | before == after
    again = cli("pack", "in/more.jsonl", "out", *SIZE, *COLUMNS, "--append")
    assert "nothing to append" in again.stderr
    other = cli("pack", "in/more.jsonl", "other", *SIZE, *COLUMNS, "--removed", "out")
    assert other.returncode == 0, other.stderr
    assert len(members(tmp_path / "other")) == 3
    # An append without the option leaves out what the pack left out.
    write_pair(tmp_path / "in", "newer.jpg", image_bytes(997), "newer")
    rows += [{"image": "newer.jpg", "caption": "newer", **others}]
    (tmp_path / "in" / "more.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    grown = cli("pack", "in/more.jsonl", "other", *SIZE, *COLUMNS, "--append")
    assert grown.returncode == 0, grown.stderr
    assert len(members(tmp_path / "other")) == 6
    for name in ("shards", "inputs"):
        (packed / name).rename(tmp_path / name)
    (packed / "index.parquet").unlink()
    emptied = cli("pack", "in/more.jsonl", "out", *SIZE, *COLUMNS)
    assert emptied.returncode == 0, emptied.stderr
    assert len(members(packed)) == 6


def test_a_shard_without_other_samples_disappears(cli: Cli, packed: Path) -> None:
    index = ShardIndex(packed / "index.parquet")
    names, keys = index.names, index.keys(1)
    done = cli("remove", "out", *keys, "--yes")
    assert done.returncode == 0, done.stderr
    assert ShardIndex(packed / "index.parquet").names == [names[0], *names[2:]]
    assert not (packed / "shards" / names[1]).exists()


# ------------------------------------------------------------------ interruptions


def run_and_die(folder: Path, keys: tuple[str, ...], writes: int) -> None:
    """Remove samples; kill this process at the first rename or deletion after ``writes`` others."""

    def count(event: str, _: Any) -> None:
        nonlocal writes
        if event in ("os.rename", "os.remove", "os.link"):
            if not writes:
                os.kill(os.getpid(), signal.SIGKILL)
            writes -= 1

    plan = plan_removal(find_shard_set(str(folder), S3Access()), keys, None)
    sys.addaudithook(count)
    remove_samples(plan, lambda done, total: None)
    os._exit(0)


@pytest.mark.integration
def test_a_removal_that_is_killed_at_any_write_is_finished_by_the_next(
    packed: Path, tmp_path: Path
) -> None:
    """From the list on, the samples are removed; the end does not depend on where it was killed."""
    before = members(packed)
    keys = ("004.jpg", "005.jpg", "020.jpg")
    context = multiprocessing.get_context("fork")
    for writes in range(100):
        folder = tmp_path / f"copy-{writes}"
        os.system(f"cp -a {packed} {folder}")
        process = context.Process(target=run_and_die, args=(folder, keys, writes))
        process.start()
        process.join()
        if process.exitcode == 0:
            break
        assert process.exitcode == -signal.SIGKILL
        # Whatever is there can be read; a job sees all samples, or those that are left.
        assert members(folder) in (before, without(before, 4, 5, 20))
        shards = find_shard_set(str(folder), S3Access())
        is_listed = (folder / "index.parquet.removed").exists()
        # The same words finish it, whether the samples are in the list, in the index or in neither.
        if is_listed and writes % 2:
            where = "key_number IN (4, 5, 20)"
            plan = plan_removal(shards, (), where)
            remove_samples(plan, lambda done, total: None)
            plan = plan_removal(shards, ("006.jpg",), None)
        else:
            plan = plan_removal(shards, (*keys, "006.jpg"), None)
        remove_samples(plan, lambda done, total: None)
        assert members(folder) == without(before, 4, 5, 6, 20)
        assert removals(folder).sources == {*keys, "006.jpg"}
        assert removals(folder).rewrites == {}
        assert sorted(path.name for path in (folder / "shards").iterdir()) == sorted(
            ShardIndex(folder / "index.parquet").names
        )
    assert writes > 10


def test_a_shard_of_which_an_interrupted_removal_would_have_left_something_disappears(
    packed: Path,
) -> None:
    """Its planned successor may exist already; it is not in the index with no sample."""
    index = ShardIndex(packed / "index.parquet")
    names, keys = index.names, index.keys(1)
    shards = find_shard_set(str(packed), S3Access())

    def stop(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        remove_samples(plan_removal(shards, keys[:1], None), stop)
    assert list(removals(packed).rewrites) == [names[1]]
    remove_samples(plan_removal(shards, keys, None), lambda done, total: None)
    left = ShardIndex(packed / "index.parquet")
    assert left.names == [names[0], *names[2:]]
    assert sorted(path.name for path in (packed / "shards").iterdir()) == left.names
    assert names in removals(packed).earlier_names(left.names)


@pytest.mark.slow
def test_a_new_pack_of_the_same_place_keeps_the_images_and_forgets_the_shards(
    cli: Cli, packed: Path, tmp_path: Path
) -> None:
    """Keys and names of shards are those of other images then, and columns may be others."""
    assert cli("remove", "out", "004.jpg", "011.jpg", "--yes").returncode == 0
    for name in ("shards", "inputs"):
        (packed / name).rename(tmp_path / name)
    (packed / "index.parquet").unlink()
    table = tmp_path / "in" / "list.jsonl"
    rows = [json.loads(line) for line in table.read_text().splitlines()][2:]
    table.write_text("".join(json.dumps(row | {"stars": 5}) + "\n" for row in rows))
    again = ("pack", "in/list.jsonl", "out", *SIZE, *COLUMNS, "--index-column", "stars")
    assert cli(*again).returncode == 0
    assert "nothing to remove" in cli("remove", "out").stderr
    assert removals(packed).sources == {"004.jpg", "011.jpg"}
    assert sum(removals(packed).days.values()) == 2
    before = members(packed)
    done = cli("remove", "out", "005.jpg", "--yes")
    assert done.returncode == 0, done.stderr
    assert len(before) - len(members(packed)) == 3
    assert not (packed / ".removing").exists()


def test_an_index_that_another_command_wrote_is_not_overwritten(packed: Path) -> None:
    shards = find_shard_set(str(packed), S3Access())
    plan = plan_removal(shards, ("004.jpg",), None)

    def meddle(done: int, total: int) -> None:
        if done == total:
            content = (packed / "index.parquet").read_bytes()
            (packed / "other").write_bytes(content)
            (packed / "other").rename(packed / "index.parquet")

    before = members(packed)
    with pytest.raises(UserError, match="another command has written it; run this again"):
        remove_samples(plan, meddle, None)
    assert members(packed) == before
    remove_samples(plan_removal(shards, (), None), lambda done, total: None, None)
    assert members(packed) == without(before, 4)


def test_a_shard_that_is_not_as_its_index_says_is_not_rewritten(cli: Cli, packed: Path) -> None:
    index = ShardIndex(packed / "index.parquet")
    path = packed / "shards" / index.names[0]
    start, stop = index.offsets(0)[2:4].tolist()
    content = bytearray(path.read_bytes())
    content[start:stop] = bytes(stop - start)
    path.write_bytes(content)
    done = cli("remove", "out", "001.jpg", "--yes")
    assert done.returncode == 2
    assert "shard-000000.tar: is not as in the index; run `sm-train index` again" in done.stderr


def test_the_bytes_that_are_rewritten_are_shown(packed: Path) -> None:
    plan = plan_removal(find_shard_set(str(packed), S3Access()), ("004.jpg",), None)
    shown = "\n".join(plan_lines(replace(plan, bytes=12_340_000)))
    assert "12.3 MB are read and written through this computer" in shown


def test_new_names_are_free() -> None:
    assert successor("a.tar", []) == "a-r1.tar"
    assert successor("a-r1.tar", ["a-r2.tar"]) == "a-r3.tar"
    assert successor("x/a.tar", ["a-r1.tar"]) == "x/a-r1.tar"


# ------------------------------------------------------------------ S3


@pytest.fixture
def stored(packed: Path, aws: Aws) -> Aws:
    """Put the pack into a bucket with versioning."""
    client = aws.client("s3")
    client.create_bucket(Bucket="raw")
    client.put_bucket_versioning(Bucket="raw", VersioningConfiguration={"Status": "Enabled"})
    upload_folder(aws, packed, "set/")
    return aws


def remove_in_s3(cli: Cli, aws: Aws, *arguments: str) -> Any:
    options = ("--region", "us-east-1", "remove", "s3://raw/set", *arguments, "--yes")
    return cli(*options, network="loopback", env=aws.environment)


@pytest.mark.integration
def test_old_shards_in_s3_are_deleted_with_their_versions(cli: Cli, stored: Aws) -> None:
    done = remove_in_s3(cli, stored, "004.jpg")
    assert done.returncode == 0, done.stderr
    objects = read_objects(stored, "raw", "set/")
    assert "shards/shard-000001.tar" not in objects
    assert "shards/shard-000001-r1.tar" in objects
    versions = stored.client("s3").list_object_versions(Bucket="raw", Prefix="set/shards/")
    assert "DeleteMarkers" not in versions
    assert {version["Key"] for version in versions["Versions"]} == {
        f"set/{name}" for name in objects if name.startswith("shards/")
    }
    assert stored.without_owner == []


@pytest.mark.integration
def test_versions_that_may_not_be_deleted_are_named(cli: Cli, stored: Aws) -> None:
    stored.denied_queries.add("versions")
    done = remove_in_s3(cli, stored, "004.jpg")
    assert done.returncode == 0, done.stderr
    assert "earlier versions of the deleted shards remain in s3://raw/set/shards" in done.stderr
    stored.denied_queries.clear()
    assert "shards/shard-000001.tar" not in read_objects(stored, "raw", "set/")


def start_job(aws: Aws, name: str, uri: str) -> None:
    """Start a training job that reads ``uri``."""
    aws.client("sagemaker").create_training_job(
        TrainingJobName=name,
        AlgorithmSpecification={"TrainingImage": "x", "TrainingInputMode": "FastFile"},
        RoleArn="arn:aws:iam::123456789012:role/own",
        InputDataConfig=[
            {
                "ChannelName": "train",
                "DataSource": {"S3DataSource": {"S3DataType": "S3Prefix", "S3Uri": uri}},
            }
        ],
        OutputDataConfig={"S3OutputPath": "s3://raw/out"},
        ResourceConfig={"InstanceType": "ml.g5.xlarge", "InstanceCount": 1, "VolumeSizeInGB": 10},
        StoppingCondition={"MaxRuntimeInSeconds": 100},
    )


def describe_as(aws: Aws, statuses: dict[str, str]) -> None:
    """Let SageMaker list jobs with these statuses; moto's end at once."""
    created = datetime(2026, 1, 1, tzinfo=UTC).timestamp()

    def listed(body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        found = [
            {
                "TrainingJobName": name,
                "TrainingJobArn": f"arn:aws:sagemaker:us-east-1:123456789012:training-job/{name}",
                "CreationTime": created,
                "TrainingJobStatus": status,
            }
            for name, status in statuses.items()
            if status == body["StatusEquals"]
        ]
        return 200, {"TrainingJobSummaries": found}

    aws.responses["ListTrainingJobs"] = listed


@pytest.mark.integration
def test_shards_that_a_live_job_reads_are_kept_until_it_ends(cli: Cli, stored: Aws) -> None:
    """Only those of jobs that read the prefix, and started before the index switched."""
    start_job(stored, "reads", "s3://raw/set/shards/")
    start_job(stored, "other", "s3://raw/set-old/shards/")
    describe_as(stored, {"reads": "InProgress", "other": "Stopping"})
    done = remove_in_s3(cli, stored, "004.jpg")
    assert done.returncode == 3, done.stderr
    assert (
        "kept 1 old shard with the images, because they may be read by reads: shard-000001.tar; "
        "run `sm-train remove s3://raw/set` again to delete them"
    ) in done.stderr
    assert "shards/shard-000001.tar" in read_objects(stored, "raw", "set/")
    index = cli(
        *("--region", "us-east-1", "index", "s3://raw/set/shards"),
        network="loopback",
        env=stored.environment,
    )
    assert index.returncode == 2
    assert "samples are being removed from it; finish that with `sm-train remove`" in index.stderr
    # The job still reads the old shard: its next epoch skips what is removed now as well.
    done = remove_in_s3(cli, stored, "005.jpg")
    assert done.returncode == 3, done.stderr
    objects = read_objects(stored, "raw", "set/")
    listed = decode_list(objects["index.parquet.removed"], "list")
    keys = listed.keys_by_shard(pa.array(["shard-000001.tar"]))
    assert keys == {"shard-000001.tar": {"000000004", "000000005"}}
    assert sum(listed.days.values()) == 2
    describe_as(stored, {"reads": "Stopped"})
    done = remove_in_s3(cli, stored)
    assert done.returncode == 0, done.stderr
    assert "deleted 2 old shards" in done.stderr
    assert "shards/shard-000001.tar" not in read_objects(stored, "raw", "set/")


@pytest.mark.integration
def test_jobs_on_kubernetes_that_recorded_the_shards_keep_them_until_they_have_ended(
    cli: Cli, packed: Path, tmp_path: Path
) -> None:
    record_job(tmp_path / "runs" / "big", packed / "index.parquet", "kubernetes")
    record_job(tmp_path / "runs" / "other", tmp_path / "other" / "index.parquet", "kubernetes")
    record_job(tmp_path / "runs" / "laptop", packed / "index.parquet", None)
    place = ("--runs", "runs")
    done = cli("remove", "out", "004.jpg", *place, "--yes")
    assert done.returncode == 3, done.stderr
    kept = "because they may be read by big 256px (kubernetes): shard-000001.tar; "
    assert kept in done.stderr
    assert (packed / "shards" / "shard-000001.tar").exists()
    unknown = cli("remove", "out", *place, "--ended", "bigger", "--yes")
    assert unknown.returncode == 2
    message = "sm-train: --ended: bigger: no such run in the places of --runs\n"
    assert unknown.stderr == message
    # A job that starts now gets the new index.
    record_job(tmp_path / "runs" / "big", packed / "index.parquet", "kubernetes", "2999-01-01")
    done = cli("remove", "out", *place, "--yes")
    assert (done.returncode, "deleted 1 old shard" in done.stderr) == (0, True), done.stderr
    record_job(tmp_path / "runs" / "next", packed / "index.parquet", "slurm")
    done = cli("remove", "out", "005.jpg", *place, "--ended", "next", "--yes")
    assert (done.returncode, "deleted 1 old shard" in done.stderr) == (0, True), done.stderr
    record_job(tmp_path / "runs" / "next", packed / "index.parquet", "slurm")
    final = tmp_path / "runs" / "next" / "checkpoints" / "final"
    final.mkdir()
    (final / "model_index.json").write_text("{}")
    done = cli("remove", "out", "006.jpg", *place, "--yes")
    assert (done.returncode, "deleted 1 old shard" in done.stderr) == (0, True), done.stderr


def record_job(stage: Path, index: Path, platform: str | None, started: str = "2026-01-01") -> None:
    channel = ChannelRecord("train", str(index), "digest", "content", IMAGES)
    record = DataRecord(
        *(stage.name, "256px", None, "indexed", "digest", (channel,), 1),
        (Anchor(0, 0, 0, f"{started}T00:00:00+00:00"),),
        "shards.parquet",
        platform=platform,
    )
    tables = {"train": ShardTable(["shard-000001.tar"], None)}
    RecordWriter(stage / "checkpoints", started, record, tables)


@pytest.mark.integration
@pytest.mark.parametrize("live_in", ["eu-west-1", "us-west-2", "ap-south-1"])
def test_live_jobs_are_looked_for_in_every_region_that_may_read_the_bucket(
    cli: Cli, packed: Path, aws: Aws, tmp_path: Path, live_in: str
) -> None:
    """The bucket's, the environment's, and those of the run's fallbacks: none is assumed."""
    upload_folder(aws, packed, "set/", "eu-west-1")
    asked = set()

    def listed(body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        asked.add(body["_region"])
        names = (
            ["reads"] if (body["_region"], body["StatusEquals"]) == (live_in, "Stopping") else []
        )
        created = datetime(2026, 1, 1, tzinfo=UTC).timestamp()
        arn = f"arn:aws:sagemaker:{live_in}:345678901234:training-job/reads"
        summary = {"TrainingJobArn": arn, "CreationTime": created, "TrainingJobStatus": "Stopping"}
        return 200, {
            "TrainingJobSummaries": [{"TrainingJobName": name} | summary for name in names]
        }

    aws.responses["ListTrainingJobs"] = listed
    source = {"S3DataSource": {"S3DataType": "S3Prefix", "S3Uri": "s3://raw/set/shards/"}}
    channel = {"ChannelName": "train", "DataSource": source}
    aws.responses["DescribeTrainingJob"] = lambda body: (
        (200, {"TrainingJobName": "reads", "InputDataConfig": [channel]})
        if body["_region"] == live_in
        else (400, {"__type": "ValidationException", "message": "Requested resource not found."})
    )
    run = write_run(
        tmp_path,
        region="eu-west-1",
        recovery={"fallbacks": [{"region": "ap-south-1", "buckets": {"ai-bucket": "south"}}]},
    )
    environment = aws.environment | {"AWS_DEFAULT_REGION": "us-west-2"}
    done = cli(
        *("remove", "s3://raw/set", "004.jpg", "--for", run, "--yes"),
        network="loopback",
        env=environment,
    )
    assert done.returncode == 3, done.stderr
    assert "may be read by reads: shard-000001.tar" in done.stderr
    assert asked == {"eu-west-1", "us-west-2", "ap-south-1"}
    assert "shards/shard-000001.tar" in read_objects(aws, "raw", "set/")


@pytest.mark.slow
def test_unknown_jobs_are_not_taken_for_none(cli: Cli, stored: Aws) -> None:
    stored.error_codes["ListTrainingJobs"] = "AccessDeniedException"
    done = remove_in_s3(cli, stored, "004.jpg")
    assert done.returncode == 3
    assert (
        "because jobs are unknown (us-east-1: An error occurred (AccessDeniedException)"
        in done.stderr
    )
    assert "shards/shard-000001.tar" in read_objects(stored, "raw", "set/")
