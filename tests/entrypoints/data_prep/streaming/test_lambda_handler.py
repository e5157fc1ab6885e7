"""Streaming packing: messages repeated, reordered, concurrent and invalid; each image once."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from sm_train.entrypoints.data_prep.streaming import lambda_handler
from sm_train.entrypoints.data_prep.streaming.sealing import Sealer
from sm_train.entrypoints.data_prep.streaming.stream_state import (
    DONE,
    FIRST_OPEN,
    MANIFESTS,
    RECORDS,
    REJECTED,
    STAGED,
    STREAM_STATE,
    numbered,
)
from sm_train.entrypoints.data_prep.work.plan_documents import PlanError
from sm_train.entrypoints.data_prep.work.work_stages import PLAN_NAME
from sm_train.entrypoints.shards.shard_index import ShardIndex
from sm_train.entrypoints.storage.storage import S3Prefix
from sm_train.entrypoints.storage.store import S3Access

from tests.conftest import Aws, Cli
from tests.support.deadline import DEADLINE, wait_until
from tests.support.image_files import image_bytes
from tests.support.restricted_imports import RESTRICT_IMPORTS, lambda_packages
from tests.support.streaming.deployment import (
    Deployment,
    FakeContext,
    deploy,
    handle_all,
    lambda_runtime,
    notification,
)

pytestmark = pytest.mark.integration


@pytest.fixture
def deployment(aws: Aws, monkeypatch: pytest.MonkeyPatch) -> Deployment:
    return deploy(aws, monkeypatch)


def test_overlapping_invocations_build_a_shard_once(
    deployment: Deployment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SM_TRAIN_SHARD_BYTES", str(10**9))
    names = [f"{number:02}.jpg" for number in range(12)]
    for number, name in enumerate(names):
        deployment.arrive(name, image_bytes(number))
    packer = Sealer(deployment.destination, 10**9)
    assert deployment.drain() == set()
    barrier, sealed = threading.Barrier(8, timeout=DEADLINE), list[int]()

    def invoke() -> None:
        barrier.wait()
        sealed.append(packer.seal(flush=True))

    invocations = [threading.Thread(target=invoke) for _ in range(8)]
    for invocation in invocations:
        invocation.start()
    for invocation in invocations:
        invocation.join()
    assert sum(sealed) == 1
    deployment.flush()
    puts = [path for method, path, _ in deployment.aws.requests if method in ("PUT", "POST")]
    assert puts.count("/packed/set/shards/streamed-000000.tar") == 1
    assert deployment.packed(tmp_path)[1] == Counter(names)
    assert deployment.keys(f"{STREAM_STATE}/leases/") == []


@pytest.mark.slow
@pytest.mark.parametrize("loses", [False, True], ids=["answers", "lost answers"])
def test_repeated_and_reordered_messages_pack_each_image_once(
    deployment: Deployment, tmp_path: Path, loses: bool
) -> None:
    deployment.aws.loses_conditional_writes = loses
    names = [f"photos of {day}/{number:02}.jpg" for day in "ab" for number in range(12)]
    bodies = []
    for number, name in enumerate(names):
        deployment.arrive(name, image_bytes(number))
    while batch := deployment.receive():
        bodies += [message["body"] for message in batch]
        deployment.delete(batch)
    repeated = bodies * 2
    random.Random(1).shuffle(repeated)
    for body in repeated[:30]:
        deployment.send(body)
    assert deployment.drain() == set()
    for body in [*repeated[30:], *bodies]:  # some long after their images were packed
        deployment.send(body)
    assert deployment.drain() == set()
    deployment.flush()
    index, seen = deployment.packed(tmp_path)
    assert seen == Counter(names)
    assert len(index) > 2
    assert all(index.image_sizes(number) is not None for number in range(len(index)))
    assert deployment.keys(f"{STREAM_STATE}/staged/") == []
    deployment.flush()
    assert deployment.packed(tmp_path / "again")[1] == Counter(names)


def test_bad_messages_are_rejected_and_incomplete_ones_retried(
    deployment: Deployment, tmp_path: Path
) -> None:
    deployment.arrive("good.jpg", image_bytes(1))
    deployment.arrive("cut.jpg", image_bytes(2)[:300])
    deployment.arrive("uncaptioned.jpg", image_bytes(3), caption=None)
    deployment.arrive("notes.pdf", b"%PDF")
    deployment.send("not JSON")
    deployment.send('{"Records": [{"eventName": "ObjectCreated:Put"}]}')
    deployment.send(json.dumps({"Service": "Amazon S3", "Event": "s3:TestEvent"}))
    deployment.send(notification("gone.jpg", "0" * 32, 10))
    failed = deployment.drain()
    assert [json.loads(body)["Records"][0]["s3"]["object"]["key"] for body in failed] == [
        "uncaptioned.jpg"
    ]
    deployment.s3.put_object(Bucket="raw", Key="uncaptioned.txt", Body=b"a late caption")
    for body in failed:
        deployment.send(body)
    assert deployment.drain() == set()
    deployment.flush()
    index, seen = deployment.packed(tmp_path)
    assert seen == Counter(["good.jpg", "uncaptioned.jpg"])
    assert Counter(item.reason for item in index.rejected()) == {
        "image-corrupt": 1,
        "image-missing": 1,
        "message-unreadable": 2,
    }


def test_an_invalid_record_does_not_affect_other_records(
    deployment: Deployment, tmp_path: Path
) -> None:
    deployment.arrive("a.jpg", image_bytes(1))
    deployment.arrive("b.jpg", image_bytes(2))
    batch = deployment.receive()
    records = [json.loads(message["body"])["Records"][0] for message in batch]
    deployment.delete(batch)
    deployment.send(json.dumps({"Records": [records[0], {"s3": 1}, "none", records[1]]}))
    assert deployment.drain() == set()
    deployment.flush()
    index, seen = deployment.packed(tmp_path)
    assert seen == Counter(["a.jpg", "b.jpg"])
    assert [item.reason for item in index.rejected()] == ["message-unreadable"] * 2


def test_an_unwritable_destination_fails_only_the_messages_that_need_it(
    deployment: Deployment, tmp_path: Path
) -> None:
    deployment.s3.delete_bucket(Bucket="packed")
    deployment.arrive("a.jpg", image_bytes(1))
    deployment.send(json.dumps({"Service": "Amazon S3", "Event": "s3:TestEvent"}))
    [failed] = deployment.drain()
    assert json.loads(failed)["Records"][0]["s3"]["object"]["key"] == "a.jpg"
    deployment.aws.make_bucket("packed")
    deployment.send(failed)
    assert deployment.drain() == set()
    deployment.flush()
    assert deployment.packed(tmp_path)[1] == Counter(["a.jpg"])


def test_abandoned_uploads_are_aborted_after_a_day(deployment: Deployment) -> None:
    def unfinished_uploads() -> list[dict[str, Any]]:
        listing = deployment.s3.list_multipart_uploads(Bucket="packed")
        uploads: list[dict[str, Any]] = listing["Uploads"]
        return uploads

    keys = ("set/shards/streamed-000000.tar", "set/index.parquet", "other/index.parquet")
    for key in keys:
        deployment.s3.create_multipart_upload(Bucket="packed", Key=key)
    packer = Sealer(deployment.destination, 1000)
    started = unfinished_uploads()[0]["Initiated"]
    assert packer.abort_abandoned_uploads(started + timedelta(hours=23)) == 0
    assert packer.abort_abandoned_uploads(started + timedelta(hours=25)) == 2
    assert [upload["Key"] for upload in unfinished_uploads()] == ["other/index.parquet"]


@pytest.mark.slow
def test_concurrent_invocations_pack_each_image_once(
    deployment: Deployment, tmp_path: Path
) -> None:
    """Six invocations with overlapping batches all try to build shards."""
    names = [f"{number:02}.jpg" for number in range(24)]
    for number, name in enumerate(names):
        deployment.arrive(name, image_bytes(number))
    messages = []
    while batch := deployment.receive():
        messages += batch
        deployment.delete(batch)
    start = threading.Barrier(6)

    def invoke(number: int) -> Any:
        start.wait()
        batch = messages[number * 4 : number * 4 + 8]
        response = lambda_handler.stage({"Records": batch}, FakeContext())
        deployment.flush()
        return response["batchItemFailures"]

    with ThreadPoolExecutor(6) as pool:
        assert list(pool.map(invoke, range(6))) == [[]] * 6
    deployment.flush()
    index, seen = deployment.packed(tmp_path)
    assert seen == Counter(names)
    assert len(deployment.keys(f"{STREAM_STATE}/done/")) == len(index)


class KilledError(BaseException):
    """Simulates the death of a function that ran out of time: nothing runs after it."""


@pytest.mark.parametrize("num_writes", [*range(1, 36, 3), 29, 30])
def test_a_kill_between_any_two_writes_loses_and_repeats_nothing(
    deployment: Deployment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_writes: int
) -> None:
    """The function dies before its n-th write to S3; its messages are delivered again."""
    names = [f"{number}.jpg" for number in range(6)]
    for number, name in enumerate(names):
        deployment.arrive(name, image_bytes(number))
    batch = deployment.receive()
    remaining = [num_writes]

    def counted(method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            remaining[0] -= 1
            if remaining[0] < 0:
                raise KilledError
            return method(*arguments)

        return call

    with monkeypatch.context() as patch:
        for name in ("create_if_absent", "atomic_writer", "writer_if", "remove"):
            patch.setattr(S3Prefix, name, counted(getattr(S3Prefix, name)))
        try:
            lambda_handler.stage({"Records": batch}, FakeContext())
            deployment.flush()
        except KilledError:
            pass
    assert lambda_handler.stage({"Records": batch}, FakeContext()) == {"batchItemFailures": []}
    deployment.flush()
    assert deployment.packed(tmp_path)[1] == Counter(names)
    assert deployment.keys(f"{STREAM_STATE}/staged/") == []


def test_an_overwritten_image_is_packed_once(deployment: Deployment, tmp_path: Path) -> None:
    """Two messages about one object; the first names a version that no longer exists."""
    deployment.arrive("a.jpg", image_bytes(1))
    deployment.arrive("a.jpg", image_bytes(2))
    assert deployment.drain() == set()
    deployment.flush()
    assert deployment.packed(tmp_path)[1] == Counter(["a.jpg"])


def test_no_shard_is_started_without_enough_time(deployment: Deployment) -> None:
    for number in range(8):
        deployment.arrive(f"{number}.jpg", image_bytes(number))
    batch = deployment.receive()
    lambda_handler.stage({"Records": batch}, FakeContext())
    late = lambda_handler.seal({"flush": True}, FakeContext(seconds=10))
    assert late == {"sealed": 0, "uploads_aborted": 0, "indexed": 0}
    assert deployment.keys("shards/") == []
    assert len(deployment.keys(f"{STREAM_STATE}/staged/")) == 8


def test_streaming_adds_to_a_pack(deployment: Deployment, aws: Aws, tmp_path: Path) -> None:
    """The index keeps the shards of the pack, its columns and what it was packed with."""
    from sm_train.toolkit.data_prep.packing.pack import PackJob, pack
    from sm_train.toolkit.data_prep.packing.tables import TableOptions

    from tests.support.image_files import write_album

    write_album(tmp_path / "in", 5)
    table = TableOptions(index_columns=("source",))
    job = PackJob(str(tmp_path / "in"), "s3://packed/set", None, 10**6, 1, table)
    before = pack(job, lambda _: None).index
    deployment.arrive("new.jpg", image_bytes(9))
    assert deployment.drain() == set()
    deployment.flush()
    deployment.s3.download_file("packed", "set/index.parquet", str(tmp_path / "index.parquet"))
    index = ShardIndex(tmp_path / "index.parquet")
    assert index.names == ["shard-000000.tar", "streamed-000000.tar"]
    assert index.header.samples == 6
    assert index.header.columns == {"source": "text"}
    assert index.header.inputs == before.header.inputs
    assert index.shard(0) == before.shard(0)
    assert index.shard(1).columns == {"source": ("s3://raw/new.jpg",)}
    groups = index.samples_by_group(["source"])
    assert sum(len(group.columns) for group in groups) == 6
    added = pack(replace(job, append=True), lambda _: None)
    assert added.appended is not None
    assert (added.appended.samples, added.samples) == (0, 6)
    assert Sealer(S3Prefix("packed", "set/", S3Access()), 1).seal() == 0


@pytest.mark.slow
def test_a_removed_image_does_not_return_with_the_next_shard(
    deployment: Deployment, cli: Cli, tmp_path: Path
) -> None:
    """The index keeps the rewritten shard, and lists the old one never again."""
    for number in range(3):
        deployment.arrive(f"{number}.jpg", image_bytes(number))
    assert deployment.drain() == set()
    deployment.flush()
    index, seen = deployment.packed(tmp_path / "first")
    assert seen == Counter({"0.jpg": 1, "1.jpg": 1, "2.jpg": 1})
    key = index.keys(0)[0]
    run_cli(deployment, cli, "remove", "s3://packed/set", key, "--yes")
    deployment.arrive("new.jpg", image_bytes(9))
    assert deployment.drain() == set()
    deployment.flush()
    index, seen = deployment.packed(tmp_path / "second")
    assert index.names == ["streamed-000000-r1.tar", "streamed-000001.tar"]
    assert key not in {*index.keys(0), *index.keys(1)}
    assert (seen.total(), seen["new.jpg"]) == (3, 1)


def test_the_function_stages_in_the_lambda_runtime(deployment: Deployment, tmp_path: Path) -> None:
    """Uses AWS's runtime interface client, as the function's container does."""
    for number in range(3):
        deployment.arrive(f"{number}.jpg", image_bytes(number))
    assert handle_all(deployment) == [("response", {"batchItemFailures": []})]
    assert deployment.flush() == {"sealed": 1, "uploads_aborted": 0, "indexed": 1}
    assert deployment.packed(tmp_path)[1] == Counter(["0.jpg", "1.jpg", "2.jpg"])


@pytest.mark.slow
def test_a_message_that_always_fails_becomes_a_dead_letter_alone(
    deployment: Deployment, tmp_path: Path
) -> None:
    """It is delivered three times, as the queue's redrive policy says; others are not repeated."""
    deployment.arrive("good.jpg", image_bytes(1))
    deployment.arrive("uncaptioned.jpg", image_bytes(2), caption=None)
    deployment.arrive("cut.jpg", image_bytes(3)[:300])
    deployment.send("not JSON")
    responses = [response for _, response in handle_all(deployment)]
    assert [len(response["batchItemFailures"]) for response in responses] == [1, 1, 1]
    [dead] = deployment.sqs.receive_message(QueueUrl=deployment.dead_letters)["Messages"]
    assert json.loads(dead["Body"])["Records"][0]["s3"]["object"]["key"] == "uncaptioned.jpg"
    # Redrive: the caption has arrived, and SQS delivers the message again.
    deployment.s3.put_object(Bucket="raw", Key="uncaptioned.txt", Body=b"a late caption")
    deployment.send(dead["Body"])
    assert handle_all(deployment) == [("response", {"batchItemFailures": []})]
    deployment.flush()
    index, seen = deployment.packed(tmp_path)
    assert seen == Counter(["good.jpg", "uncaptioned.jpg"])
    assert [item.reason for item in index.rejected()] == ["message-unreadable", "image-corrupt"]


