"""``sm-train pack --append``: new images in new shards of a finished pack."""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import webdataset
from hypothesis import given
from hypothesis import strategies as st
from sm_train.entrypoints.data_prep.packing.build_pack import finalize
from sm_train.entrypoints.data_prep.packing.plan_files import PlannedInputs, PlannedRejections
from sm_train.entrypoints.data_prep.packing.stored_plan import PackedInputs, read_plan
from sm_train.entrypoints.shards.shard_index import ShardIndex
from sm_train.entrypoints.shards.shard_verification import verify_shard
from sm_train.entrypoints.storage.storage import LocalFolder
from sm_train.entrypoints.storage.store import S3Access
from sm_train.toolkit.data_prep.packing.inputs import InputSource, PackInputs, find_inputs

from tests.conftest import Aws, Cli
from tests.support.deadline import DEADLINE
from tests.support.image_files import image_bytes, read_tree, write_album, write_pair
from tests.support.moto_server import ACCOUNT
from tests.support.order.interrupted_pack_support import (
    count_tar_files,
    started,
    wait_for_group,
    wait_until,
)
from tests.support.run_files import write_run
from tests.toolkit.data_prep.packing.on_sagemaker_support import start_node
from tests.toolkit.data_prep.packing.pack_options_support import (
    read_objects,
    upload_folder,
    without_root,
)

pytestmark = pytest.mark.integration

SIZE = ("--shard-size", "20KB")

Row = tuple[str, str]


def sources(folder: Path) -> list[str]:
    """Return the source of each sample in the order of the shards, as webdataset reads them."""
    urls = [str(path) for path in sorted((folder / "shards").iterdir())]
    samples = webdataset.WebDataset(urls, shardshuffle=False)
    return [json.loads(sample["json"])["source"] for sample in samples]


def open_verified(folder: Path) -> ShardIndex:
    """Return the index, which must describe all shards in the folder."""
    index = ShardIndex(folder / "index.parquet")
    assert index.names == sorted(path.name for path in (folder / "shards").iterdir())
    for number in range(len(index)):
        verify_shard(folder / "shards" / index.names[number], index.shard(number))
    return index


def add_later(folder: Path, count: int, *, start: int = 500) -> list[str]:
    """Write pairs whose names sort after those of an album; return the names."""
    names = [f"z/{number:03}.jpg" for number in range(start, start + count)]
    for number, name in enumerate(names, start):
        write_pair(folder, name, image_bytes(number), f"picture {number}")
    return names


def test_new_images_are_added_in_new_shards(cli: Cli, tmp_path: Path) -> None:
    write_album(tmp_path / "in", 24)
    assert cli("pack", "in", "out", *SIZE).returncode == 0
    before, packed = read_tree(tmp_path / "out/shards"), sources(tmp_path / "out")
    # They sort before and between the packed ones.
    for name in ("0-first.jpg", "more/new.jpg"):
        write_pair(tmp_path / "in", name, image_bytes(7, (64, 64)), "new")
    write_pair(tmp_path / "in", "cut.jpg", image_bytes()[:300], "x")
    run = cli("pack", "in", "out", *SIZE, "--append", "--json")
    assert run.returncode == 0, run.stderr
    assert run.stderr.startswith("appended 2 samples in 1 shard: now 26 samples in ")
    document = json.loads(run.stdout)
    assert (document["samples"], document["rejected"]) == (26, {"image-corrupt": 1})
    assert document["appended"] == {
        "samples": 2,
        "shards": 1,
        "changed": {"count": 0, "first": []},
        "missing": 0,
    }
    after = read_tree(tmp_path / "out/shards")
    assert {name: after[name] for name in before} == before
    assert sources(tmp_path / "out") == [*packed, "0-first.jpg", "more/new.jpg"]
    index = open_verified(tmp_path / "out")
    assert index.keys(len(index) - 1) == ["000000024", "000000026"]
    assert index.header.samples == 26
    assert [item.source for item in index.rejected()] == ["cut.jpg"]


