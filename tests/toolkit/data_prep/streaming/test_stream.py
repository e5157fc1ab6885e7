"""``sm-train stream``: the state of a streaming pack, older images, flushing and dead letters."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
from sm_train.entrypoints.data_prep.streaming import lambda_handler
from sm_train.entrypoints.data_prep.streaming.stream_state import STREAM_STATE
from sm_train.toolkit.data_prep.streaming.streaming_price import (
    COLUMN_GETS,
    PUTS,
    SEALING_GETS,
    STAGING_GETS,
)

from tests.conftest import Aws, Cli
from tests.support.image_files import image_bytes
from tests.support.moto_server import ACCOUNT
from tests.support.run_files import write_run
from tests.support.streaming.deployment import FakeContext, notification
from tests.support.streaming.stack import SEALER, Stack
from tests.toolkit.data_prep.streaming import stream_support

stack = stream_support.stack

pytestmark = pytest.mark.integration


def test_the_state_is_counted(stack: Stack) -> None:
    deployment = stack.deployment
    for number in range(2):
        deployment.arrive(f"{number}.jpg", image_bytes(number))
    deployment.arrive("cut.jpg", image_bytes(3)[:300])
    assert deployment.drain() == set()
    deployment.flush()
    deployment.arrive("3.jpg", image_bytes(3))
    assert deployment.drain() == set()
    deployment.arrive("4.jpg", image_bytes(4))
    deployment.sqs.send_message(QueueUrl=deployment.dead_letters, MessageBody="dead")
    staged = len(deployment.destination.read(deployment.keys(f"{STREAM_STATE}/staged/")[0]))
    assert stack.status() == {
        "destination": "s3://packed/set",
        "waiting": 1,
        "in_flight": 0,
        "dead_letters": 1,
        "staged": 1,
        "staged_bytes": staged,
        "claimed": 0,
        "sealed": 0,
        "rejected": 0,
        "indexed_shards": 1,
        "indexed_samples": 2,
        "indexed_rejected": 1,
    }
    assert stack.run().stdout.splitlines() == [
        "s3://packed/set",
        "  queue         1 message",
        "  dead letters  1 message; --dead lists them, --redrive delivers them again",
        f"  staged        1 sample, {staged / 1000:.1f} kB; a shard takes 20 kB",
        "  indexed       2 samples in 1 shard",
        "  rejected      1 input in the index; --rejected lists them",
    ]


def test_a_flush_seals_what_is_staged(stack: Stack, tmp_path: Path) -> None:
    stack.deployment.arrive("a.jpg", image_bytes(1))
    assert stack.deployment.drain() == set()
    run = stack.run("--flush", "--json")
    assert (run.returncode, json.loads(run.stdout)["indexed_samples"]) == (0, 1)
    assert "sealed 1 shard, added 1 to the index" in run.stderr
    assert stack.deployment.packed(tmp_path)[1] == Counter(["a.jpg"])


def test_an_error_of_the_function_is_one_line(stack: Stack) -> None:
    stack.functions.error = "Task timed out after 900.00 seconds"
    run = stack.run("--flush")
    assert (run.returncode, run.stdout) == (6, "")
    assert run.stderr.splitlines()[-1] == f"sm-train: {SEALER}: Task timed out after 900.00 seconds"


@pytest.mark.slow
def test_images_that_were_there_before_are_packed_once(stack: Stack, tmp_path: Path) -> None:
    """Also those that arrive at the same time, and those that the command names twice."""
    deployment = stack.deployment
    names = [f"photos/a b/{number:02}.jpg" for number in range(25)]
    for number, name in enumerate(names):
        stack.put_unannounced(name, image_bytes(number))
    stack.put_unannounced("other/x.jpg", image_bytes(99))
    deployment.s3.put_object(Bucket="raw", Key="photos/uncaptioned.jpg", Body=image_bytes(50))
    # S3 announces one of them, too, because it arrived after the notifications were switched on.
    etag = deployment.s3.head_object(Bucket="raw", Key=names[3])["ETag"].strip('"')
    deployment.send(notification(names[3], etag, 1))
    planned = stack.run("--add", "s3://raw/photos/", "--dry-run")
    assert planned.returncode == 0, planned.stderr
    assert "26 images to pack" in planned.stderr
    assert stack.status()["waiting"] == 1
    for _ in range(2):
        sent = stack.run("--add", "s3://raw/photos/", "--yes")
        assert sent.returncode == 0, sent.stderr
    assert stack.status()["waiting"] == 1 + 2 * 2
    (failed,) = deployment.drain()  # twice the same message, with the image without a caption
    assert "uncaptioned" in failed
    deployment.flush()
    assert deployment.packed(tmp_path)[1] == Counter(names)
    again = stack.run("--add", "s3://raw/photos/", "--yes")
    assert "1 image to pack" in again.stderr
    assert "25 are packed already" in again.stderr
    assert stack.status()["waiting"] == 1


def test_images_of_a_pack_are_not_added(stack: Stack, cli: Cli, tmp_path: Path) -> None:
    """A bucket may have been packed before the stack was deployed."""
    stack.put_unannounced("photos/old.jpg", image_bytes(1))
    options = ("--region", "us-east-1", "--bucket-kms-key", "packed=alias/packed")
    packed = cli(
        *(*options, "pack", "s3://raw/photos/", "s3://packed/set", "--shard-size", "20kB"),
        network="loopback",
        env=stack.deployment.aws.environment,
    )
    assert packed.returncode == 0, packed.stderr
    stack.put_unannounced("photos/new.jpg", image_bytes(2))
    sent = stack.run("--add", "s3://raw/photos/", "--yes")
    assert "sent notifications for 1 image;" in sent.stderr
    assert stack.deployment.drain() == set()
    stack.deployment.flush()
    seen = stack.deployment.packed(tmp_path)[1]
    assert seen == Counter(["old.jpg", "photos/new.jpg"])


def test_another_bucket_is_refused(stack: Stack) -> None:
    stack.deployment.aws.make_bucket("elsewhere")
    stack.deployment.s3.put_object(Bucket="elsewhere", Key="a.jpg", Body=image_bytes(1))
    stack.deployment.s3.put_object(Bucket="elsewhere", Key="a.txt", Body=b"a caption")
    run = stack.run("--add", "s3://elsewhere/", "--yes")
    assert run.returncode == 2
    assert run.stderr.splitlines()[-1] == (
        "sm-train: --add: s3://elsewhere/: the stack photo-pack packs images of s3://raw/; name a "
        "prefix of it or an inventory of it"
    )


def test_a_redrive_starts_a_task_of_sqs(stack: Stack) -> None:
    """moto has no such tasks, so the test answers as SQS does."""
    aws = stack.deployment.aws
    aws.responses["StartMessageMoveTask"] = lambda body: (200, {"TaskHandle": "AQEB6nR4"})
    run = stack.run("--redrive")
    assert run.returncode == 0, run.stderr
    [body] = aws.bodies("StartMessageMoveTask")
    name = stack.deployment.dead_letters.rpartition("/")[2]
    assert body == {"SourceArn": f"arn:aws:sqs:us-east-1:{ACCOUNT}:{name}"}


@pytest.mark.slow
def test_dead_letters_and_rejected_inputs_are_listed_with_their_reasons(stack: Stack) -> None:
    deployment = stack.deployment
    deployment.arrive("photos/0.jpg", image_bytes(0))
    for number in range(12):
        deployment.arrive(f"photos/late{number:02}.jpg", image_bytes(number), caption=None)
    deployment.arrive("photos/cut.jpg", image_bytes(1)[:300])
    bodies = sorted(deployment.drain())
    deployment.flush()
    deployment.arrive("photos/cut too.jpg", image_bytes(2)[:300])
    assert deployment.drain() == set()
    for body in (*bodies, "no event", bodies[0]):
        deployment.sqs.send_message(QueueUrl=deployment.dead_letters, MessageBody=body)
    deployment.s3.put_object(Bucket="raw", Key="photos/late00.txt", Body=b"a caption")
    deployment.s3.delete_object(Bucket="raw", Key="photos/late01.jpg")
    run = stack.run("--dead", "--json")
    assert run.returncode == 0, run.stderr
    found = {letter["address"]: letter["reason"] for letter in json.loads(run.stdout)}
    assert len(found) == 13
    assert (
        found["s3://raw/photos/late00.jpg"] == "nothing is missing now: --redrive delivers it again"
    )
    assert found["s3://raw/photos/late01.jpg"] == "the image does not exist any more"
    assert found["s3://raw/photos/late02.jpg"] == (
        "no caption: s3://raw/photos/late02.txt does not exist"
    )
    assert [reason for address, reason in found.items() if address.startswith("message ")] == [
        found[max(found, key=lambda address: address.startswith("message "))]
    ]
    # They are still there, and visible.
    assert stack.status()["dead_letters"] == 14
    text = stack.run("--dead").stdout
    assert "late02.jpg: no caption: " in text
    run = stack.run("--rejected", "--json")
    assert [(item["source"], item["reason"]) for item in json.loads(run.stdout)] == [
        ("s3://raw/photos/cut too.jpg", "image-corrupt"),
        ("s3://raw/photos/cut.jpg", "image-corrupt"),
    ]
    assert "s3://raw/photos/cut.jpg: image-corrupt: " in stack.run("--rejected").stdout
    assert "exclude each other" in stack.run("--dead", "--rejected").stderr


def test_the_policy_that_iam_prints_suffices(stack: Stack, cli: Cli, tmp_path: Path) -> None:
    """For every option; what the functions do, they do with their own roles."""
    run = write_run(
        tmp_path,
        role=f"arn:aws:iam::{ACCOUNT}:role/sm-train",
        data={"uri": "s3://packed/set/shards/"},
    )
    printed = cli("iam", run, "--json", "--source", "s3://raw/")
    assert printed.returncode == 0, printed.stderr
    deployment = stack.deployment
    aws = deployment.aws
    deployment.arrive("photos/0.jpg", image_bytes(0))
    deployment.arrive("photos/cut.jpg", image_bytes(1)[:300])
    deployment.arrive("photos/late.jpg", image_bytes(2), caption=None)
    [dead] = deployment.drain()
    deployment.flush()
    deployment.sqs.send_message(QueueUrl=deployment.dead_letters, MessageBody=dead)
    stack.put_unannounced("photos/before.jpg", image_bytes(9))
    aws.responses["StartMessageMoveTask"] = lambda body: (200, {"TaskHandle": "AQEB6nR4"})
    aws.policy = json.loads(printed.stdout)["stream"]
    for arguments in (
        (),
        ("--add", "s3://raw/photos/", "--yes"),
        ("--dead",),
        ("--rejected",),
        ("--redrive",),
        ("--flush",),
    ):
        done = stack.run(*arguments)
        assert aws.denied == [], (arguments, done.stderr)
        assert done.returncode == 0, (arguments, done.stderr)
    actions = {permission.action for permission in aws.checked}
    assert actions > {
        "sqs:SendMessage",
        "sqs:ReceiveMessage",
        "cloudformation:DescribeStacks",
        "lambda:InvokeFunction",
    }


def test_a_stack_of_another_template_is_refused(stack: Stack) -> None:
    missing = stack._cli(
        *("--region", "us-east-1", "stream", "other"),
        network="loopback",
        env=stack.deployment.aws.environment,
    )
    assert missing.returncode == 3
    assert "stack other" in missing.stderr
    assert len(missing.stderr.splitlines()) == 1


@pytest.mark.slow
@pytest.mark.parametrize("origin", [None, "sidecar", "tags"])
def test_the_price_counts_the_requests_that_are_sent(
    stack: Stack, aws: Aws, monkeypatch: pytest.MonkeyPatch, origin: str | None
) -> None:
    monkeypatch.setenv("SM_TRAIN_SHARD_BYTES", str(10**9))
    if origin is not None:
        monkeypatch.setenv("SM_TRAIN_COLUMNS", "license text")
        monkeypatch.setenv("SM_TRAIN_COLUMNS_FROM", origin)
    images = 40
    for number in range(images):
        stack.deployment.arrive(f"{number}.jpg", image_bytes(number))
        stack.deployment.s3.put_object(Bucket="raw", Key=f"{number}.json", Body=b"{}")
    aws.requests.clear()
    assert stack.deployment.drain() == set()
    staging = count_requests(aws)
    aws.requests.clear()
    lambda_handler.seal({"flush": True}, FakeContext())
    sealing = count_requests(aws)
    assert staging["GET"] == (STAGING_GETS + (COLUMN_GETS if origin else 0)) * images
    assert sealing["GET"] == SEALING_GETS * images
    assert staging["PUT"] + sealing["PUT"] == PUTS * images


def count_requests(aws: Aws) -> Counter[str]:
    """Count the requests for images, captions and samples by what they cost: HEAD is as GET."""
    prices = {"HEAD": "GET", "GET": "GET", "PUT": "PUT"}
    folders = ("/raw/", f"/packed/set/{STREAM_STATE}/staged/", f"/packed/set/{STREAM_STATE}/seen/")
    return Counter(
        prices[method]
        for method, path, _ in aws.requests
        if method in prices and path.startswith(folders)
    )