def test_a_request_that_hangs_fails_one_message(
    deployment: Deployment, aws: Aws, tmp_path: Path
) -> None:
    """The function reports it before Lambda ends it: the others are not delivered again."""
    resumed = threading.Event()

    def hang(method: str, path: str) -> None:
        if path == "/raw/1.jpg" and method == "GET":
            resumed.wait(DEADLINE)

    aws.intercept = hang
    for number in range(3):
        deployment.arrive(f"{number}.jpg", image_bytes(number))
    with lambda_runtime(deployment, lambda_handler.REPORT_SECONDS + 12) as (server, _):
        wait_until(lambda: server.responses)
        resumed.set()
        assert server.idle.wait(DEADLINE)
    first, second = (response["batchItemFailures"] for _, response in server.responses)
    assert (len(first), second) == (1, [])
    deployment.flush()
    assert deployment.packed(tmp_path)[1] == Counter(["0.jpg", "1.jpg", "2.jpg"])


@pytest.mark.slow
def test_a_throttled_request_is_sent_again(
    deployment: Deployment, aws: Aws, tmp_path: Path
) -> None:
    """S3 answers 503 at first; no message is delivered a second time for it."""
    slow_down = b"<Error><Code>SlowDown</Code><Message>Please reduce your request rate.</Message>"
    remaining = Counter({"/raw/0.jpg": 2, "/raw/1.txt": 2})

    def throttle(method: str, path: str) -> tuple[int, bytes] | None:
        remaining[path] -= 1
        throttled = remaining[path] >= 0 and method == "GET"
        return (503, slow_down + b"</Error>") if throttled else None

    for number in range(2):
        deployment.arrive(f"{number}.jpg", image_bytes(number))
    aws.intercept = throttle
    assert handle_all(deployment) == [("response", {"batchItemFailures": []})]
    assert min(remaining["/raw/0.jpg"], remaining["/raw/1.txt"]) < 0
    deployment.flush()
    assert deployment.packed(tmp_path)[1] == Counter(["0.jpg", "1.jpg"])