@pytest.mark.slow
@pytest.mark.integration
def test_a_pack_can_be_extended_again_and_again(cli: Cli, tmp_path: Path) -> None:
    write_album(tmp_path / "in", 6)
    assert cli("pack", "in", "out", *SIZE).returncode == 0
    expected = sources(tmp_path / "out")
    for start in (500, 400, 600):
        expected += add_later(tmp_path / "in", 5, start=start)
        assert cli("pack", "in", "out", *SIZE, "--append").returncode == 0
    assert sources(tmp_path / "out") == expected
    index = open_verified(tmp_path / "out")
    keys = [key for number in range(len(index)) for key in index.keys(number)]
    assert keys == [f"{number:09}" for number in range(21)]


@pytest.mark.slow
@pytest.mark.parametrize("is_extended", [False, True])
def test_nothing_changes_without_new_images(cli: Cli, tmp_path: Path, is_extended: bool) -> None:
    write_album(tmp_path / "in", 6)
    assert cli("pack", "in", "out", *SIZE).returncode == 0
    if is_extended:
        add_later(tmp_path / "in", 3)
        assert cli("pack", "in", "out", *SIZE, "--append").returncode == 0
    before = read_tree(tmp_path / "out")
    run = cli("pack", "in", "out", *SIZE, "--append")
    assert run.returncode == 0
    assert run.stderr.startswith("nothing to append: ")
    assert read_tree(tmp_path / "out") == before


def test_changed_and_missing_images_are_reported(cli: Cli, tmp_path: Path) -> None:
    write_album(tmp_path / "in", 9)
    assert cli("pack", "in", "out", *SIZE).returncode == 0
    packed = sources(tmp_path / "out")
    write_pair(tmp_path / "in", "001.jpg", image_bytes(1, (96, 96)), "picture 1")
    (tmp_path / "in/003.txt").write_text("a caption of another length " * 30)
    (tmp_path / "in/004.jpg").unlink()
    (tmp_path / "in/004.txt").unlink()
    new = add_later(tmp_path / "in", 2)
    for appended in (2, 0):
        run = cli("pack", "in", "out", *SIZE, "--append", "--json")
        assert run.returncode == 3
        assert json.loads(run.stdout)["appended"] == {
            "samples": appended,
            "shards": 1 if appended else 0,
            "changed": {"count": 2, "first": ["001.jpg", "003.jpg"]},
            "missing": 1,
        }
        assert (
            "error: 2 images not packed, because another size, caption or column is packed under "
            "the same name: 001.jpg, 003.jpg; rename them to append them\n"
            "1 packed image not in the source: the pack keeps it\n"
        ) in run.stderr
    assert sources(tmp_path / "out") == [*packed, *new]


def test_rows_of_a_table_are_compared_with_their_captions(cli: Cli, tmp_path: Path) -> None:
    """An image may be in a table several times."""
    write_album(tmp_path / "in", 2)
    table = tmp_path / "list.csv"
    rows = ["image,caption", "in/000.jpg,first", "in/001.jpg,second", "in/001.jpg,second"]
    table.write_text("\n".join(rows))
    assert cli("pack", "list.csv", "out", *SIZE).returncode == 0
    rows += ["in/000.jpg,another", "in/001.jpg,second"]
    table.write_text("\n".join(rows))
    run = cli("pack", "list.csv", "out", *SIZE, "--append", "--json")
    assert (run.returncode, json.loads(run.stdout)["appended"]["samples"]) == (0, 2)
    urls = [str(path) for path in sorted((tmp_path / "out/shards").iterdir())]
    captions = [
        sample["txt"].decode() for sample in webdataset.WebDataset(urls, shardshuffle=False)
    ]
    assert captions == ["first", "second", "second", "another", "second"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("packed", "appended", "how"),
    [
        (("--min-side", "16"), (), "with --min-side 16"),
        ((), ("--min-side", "16"), "without --min-side"),
        ((), ("--headers-only",), "without --headers-only"),
        (("--drop-duplicates",), (), "with --drop-duplicates"),
        (("--near-duplicates", "3"), ("--near-duplicates", "4"), "with --near-duplicates 3"),
        ((), ("--shard-size", "1MB"), "with --shard-size 20000"),
        (("--convert",), (), "with --convert"),
    ],
)
def test_the_options_must_be_those_of_the_pack(
    cli: Cli, tmp_path: Path, packed: tuple[str, ...], appended: tuple[str, ...], how: str
) -> None:
    write_album(tmp_path / "in", 2)
    assert cli("pack", "in", "out", *SIZE, *packed).returncode == 0
    add_later(tmp_path / "in", 2)
    before = read_tree(tmp_path / "out")
    run = cli("pack", "in", "out", *SIZE, *appended, "--append")
    assert run.returncode == 2
    assert run.stderr == f"sm-train: --append: out was packed {how}; use the same options\n"
    assert read_tree(tmp_path / "out") == before


