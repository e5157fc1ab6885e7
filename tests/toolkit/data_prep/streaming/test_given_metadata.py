"""Captions and columns of arriving images from a table, from tags, and from `sm-train enrich`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from sm_train.entrypoints.shards.shard_index import ShardIndex

from tests.conftest import Aws, Cli
from tests.support.image_files import image_bytes
from tests.support.moto_server import ACCOUNT
from tests.support.run_files import write_run
from tests.support.streaming.stack import Stack, stream_stack

pytestmark = pytest.mark.integration

COLUMNS = "license text, expiry date"

ROWS = [
    {"image": "s3://raw/photos/0.jpg", "caption": "a cat", "license": "CC", "expiry": "2026-01-01"},
    {"image": "s3://raw/photos/1.jpg", "caption": "a dog", "license": "CC", "expiry": "2027-06-01"},
    {"image": "s3://raw/photos/2.jpg", "caption": "a cow", "license": "own", "expiry": None},
]


@pytest.fixture
def stack(aws: Aws, cli: Cli, monkeypatch: pytest.MonkeyPatch) -> Iterator[Stack]:
    with stream_stack(aws, cli, monkeypatch, Columns=COLUMNS) as running:
        yield running


def write_table(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def put_images(stack: Stack, count: int) -> None:
    for number in range(count):
        key = f"photos/{number}.jpg"
        stack.deployment.s3.put_object(Bucket="raw", Key=key, Body=image_bytes(number))


def text(stack: Stack, key: str) -> str:
    content: bytes = stack.deployment.s3.get_object(Bucket="raw", Key=key)["Body"].read()
    return content.decode()


def other(stack: Stack, *arguments: object) -> Any:
    """Run another command on the pack."""
    run = stack._cli(
        *("--region", "us-east-1", "--bucket-kms-key", "packed=alias/packed", *arguments),
        network="loopback",
        env=stack.deployment.aws.environment,
    )
    assert run.returncode == 0, run.stderr
    return run


def test_a_table_fills_in_what_images_lack_and_conditions_work_on_the_pack(
    stack: Stack, tmp_path: Path
) -> None:
    put_images(stack, 3)
    stack.deployment.s3.put_object(Bucket="raw", Key="photos/1.txt", Body=b"by its author")
    stack.deployment.s3.put_object(Bucket="raw", Key="photos/2.caption", Body=b"by kohya")
    absent = ROWS[0] | {"image": "s3://raw/photos/later.jpg"}
    table = write_table(tmp_path / "rights.jsonl", [*ROWS, absent])
    add = ("--add", "s3://raw/photos/", "--captions", table)
    planned = stack.run(*add, "--dry-run")
    assert (planned.returncode, "3 images to pack" in planned.stderr) == (0, True), planned.stderr
    assert stack.status()["waiting"] == 0
    done = stack.run(*add, "--yes")
    assert done.returncode == 0, done.stderr
    assert (
        "wrote 1 caption and 3 files of columns for 3 images; kept 2 files already there"
        in done.stderr
    )
    assert (
        "1 image of the table without a JPEG, PNG or WebP object, the first: "
        "s3://raw/photos/later.jpg; repeat the command when it has arrived"
    ) in done.stderr
    assert [text(stack, f"photos/{name}") for name in ("0.txt", "1.txt", "2.caption")] == [
        "a cat",
        "by its author",
        "by kohya",
    ]
    assert json.loads(text(stack, "photos/2.json")) == {"license": "own", "expiry": None}
    assert stack.deployment.drain() == set()
    stack.deployment.flush()
    again = stack.run(*add, "--yes")
    assert "3 are packed already" in again.stderr
    assert "sent" not in again.stderr
    assert "columns       license (text), expiry (date) of .json files" in stack.run().stdout
    report = json.loads(
        other(stack, "data-report", "s3://packed/set", "--where", "license = 'CC'", "--json").stdout
    )
    [found] = report["sets"]
    assert (found["samples"], found["columns"]["license"]["counts"]) == (2, {"CC": 2})
    assert found["columns"]["expiry"]["last"] == "2027-06-01"
    condition = "expiry < DATE '2026-12-01'"
    other(stack, "remove", "s3://packed/set", "--where", condition, "--yes")
    report = other(stack, "data-report", "s3://packed/set").stdout
    assert "2 samples" in report.partition("packed as they arrived")[2].splitlines()[0]
    assert "whether a program made them is not known" in report
    sources = {*stack.deployment.documents(tmp_path / "after")}
    assert sources == {"s3://raw/photos/1.jpg", "s3://raw/photos/2.jpg"}


def test_the_command_that_enrich_prints_fills_in_missing_captions(
    stack: Stack, cli: Cli, tmp_path: Path
) -> None:
    put_images(stack, 3)
    for number in range(3):
        key = f"photos/{number}.json"
        stack.deployment.s3.put_object(Bucket="raw", Key=key, Body=b'{"license": "own"}')
    stack.deployment.s3.put_object(Bucket="raw", Key="photos/1.txt", Body=b"by its author")
    for number in range(3):
        stack.deployment.announce(f"photos/{number}.jpg")
    dead = stack.deployment.drain()
    assert len(dead) == 2
    code = tmp_path / "code"
    code.mkdir()
    (code / "makers.py").write_text(
        "def caption(batch):\n"
        "    return {'generated_caption': [f'photo {name}' for name in batch.names]}\n"
    )
    stack.deployment.aws.make_bucket("scores")
    enriched = other(
        stack,
        *("enrich", "s3://raw/photos/", "s3://scores/captions", "--with", "makers:caption"),
        *("--code", code, "--workers", "1"),
    )
    command = enriched.stderr.partition("if a stream packs s3://raw/photos/: sm-train ")[2].split()
    assert command == [
        *("stream", "STACK", "--add", "s3://raw/photos/"),
        *("--captions", "s3://scores/captions/table"),
        *("--caption-column", "caption", "--caption-column", "generated_caption"),
    ]
    filled = stack.run(*command[2:], "--yes")
    assert filled.returncode == 0, filled.stderr
    assert "wrote 2 captions for 3 images; kept 1 file already there" in filled.stderr
    assert stack.deployment.drain() == set()
    stack.deployment.flush()
    captions = {
        source: document["caption_length"]
        for source, document in stack.deployment.documents(tmp_path / "packed").items()
    }
    assert captions == {
        "s3://raw/photos/0.jpg": len("photo 0.jpg"),
        "s3://raw/photos/1.jpg": len("by its author"),
        "s3://raw/photos/2.jpg": len("photo 2.jpg"),
    }


def test_what_is_wrong_with_a_table_is_one_line_and_writes_nothing(
    stack: Stack, tmp_path: Path
) -> None:
    put_images(stack, 3)
    for name, rows, error in (
        (
            "day",
            [ROWS[0], ROWS[1] | {"expiry": "1.6.2027"}],
            's3://raw/photos/1.jpg: expiry: "1.6.2027" is no date, as the stack declares it',
        ),
        (
            "elsewhere",
            [ROWS[0] | {"image": "s3://raw/other/0.jpg", "bytes": 5}],
            "s3://raw/other/0.jpg: is not below s3://raw/photos/",
        ),
        (
            "twice",
            [ROWS[0], ROWS[0] | {"license": "own"}],
            "s3://raw/photos/0.jpg: two rows give s3://raw/photos/0.json different contents; keep "
            "one of them",
        ),
        (
            "stem",
            [ROWS[0], ROWS[1] | {"image": "0.png", "bytes": 5}],
            "s3://raw/photos/0.jpg and s3://raw/photos/0.png: two rows give s3://raw/photos/0.txt "
            "different contents; keep one of them",
        ),
        (
            "lacking",
            [{name: ROWS[0][name] for name in ("image", "caption", "license")}],
            "has license but not expiry, which the stack declares, too; add the column",
        ),
        (
            "other",
            [{"image": ROWS[0]["image"], "alt": "x"}],
            "has no column caption and no column license and no column expiry; it has image, alt; "
            "name the captions with --caption-column",
        ),
    ):
        table = write_table(tmp_path / f"{name}.jsonl", rows)
        run = stack.run("--add", "s3://raw/photos/", "--captions", table, "--yes")
        assert run.returncode == 2, run.stderr
        assert run.stderr.splitlines()[-1].endswith(error)
        assert run.stderr.splitlines()[-1].startswith("sm-train: --captions: ")
    listing = stack.deployment.s3.list_objects_v2(Bucket="raw")["Contents"]
    assert [entry["Key"] for entry in listing] == [f"photos/{number}.jpg" for number in range(3)]
    assert stack.status()["waiting"] == 0
    assert "--captions, --dry-run and --yes require --add" in stack.run("--captions", "x").stderr


def test_cells_of_csv_are_the_texts_that_the_table_has(
    aws: Aws, cli: Cli, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A row without a caption has columns all the same: the image may have a caption."""
    columns = "id text, version text, code text, count integer, is_own boolean, expiry date"
    with stream_stack(aws, cli, monkeypatch, Columns=columns) as stack:
        put_images(stack, 2)
        stack.deployment.s3.put_object(Bucket="raw", Key="photos/1.txt", Body=b"by its author")
        table = tmp_path / "t.csv"
        table.write_text(
            "image,caption,id,version,code,count,is_own,expiry\n"
            "0.jpg,a,1234567890123456789,1.10,E100,9007199254740993,TRUE,2027-06-01\n"
            "1.jpg,,1234567890123456790,2.00,1e5,,false,\n"
            "../2.jpg,a,1,1,1,1,true,\n"
        )
        done = stack.run("--add", "s3://raw/photos/", "--captions", str(table), "--yes")
        assert done.returncode == 0, done.stderr
        assert "1 input left out, the first: ../2.jpg: outside-source" in done.stderr
        assert "wrote 1 caption and 2 files of columns for 2 images" in done.stderr
        assert [json.loads(text(stack, f"photos/{number}.json")) for number in range(2)] == [
            {
                "id": "1234567890123456789",
                "version": "1.10",
                "code": "E100",
                "count": 9007199254740993,
                "is_own": True,
                "expiry": "2027-06-01",
            },
            {
                "id": "1234567890123456790",
                "version": "2.00",
                "code": "1e5",
                "count": None,
                "is_own": False,
                "expiry": None,
            },
        ]