@pytest.mark.slow
def test_a_function_that_is_ended_by_its_timeout_packs_each_image_once(
    deployment: Deployment, aws: Aws, tmp_path: Path
) -> None:
    """Lambda kills the process, and the queue delivers all of its messages again."""
    killed = threading.Event()

    def delay_last(method: str, path: str) -> None:
        if path == "/raw/5.jpg":
            killed.wait(DEADLINE)

    names = [f"{number}.jpg" for number in range(6)]
    for number, name in enumerate(names):
        deployment.arrive(name, image_bytes(number))
    aws.intercept = delay_last
    with lambda_runtime(deployment) as (_, process):
        wait_until(lambda: deployment.keys(f"{STREAM_STATE}/staged/"))
        process.kill()
        process.wait()
    killed.set()
    assert handle_all(deployment)[-1] == ("response", {"batchItemFailures": []})
    deployment.flush()
    assert deployment.packed(tmp_path)[1] == Counter(names)


def test_a_known_rejection_is_indexed_once(deployment: Deployment, tmp_path: Path) -> None:
    """A repeated message finds its rejection in the index, and does not add another one."""
    deployment.arrive("good.jpg", image_bytes(1))
    deployment.arrive("cut.jpg", image_bytes(2)[:300])
    batch = deployment.receive()
    for _ in range(2):
        lambda_handler.stage({"Records": batch}, FakeContext())
        deployment.flush()
        assert deployment.keys(f"{STREAM_STATE}/rejected/") == []
    index, _ = deployment.packed(tmp_path)
    assert [item.source for item in index.rejected()] == ["s3://raw/cut.jpg"]