def test_only_a_finished_pack_of_sm_train_can_be_extended(cli: Cli, tmp_path: Path) -> None:
    write_album(tmp_path / "in", 4)
    run = cli("pack", "in", "out", "--append")
    assert (run.returncode, run.stderr) == (
        2,
        "sm-train: --append: out: contains no pack; run the command without --append\n",
    )
    assert not (tmp_path / "out").exists()
    assert cli("pack", "in", "out").returncode == 0
    shutil.copytree(tmp_path / "out", tmp_path / "no-inputs")
    shutil.rmtree(tmp_path / "no-inputs/inputs")
    run = cli("pack", "in", "no-inputs", "--append")
    assert run.returncode == 2
    assert "no-inputs/inputs: the list of packed images is missing" in run.stderr
    (tmp_path / "out/index.parquet").unlink()
    assert cli("index", "out/shards").returncode == 0
    run = cli("pack", "in", "out", "--append")
    assert run.returncode == 2
    assert "out: not written by `sm-train pack`" in run.stderr


def test_without_append_an_extended_pack_is_another_one(cli: Cli, tmp_path: Path) -> None:
    write_album(tmp_path / "in", 4)
    assert cli("pack", "in", "out", *SIZE).returncode == 0
    shutil.copytree(tmp_path / "in", tmp_path / "first")
    add_later(tmp_path / "in", 2)
    for append, code in (((), 2), (("--append",), 0), ((), 2)):
        run = cli("pack", "in", "out", *SIZE, *append)
        assert run.returncode == code
        assert ("or add new images with --append" in run.stderr) is (code == 2)
    assert cli("pack", "first", "out", *SIZE).returncode == 2


@pytest.mark.slow
@pytest.mark.integration
def test_duplicates_of_packed_images_are_rejected(cli: Cli, tmp_path: Path) -> None:
    """As if all images were packed at once, in this order."""
    write_album(tmp_path / "in", 12)
    write_pair(tmp_path / "in", "011-copy.jpg", image_bytes(2), "a copy")
    options = (*SIZE, "--near-duplicates", "4")
    assert cli("pack", "in", "out", *options).returncode == 0
    for number in (4, 4, 30, 31, 30):
        count = len(list((tmp_path / "in").rglob("z*.jpg")))
        write_pair(tmp_path / "in", f"z{count}.jpg", image_bytes(number), "later")
        write_pair(tmp_path / "in", f"z{count}.jpg", image_bytes(number), "later")
    write_pair(tmp_path / "in", "zz.png", image_bytes(6, kind="PNG"), "the same pixels")
    assert cli("pack", "in", "out", *options, "--append").returncode == 0
    assert cli("pack", "in", "complete", *options).returncode == 0
    complete = ShardIndex(tmp_path / "complete/index.parquet")
    assert Counter(item.reason for item in complete.rejected()) == {
        "duplicate": 4,
        "near-duplicate": 1,
    }
    extended = open_verified(tmp_path / "out")
    assert list(extended.rejected()) == list(complete.rejected())
    assert sources(tmp_path / "out") == sources(tmp_path / "complete")