def test_dead_letters_name_the_column_that_is_wrong(stack: Stack) -> None:
    put_images(stack, 2)
    for number in range(2):
        key = f"photos/{number}.txt"
        stack.deployment.s3.put_object(Bucket="raw", Key=key, Body=b"a caption")
        stack.deployment.announce(f"photos/{number}.jpg")
    wrong = json.dumps({"expiry": "next year"}).encode()
    stack.deployment.s3.put_object(Bucket="raw", Key="photos/1.json", Body=wrong)
    for body in stack.deployment.drain():
        stack.deployment.sqs.send_message(QueueUrl=stack.deployment.dead_letters, MessageBody=body)
    found = json.loads(stack.run("--dead", "--json").stdout)
    assert {letter["address"]: letter["reason"] for letter in found} == {
        "s3://raw/photos/0.jpg": "no columns: s3://raw/photos/0.json does not exist",
        "s3://raw/photos/1.jpg": 's3://raw/photos/1.json: expiry: "next year" is no date',
    }


def test_append_takes_the_columns_of_the_stream(stack: Stack, tmp_path: Path) -> None:
    put_images(stack, 3)
    table = write_table(tmp_path / "rights.jsonl", ROWS)
    first = write_table(tmp_path / "first.jsonl", ROWS[:2])
    stack.run("--add", "s3://raw/photos/", "--captions", first, "--yes")
    assert stack.deployment.drain() == set()
    stack.deployment.flush()
    other(
        stack,
        *("pack", "s3://raw/photos/", "s3://packed/set", "--append", "--captions", table),
        *("--shard-size", "20000", "--index-column", "license", "--index-column", "expiry"),
    )
    stack.deployment.s3.download_file("packed", "set/index.parquet", str(tmp_path / "index"))
    index = ShardIndex(tmp_path / "index")
    licenses = [
        value
        for group in index.samples_by_group(["license"])
        for value in group.columns["license"].to_pylist()
    ]
    assert sorted(licenses) == ["CC", "CC", "own"]