def test_rejections_alone_make_no_index(deployment: Deployment, tmp_path: Path) -> None:
    """They wait for the first shard: an index without shards would look like an empty pack."""
    deployment.arrive("cut.jpg", image_bytes(2)[:300])
    assert deployment.drain() == set()
    assert deployment.flush()["indexed"] == 0
    assert deployment.keys("index") == []
    deployment.arrive("good.jpg", image_bytes(1))
    assert deployment.drain() == set()
    deployment.flush()
    index, _ = deployment.packed(tmp_path)
    assert [item.source for item in index.rejected()] == ["s3://raw/cut.jpg"]


def test_each_index_adds_what_is_new(deployment: Deployment, aws: Aws, tmp_path: Path) -> None:
    """Records that are in the index are not read again, and their keys ascend."""
    for number in range(4):
        deployment.arrive(f"{number}.jpg", image_bytes(number))
        assert deployment.drain() == set()
        aws.requests.clear()
        assert deployment.flush()["indexed"] == 1
        read = [path for method, path, _ in aws.requests if method == "GET" and "records" in path]
        assert read == [f"/packed/set/{STREAM_STATE}/records/{number:09d}"]
    index, _ = deployment.packed(tmp_path)
    assert [index.keys(number) for number in range(4)] == [
        [f"s{number:06d}-000000"] for number in range(4)
    ]
    assert deployment.flush() == {"sealed": 0, "uploads_aborted": 0, "indexed": 0}