@pytest.mark.slow
def test_a_killed_append_is_resumed_with_the_same_bytes(cli: Cli, tmp_path: Path) -> None:
    """Killed repeatedly, each time after more files were finished."""
    for folder, count in (("in", 4), ("all", 24)):
        for number in range(count):
            image = image_bytes(number % 20, size=(700 + number, 500), kind="PNG")
            write_pair(tmp_path / folder, f"{number:02}.png", image, f"picture {number}")
    options = ("--shard-size", "100KB", "--workers", "2", "--drop-duplicates")
    assert cli("pack", "in", "complete", *options).returncode == 0
    shutil.copytree(tmp_path / "complete", tmp_path / "out")
    packed = read_tree(tmp_path / "out/shards")
    shutil.rmtree(tmp_path / "in")
    (tmp_path / "all").rename(tmp_path / "in")
    assert cli("pack", "in", "complete", *options, "--append").returncode == 0
    kills = 0
    while kill_append(tmp_path, after=kills % 3):
        kills += 1
        now = read_tree(tmp_path / "out/shards")
        assert {name: now[name] for name in packed} == packed
        assert cli("pack", "in", "out", *options).returncode == 2
    assert kills > 1
    assert read_tree(tmp_path / "out") == read_tree(tmp_path / "complete")


def kill_append(folder: Path, *, after: int) -> bool:
    """Append, and kill it after it has finished that many files; return whether it was killed."""
    done = count_tar_files(folder / "out")
    with started(folder, "--workers", "2", "--drop-duplicates", "--append") as process:
        while process.poll() is None:
            if count_tar_files(folder / "out") > done + after:
                os.killpg(process.pid, signal.SIGKILL)
                break
            time.sleep(0.001)
        process.wait(DEADLINE)
        wait_for_group(process.pid)
    assert process.returncode in (0, -signal.SIGKILL)
    return process.returncode != 0


PROGRAM = """
import os, sys
from sm_train.entrypoints.storage.storage import LocalFolder
from sm_train.toolkit.cli import main

name, left = sys.argv.pop(), int(sys.argv.pop())

def kill(action):
    def wrapped(*arguments, **options):
        global left
        left -= 1
        if left < 0:
            os.kill(os.getpid(), 9)
        return action(*arguments, **options)
    return wrapped

setattr(LocalFolder, name, kill(getattr(LocalFolder, name)))
main(sys.argv[1:])
"""


@pytest.mark.integration
@pytest.mark.parametrize("action", ["atomic_writer", "remove", "remove_folder"])
def test_an_append_is_resumed_after_a_kill_at_any_of_its_writes(
    cli: Cli, tmp_path: Path, action: str
) -> None:
    write_album(tmp_path / "in", 6)
    assert cli("pack", "in", "packed", *SIZE).returncode == 0
    add_later(tmp_path / "in", 14)
    shutil.copytree(tmp_path / "packed", tmp_path / "complete")
    assert cli("pack", "in", "complete", *SIZE, "--append").returncode == 0
    complete = read_tree(tmp_path / "complete")
    for left in range(20):
        shutil.copytree(tmp_path / "packed", tmp_path / "out")
        # One worker: all writes are in this process.
        arguments = ("--append", "--shard-size", "20KB", "--workers", "1", str(left), action)
        with started(tmp_path, *arguments, program=PROGRAM) as process:
            process.communicate(timeout=DEADLINE)
        if process.returncode == 0:
            break
        assert process.returncode == -signal.SIGKILL
        assert cli("pack", "in", "out", *SIZE, "--append").returncode == 0
        assert read_tree(tmp_path / "out") == complete, left
        shutil.rmtree(tmp_path / "out")
    assert left > 0


def test_a_node_that_finds_the_extended_index_leaves_it_unchanged(cli: Cli, tmp_path: Path) -> None:
    """The node that wrote it was lost before it could mark the append as ended."""
    write_album(tmp_path / "in", 6)
    assert cli("pack", "in", "out", *SIZE).returncode == 0
    add_later(tmp_path / "in", 4)
    with started(tmp_path, "--append", *SIZE, "0", "remove", program=PROGRAM) as process:
        assert process.wait(DEADLINE) == -signal.SIGKILL
    destination = LocalFolder(tmp_path / "out")
    index = destination.read("index.parquet")
    assert open_verified(tmp_path / "out").header.samples == 10
    totals = finalize(read_plan(destination, S3Access()), destination)
    assert totals is not None
    assert (totals.samples, destination.read("index.parquet")) == (10, index)