def test_the_printed_policy_suffices_for_tags_and_tables(
    aws: Aws, cli: Cli, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with stream_stack(aws, cli, monkeypatch, Columns=COLUMNS, ColumnsFrom="tags") as stack:
        run = write_run(
            tmp_path,
            role=f"arn:aws:iam::{ACCOUNT}:role/sm-train",
            data={"uri": "s3://packed/set/shards/"},
        )
        printed = cli("iam", run, "--json", "--source", "s3://raw/")
        put_images(stack, 2)
        stack.deployment.announce("photos/1.jpg")
        [dead] = stack.deployment.drain()
        stack.deployment.sqs.send_message(QueueUrl=stack.deployment.dead_letters, MessageBody=dead)
        table = write_table(tmp_path / "t.jsonl", ROWS[:1])
        aws.policy = json.loads(printed.stdout)["stream"]
        for arguments in (
            ("--add", "s3://raw/photos/", "--captions", table, "--yes"),
            ("--dead",),
        ):
            done = stack.run(*arguments)
            assert (aws.denied, done.returncode) == ([], 0), done.stderr
            if "--captions" in arguments:
                unused = "not used of the table: license, expiry, which the stack takes from tags"
                assert unused in done.stderr
        stack.deployment.s3.put_object(Bucket="raw", Key="photos/1.txt", Body=b"late")
        done = stack.run("--dead")
        assert (aws.denied, done.returncode) == ([], 0), done.stderr
        assert {permission.action for permission in aws.checked} > {"s3:GetObjectTagging"}