@pytest.mark.slow
def test_a_shard_is_claimed_from_the_first_page_of_a_backlog(
    deployment: Deployment, aws: Aws
) -> None:
    """The number of staged samples does not change what a claim costs."""
    for number in range(1500):
        deployment.destination.create_if_absent(f"{STREAM_STATE}/staged/{number:032x}", b"0" * 100)
    aws.requests.clear()
    chosen, size = Sealer(deployment.destination, 1000)._choose_unseen(set())
    assert (len(chosen), size) == (10, 1000)
    listings = [query for _, _, query in aws.requests if "staged" in query]
    assert len(listings) == 1


def test_append_keeps_what_arrived(deployment: Deployment, cli: Cli, tmp_path: Path) -> None:
    """It packs what the streaming pack does not have, and keeps its rejected rows."""
    for number in range(3):
        deployment.arrive(f"photos/{number}.jpg", image_bytes(number))
    deployment.arrive("photos/cut.jpg", image_bytes(3)[:300])
    assert deployment.drain() == set()
    deployment.flush()
    deployment.s3.put_object(Bucket="raw", Key="photos/old.jpg", Body=image_bytes(7))
    deployment.s3.put_object(Bucket="raw", Key="photos/old.txt", Body=b"was there before")
    arguments = ("pack", "s3://raw/photos/", "s3://packed/set", "--append", "--shard-size", "20kB")
    run_cli(deployment, cli, *arguments)
    index, seen = deployment.packed(tmp_path)
    assert [item.source for item in index.rejected()] == ["s3://raw/photos/cut.jpg"]
    assert seen == Counter([f"photos/{number}.jpg" for number in range(3)] + ["old.jpg"])
    # More arrive, and the next append finds nothing.
    deployment.arrive("photos/9.jpg", image_bytes(9))
    assert deployment.drain() == set()
    deployment.flush()
    run_cli(deployment, cli, *arguments)
    assert deployment.packed(tmp_path / "again")[1].total() == 5


APPEND = ("pack", "s3://raw/photos/", "s3://packed/set", "--append", "--shard-size", "20kB")


def test_an_appended_image_is_not_packed_again_when_its_message_returns(
    deployment: Deployment, cli: Cli, tmp_path: Path
) -> None:
    """Its caption came with the append, or later; a new version is another image."""
    for number in range(2):
        deployment.arrive(f"photos/{number}.jpg", image_bytes(number))
    late = [f"photos/late{number}.jpg" for number in range(3)]
    for number, name in enumerate(late):
        deployment.arrive(name, image_bytes(10 + number), caption=None)
    dead = deployment.drain()
    assert len(dead) == 3
    deployment.flush()
    for name in late[:2]:  # the third one still has none: the append rejects it
        write_caption(deployment, name)
    run_cli(deployment, cli, *APPEND)
    index, seen = deployment.packed(tmp_path)
    assert seen.total() == 4
    assert [(item.source, item.reason) for item in index.rejected()] == [
        ("late2.jpg", "caption-missing")
    ]
    write_caption(deployment, late[2])
    for body in dead:
        deployment.send(body)
    time.sleep(1.1)  # S3's dates have whole seconds
    deployment.arrive(late[0], image_bytes(77))
    # The old version of the first image is not there any more.
    assert deployment.drain() == set()
    deployment.flush()
    expected = ["photos/0.jpg", "photos/1.jpg", "late0.jpg", "late1.jpg", late[0], late[2]]
    assert deployment.packed(tmp_path / "again")[1] == Counter(expected)
    # A message that returns after the image was removed brings nothing back.
    run_cli(deployment, cli, "remove", "s3://packed/set", "late1.jpg", "--yes")
    for body in dead:
        deployment.send(body)
    assert deployment.drain() == set()
    deployment.flush()
    assert deployment.packed(tmp_path / "removed")[1].total() == 5


def test_an_image_of_which_one_row_was_rejected_is_packed(
    deployment: Deployment, cli: Cli, tmp_path: Path
) -> None:
    deployment.arrive("photos/0.jpg", image_bytes(0))
    deployment.arrive("photos/late.jpg", image_bytes(1), caption=None)
    [dead] = deployment.drain()
    deployment.flush()
    rows = [{"image": "s3://raw/photos/late.jpg", "caption": text} for text in ("a caption", "")]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    run_cli(deployment, cli, "pack", str(tmp_path / "rows.jsonl"), *APPEND[2:])
    deployment.send(dead)
    assert deployment.drain() == set()
    deployment.flush()
    assert deployment.packed(tmp_path)[1] == Counter(["photos/0.jpg", "photos/late.jpg"])