@pytest.mark.slow
@pytest.mark.integration
def test_an_unfinished_append_is_completed_before_other_images_are_added(
    cli: Cli, tmp_path: Path
) -> None:
    def write(numbers: range) -> list[str]:
        for number in numbers:
            image = image_bytes(number, size=(700 + number, 500), kind="PNG")
            write_pair(tmp_path / "in", f"{number:03}.png", image, f"picture {number}")
        return [f"{number:03}.png" for number in numbers]

    options = ("--shard-size", "100KB", "--drop-duplicates")
    first = write(range(100, 104))
    assert cli("pack", "in", "out", *options).returncode == 0
    second = write(range(200, 240))
    assert kill_append(tmp_path, after=1)
    (tmp_path / "in" / second[-1]).unlink()
    (tmp_path / "in" / second[-1]).with_suffix(".txt").unlink()
    third = write(range(50, 54))
    for command in (("pack", "in", "out", *options), ("index", "out/shards")):
        refused = cli(*command)
        assert (refused.returncode, refused.stderr.count("\n")) == (2, 1)
        assert "unfinished" in refused.stderr or "--append" in refused.stderr
    run = cli("pack", "in", "out", *options, "--append", "--json")
    assert run.returncode == 0, run.stderr
    # The plan has the image that is gone.
    document = json.loads(run.stdout)
    assert document["rejected"] == {"image-missing": 1}
    assert document["appended"]["samples"] == len(second[:-1]) + len(third)
    assert sources(tmp_path / "out") == [*first, *second[:-1], *third]
    open_verified(tmp_path / "out")


PAUSED = """
import sys, time
from contextlib import contextmanager
from pathlib import Path
from sm_train.toolkit.data_prep.packing import pack
from sm_train.toolkit.cli import main

plan_pack = pack.plan_pack

@contextmanager
def paused(*arguments):
    with plan_pack(*arguments) as planned:
        Path("planned").touch()
        while not Path("continue").exists():
            time.sleep(0.01)
        yield planned

pack.plan_pack = paused
main(sys.argv[1:])
"""


def test_an_append_is_refused_if_another_one_was_faster(cli: Cli, tmp_path: Path) -> None:
    write_album(tmp_path / "in", 6)
    options = ("--shard-size", "100KB")
    assert cli("pack", "in", "out", *options).returncode == 0
    add_later(tmp_path / "in", 4)
    with started(tmp_path, "--append", program=PAUSED) as process:
        wait_until((tmp_path / "planned").exists, process)
        assert cli("pack", "in", "out", *options, "--append").returncode == 0
        after = read_tree(tmp_path / "out")
        (tmp_path / "continue").touch()
        _, stderr = process.communicate(timeout=DEADLINE)
    assert (process.returncode, stderr) == (
        2,
        "sm-train: out: another command has added images to it; append again\n",
    )
    assert read_tree(tmp_path / "out") == after