@pytest.mark.slow
def test_an_append_skips_images_that_are_on_their_way_to_the_index(
    deployment: Deployment, cli: Cli, tmp_path: Path
) -> None:
    """Staged ones, and those in a shard that no index has."""
    deployment.arrive("photos/first.jpg", image_bytes(1))
    assert deployment.drain() == set()
    deployment.flush()
    for number in range(20):
        deployment.arrive(f"photos/{number}.jpg", image_bytes(number))
    assert deployment.drain() == set()
    lambda_handler.seal({}, FakeContext())
    deployment.arrive("photos/staged.jpg", image_bytes(29))
    assert deployment.drain() == set()
    assert deployment.keys(".streaming/staged/")
    assert deployment.keys(".streaming/records/")
    deployment.s3.put_object(Bucket="raw", Key="photos/old.jpg", Body=image_bytes(30))
    write_caption(deployment, "photos/old.jpg")
    run_cli(deployment, cli, *APPEND)
    deployment.flush()
    arrived = ["photos/first.jpg", *(f"photos/{number}.jpg" for number in range(20))]
    expected = Counter([*arrived, "photos/staged.jpg", "old.jpg"])
    assert deployment.packed(tmp_path)[1] == expected


@pytest.mark.slow
def test_images_of_an_unfinished_append_wait_for_it(
    deployment: Deployment, cli: Cli, tmp_path: Path
) -> None:
    deployment.arrive("photos/0.jpg", image_bytes(0))
    deployment.arrive("photos/late.jpg", image_bytes(1), caption=None)
    [dead] = deployment.drain()
    deployment.flush()
    write_caption(deployment, "photos/late.jpg")

    def refuse_index(method: str, path: str) -> tuple[int, bytes] | None:
        is_index = method == "PUT" and path.partition("?")[0].endswith("/set/index.parquet")
        return (403, b"<Error><Code>AccessDenied</Code></Error>") if is_index else None

    deployment.aws.intercept = refuse_index
    run_cli(deployment, cli, *APPEND, code=4)
    deployment.aws.intercept = lambda method, path: None
    assert deployment.keys(".packing/")
    deployment.send(dead)
    assert deployment.drain() == {dead}
    run_cli(deployment, cli, *APPEND)
    deployment.send(dead)
    assert deployment.drain() == set()
    deployment.flush()
    assert deployment.packed(tmp_path)[1] == Counter(["photos/0.jpg", "late.jpg"])


def write_caption(deployment: Deployment, image: str) -> None:
    key = f"{image.rpartition('.')[0]}.txt"
    deployment.s3.put_object(Bucket="raw", Key=key, Body=b"a caption")


def test_an_append_keeps_a_shard_that_is_indexed_while_it_runs(
    deployment: Deployment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sm_train.toolkit.data_prep.packing.pack import PackJob, pack

    from tests.support.image_files import write_album

    deployment.arrive("first.jpg", image_bytes(1))
    assert deployment.drain() == set()
    deployment.flush()
    deployment.arrive("second.jpg", image_bytes(2))
    assert deployment.drain() == set()
    replace_if = S3Prefix.replace_if

    def flush_before(storage: S3Prefix, *arguments: Any) -> bool:
        monkeypatch.setattr(S3Prefix, "replace_if", replace_if)
        deployment.flush()
        return replace_if(storage, *arguments)

    write_album(tmp_path / "in", 5)
    monkeypatch.setattr(S3Prefix, "replace_if", flush_before)
    pack(
        PackJob(str(tmp_path / "in"), "s3://packed/set", None, 20000, 1, append=True),
        lambda _: None,
    )
    index, seen = deployment.packed(tmp_path / "packed")
    assert index.names[:2] == ["streamed-000000.tar", "streamed-000001.tar"]
    assert seen.total() == 7
    assert len(index.header.appended) == 2


def test_index_keeps_what_arrived(deployment: Deployment, cli: Cli, tmp_path: Path) -> None:
    """`sm-train index` adds a sealed shard that the index does not have yet, and keeps the rest."""
    deployment.arrive("a.jpg", image_bytes(1))
    deployment.arrive("cut.jpg", image_bytes(2)[:300])
    assert deployment.drain() == set()
    deployment.flush()
    before, _ = deployment.packed(tmp_path / "before")
    deployment.arrive("b.jpg", image_bytes(3))
    assert deployment.drain() == set()
    Sealer(deployment.destination, 1).seal(flush=True)
    run_cli(deployment, cli, "index", "s3://packed/set/shards")
    index, seen = deployment.packed(tmp_path / "after")
    assert seen == Counter(["a.jpg", "b.jpg"])
    assert index.header.inputs == before.header.inputs
    assert index.shard(0) == before.shard(0)
    assert list(index.rejected()) == list(before.rejected())
    # The function adds the names of its images, so that append knows them.
    assert deployment.flush()["indexed"] == 0
    arguments = ("pack", "s3://raw/", "s3://packed/set", "--append", "--shard-size", "20kB")
    run_cli(deployment, cli, *arguments)
    assert deployment.packed(tmp_path / "appended")[1] == Counter(["a.jpg", "b.jpg"])


def test_a_removed_image_is_not_staged_again(
    deployment: Deployment, cli: Cli, tmp_path: Path
) -> None:
    """It is removed by its address, and neither a late message nor a new version brings it back."""
    for number in range(3):
        deployment.arrive(f"{number}.jpg", image_bytes(number))
    assert deployment.drain() == set()
    deployment.flush()
    run_cli(deployment, cli, "remove", "s3://packed/set", "s3://raw/1.jpg", "--yes")
    deployment.arrive("1.jpg", image_bytes(1))
    deployment.arrive("1.jpg", image_bytes(8))
    assert deployment.drain() == set()
    deployment.flush()
    assert deployment.packed(tmp_path)[1] == Counter(["0.jpg", "2.jpg"])


def run_cli(deployment: Deployment, cli: Cli, *arguments: str, code: int = 0) -> str:
    """Run a command on the deployment's buckets; return what it prints to stderr."""
    options = ("--region", "us-east-1", "--bucket-kms-key", "packed=alias/packed")
    environment = deployment.aws.environment
    run = cli(*options, *arguments, network="loopback", env=environment)
    assert run.returncode == code, run.stderr
    return str(run.stderr)


FUNCTION = """
from sm_train.entrypoints.data_prep.streaming import lambda_handler
import json
class FakeContext:
    def get_remaining_time_in_millis(self): return 800_000
print(lambda_handler.stage(json.loads(sys.argv[2]), FakeContext()))
print(lambda_handler.seal({"flush": True}, FakeContext()))
"""


def test_the_container_image_has_all_required_packages(
    deployment: Deployment, cli: Cli, tmp_path: Path
) -> None:
    packages = lambda_packages(cli("template", "pack-lambda-image").stdout)
    deployment.arrive("a.jpg", image_bytes(1))
    event = json.dumps({"Records": deployment.receive()})
    run = subprocess.run(
        [sys.executable, "-c", RESTRICT_IMPORTS + FUNCTION, " ".join(packages), event],
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    assert deployment.packed(tmp_path)[1] == Counter(["a.jpg"])


def test_the_template_passes_cfn_lint(cli: Cli, tmp_path: Path) -> None:
    printed = cli("template", "pack-lambda")
    assert printed.returncode == 0
    (tmp_path / "template.yaml").write_text(printed.stdout)
    command = [Path(sys.executable).parent / "cfn-lint", "template.yaml"]
    linted = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert linted.returncode == 0, linted.stdout


def staged_six(deployment: Deployment) -> list[str]:
    for number in range(6):
        deployment.arrive(f"{number}.jpg", image_bytes(number))
    assert deployment.drain() == set()
    return deployment.keys(STAGED)


@pytest.mark.parametrize("nested", [False, True])
def test_a_damaged_rejection_or_record_does_not_stop_the_others(
    deployment: Deployment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nested: bool
) -> None:
    """What is damaged is named after everything else is in the index."""
    monkeypatch.setenv("SM_TRAIN_SHARD_BYTES", "1000")
    damage = b"[" * 100_000 if nested else b'{"source": 1}'
    staged_six(deployment)
    deployment.put(f"{REJECTED}/m1", damage)
    with pytest.raises(PlanError, match=f"{REJECTED}/m1: damaged"):
        deployment.flush()
    _, seen = deployment.packed(tmp_path / "first")
    assert len(seen) == 6
    deployment.s3.delete_object(Bucket="packed", Key=f"set/{REJECTED}/m1")  # as the message says
    deployment.flush()
    for number in range(6, 10):
        deployment.arrive(f"{number}.jpg", image_bytes(number))
    assert deployment.drain() == set()
    Sealer(deployment.destination, 1000).seal(flush=True)
    first, *others = deployment.keys(RECORDS)
    assert others
    content = deployment.destination.read(first)
    deployment.put(first, damage)
    with pytest.raises(PlanError, match=rf"{first}: not a shard index.*; restore"):
        deployment.flush()
    assert deployment.keys(RECORDS) == [first]
    deployment.put(first, content)
    deployment.flush()
    _, seen = deployment.packed(tmp_path / "second")
    assert seen == Counter({f"{number}.jpg": 1 for number in range(10)})


def test_foreign_names_in_the_state_are_left_alone(deployment: Deployment, tmp_path: Path) -> None:
    staged_six(deployment)
    for name in (f"{MANIFESTS}/README.txt", f"{RECORDS}/000000000.bak", f"{DONE}/"):
        deployment.put(name, b"")
    deployment.flush()
    assert len(deployment.packed(tmp_path)[1]) == 6


@pytest.mark.parametrize("plan", [b"{", b'{"inputs": 5}', b'{"inputs": ["a"]}', b"[" * 100_000])
def test_a_damaged_plan_of_pack_does_not_stop_the_stream(
    deployment: Deployment, tmp_path: Path, plan: bytes
) -> None:
    """Nobody can finish that pack, so none of its images will be packed by it."""
    deployment.put(PLAN_NAME, plan)
    staged_six(deployment)
    deployment.flush()
    assert len(deployment.packed(tmp_path)[1]) == 6


def test_a_damaged_staged_sample_is_named_and_the_others_are_packed(
    deployment: Deployment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SM_TRAIN_SHARD_BYTES", "1000")
    damaged, *_ = staged_six(deployment)
    content = deployment.destination.read(damaged)
    deployment.put(damaged, b"junk")
    with pytest.raises(PlanError, match=rf"{damaged}: damaged"):
        deployment.flush()
    before = len(deployment.packed(tmp_path / "first")[1])
    assert 0 < before < 6
    deployment.put(damaged, content)
    deployment.flush()
    assert len(deployment.packed(tmp_path / "second")[1]) == 6


def test_the_fix_of_a_damaged_manifest_loses_no_image(
    deployment: Deployment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its number is not given to other samples if its shard has been written."""
    monkeypatch.setenv("SM_TRAIN_SHARD_BYTES", str(10**9))
    staged_six(deployment)
    sealer = Sealer(deployment.destination, 10**9)
    with monkeypatch.context() as patch:
        patch.setattr(Sealer, "_mark_seen", lambda *_: 1 / 0)  # it ends after shard and record
        with pytest.raises(ZeroDivisionError):
            sealer.seal(flush=True)
    manifest = numbered(MANIFESTS, 0)
    content = deployment.destination.read(manifest)
    deployment.put(manifest, b'["x"')
    with pytest.raises(PlanError, match=rf"{manifest}: damaged.*; restore an earlier version"):
        deployment.flush()
    deployment.put(manifest, content)
    deployment.flush()
    assert len(deployment.packed(tmp_path / "restored")[1]) == 6
    # Without a record, the samples of a deleted manifest go into the next shard.
    for number in range(6, 9):
        deployment.arrive(f"{number}.jpg", image_bytes(number))
    assert deployment.drain() == set()
    deployment.put(numbered(MANIFESTS, 1), b"[" * 100_000)
    with pytest.raises(PlanError, match="delete it, and its samples go into another shard"):
        deployment.flush()
    deployment.s3.delete_object(Bucket="packed", Key=f"set/{numbered(MANIFESTS, 1)}")
    deployment.flush()
    _, seen = deployment.packed(tmp_path / "deleted")
    assert seen == Counter({f"{number}.jpg": 1 for number in range(9)})


def test_a_claim_takes_as_many_requests_however_many_shards_there_are(
    deployment: Deployment, tmp_path: Path
) -> None:
    """Numbers are listed from the first shard on that is not done."""
    sealer = Sealer(deployment.destination, 10**9)

    def requests_of_a_shard(number: int) -> Counter[str]:
        deployment.arrive(f"{number}.jpg", image_bytes(number))
        assert deployment.drain() == set()
        deployment.aws.requests.clear()
        assert sealer.seal(flush=True) == 1
        kinds = Counter(
            "LIST" if "list-type" in query else method
            for method, _, query in deployment.aws.requests
        )
        assert deployment.flush()["indexed"] == 1
        return kinds

    requests_of_a_shard(0)
    few = requests_of_a_shard(1)
    # As if 2,000 more shards had been sealed, which takes two pages of each list.
    names = [numbered(folder, n) for folder in (MANIFESTS, DONE) for n in range(2, 2002)]
    with ThreadPoolExecutor(16) as pool:
        list(pool.map(lambda name: deployment.destination.create_if_absent(name, b"[]"), names))
    requests_of_a_shard(2)
    assert requests_of_a_shard(3) == few
    index, seen = deployment.packed(tmp_path)
    assert index.names[-2:] == ["streamed-002002.tar", "streamed-002003.tar"]
    assert seen == Counter({f"{number}.jpg": 1 for number in range(4)})


def test_a_shard_that_is_not_done_is_found_however_many_are(
    deployment: Deployment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sealer that ended early is followed by others; the first open shard stays known."""
    monkeypatch.setenv("SM_TRAIN_SHARD_BYTES", "1")
    staged_six(deployment)
    sealer = Sealer(deployment.destination, 1)
    finish = Sealer._finish
    with monkeypatch.context() as patch:
        patch.setattr(Sealer, "_finish", lambda self, n: n != 2 and finish(self, n))
        sealer.seal(flush=True)
    assert deployment.destination.read(FIRST_OPEN) == b"2"
    deployment.flush()
    assert len(deployment.packed(tmp_path)[1]) == 6
    assert deployment.destination.read(FIRST_OPEN) == b"6"