@pytest.mark.slow
def test_nodes_extend_a_pack_in_s3_as_one_process_does(cli: Cli, aws: Aws, tmp_path: Path) -> None:
    """Also a pack whose duplicates are dropped: the digests of packed images are kept."""
    options = (*SIZE, "--drop-duplicates")
    command = ("pack", "s3://raw/photos/", "s3://packed/set", *options)

    def cloud(*arguments: object) -> Any:
        settings = {"network": "loopback", "env": aws.environment, "timeout": 120}
        return cli("--region", "us-east-1", *arguments, **settings)

    write_album(tmp_path / "in", 12)
    upload_folder(aws, tmp_path / "in", "photos/")
    for bucket in ("packed", "ai-bucket"):
        aws.make_bucket(bucket)
    run = write_run(tmp_path, bucket="ai-bucket", role=f"arn:aws:iam::{ACCOUNT}:role/own")
    assert cloud(*command, "--for", run).returncode == 0
    assert cli("pack", "in", "out", *options, "--for", run).returncode == 0
    write_pair(tmp_path / "in", "twin.jpg", image_bytes(3), "a duplicate")
    add_later(tmp_path / "in", 20)
    upload_folder(aws, tmp_path / "in", "photos/")
    on = ("--for", run, "--on", "sagemaker", "--instances", "2", "--append")
    dry = cloud(*command, *on, "--dry-run", "--json")
    assert (dry.returncode, json.loads(dry.stdout)["images"]) == (0, 21)
    sent = cloud(*command, *on, "--yes")
    assert sent.returncode == 0, sent.stderr
    [body] = aws.bodies("CreateProcessingJob")
    nodes = [start_node(tmp_path, aws, body, rank, expires=60) for rank in (0, 1)]
    logs = [node.communicate(timeout=DEADLINE)[0] for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0], logs
    assert cli("pack", "in", "out", *options, "--for", run, "--append").returncode == 0
    local = {name: content for name, content in read_tree(tmp_path / "out").items() if "." in name}
    local = {name: content for name, content in local.items() if content != b"(folder)"}
    assert without_root(read_objects(aws, "packed", "set/")) == without_root(local)
    again = cloud(*command, *on, "--yes")
    assert "nothing was started" in again.stderr
    assert len(aws.bodies("CreateProcessingJob")) == 1
    # The next images are packed by a process of this computer.
    write_pair(tmp_path / "in", "0.jpg", image_bytes(4), "another duplicate")
    add_later(tmp_path / "in", 4, start=700)
    upload_folder(aws, tmp_path / "in", "photos/")
    extended = cloud(*command, "--for", run, "--append", "--json")
    assert extended.returncode == 0, extended.stderr
    document = json.loads(extended.stdout)
    assert (document["appended"]["samples"], document["rejected"]) == (4, {"duplicate": 2})
    assert not any(".packing" in name for name in read_objects(aws, "packed", "set/"))


ROWS = st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from(["one", "two", "three", ""])))
ALWAYS = ("always", "")
"""A table must have a row."""


@given(packed=st.lists(ROWS, min_size=1, max_size=3), rows=ROWS)
def test_comparison_is_that_of_multisets(
    tmp_path_factory: pytest.TempPathFactory, packed: list[list[Row]], rows: list[Row]
) -> None:
    """Of each name, equal rows are known, and others replace packed ones that are gone."""
    folder = tmp_path_factory.mktemp("tables")
    found = [find_rows(folder / str(number), part) for number, part in enumerate(packed)]
    inputs = find_rows(folder / "new", rows, pack_of(found))
    old = Counter(row for part in packed for row in [*part, ALWAYS])
    new = Counter([*rows, ALWAYS])
    known = changed = missing = selected = 0
    for name in {name for name, _ in [*old, *new]}:
        old_rows, new_rows = (
            Counter({row: count for row, count in every.items() if row[0] == name})
            for every in (old, new)
        )
        known += (old_rows & new_rows).total()
        replaced = min((old_rows - new_rows).total(), (new_rows - old_rows).total())
        changed += replaced
        missing += (old_rows - new_rows).total() - replaced
        selected += (new_rows - old_rows).total() - replaced
    comparison = inputs.comparison
    assert comparison is not None
    counts = (comparison.known, comparison.changed, comparison.missing, inputs.images)
    assert counts == (known, changed, missing, selected)
    assert inputs.packed_bytes == sum(
        sum(batch.column(0).to_pylist())
        for batch in inputs.files.read("inputs", ["packed_bytes"], 0, inputs.images)
    )


def find_rows(folder: Path, rows: list[Row], packed: PackedInputs | None = None) -> PackInputs:
    (folder / "plan").mkdir(parents=True)
    lines = [json.dumps({"image": name, "caption": text}) for name, text in [*rows, ALWAYS]]
    (folder / "table.jsonl").write_text("\n".join(lines))
    return find_inputs(InputSource(str(folder / "table.jsonl")), folder / "plan", packed)


def pack_of(parts: list[PackInputs]) -> PackedInputs:
    return PackedInputs(
        tuple(part.fingerprint for part in parts),
        (),
        tuple(PlannedInputs(part.files, "", 0, part.images) for part in parts),
        tuple(PlannedRejections(part.files, part.rejected) for part in parts),
    )
