"""What a node stores of its job: heartbeats, output in segments, and its end."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sm_train.entrypoints.clusters.log_segments import LogSegments, events_only
from sm_train.entrypoints.clusters.node_record import (
    MISSING_SECONDS,
    STOP_FILE,
    StopRequest,
    StoredNode,
    read_nodes,
    store_stop_request,
)
from sm_train.entrypoints.clusters.node_recorder import FIRST_SEGMENTS, NodeRecorder
from sm_train.entrypoints.storage.storage import LocalFolder, write_file

from tests.entrypoints.clusters.node_recorder_support import record
from tests.support.deadline import DEADLINE, wait_until

STARTED = 1_700_000_000.5


def recorder(storage: LocalFolder, **settings: object) -> NodeRecorder:
    """Return a recorder that stores often; a request to stop or a warning fails the test."""
    defaults: dict[str, object] = {"on_stop": pytest.fail, "warn": pytest.fail, "interval": 0.01}
    own = settings.pop("record", None) or record()
    return NodeRecorder(storage, own, **(defaults | settings))  # type: ignore[arg-type]


def stored_log(storage: LocalFolder) -> bytes:
    [node] = read_nodes(storage)
    return b"".join(storage.read(name) for name in node.segments)


@given(st.lists(st.binary(max_size=40)), st.integers(1, 50))
def test_stored_segments_are_the_output_whenever_they_are_stored(
    outputs: list[bytes], segment_bytes: int
) -> None:
    segments = LogSegments(segment_bytes=segment_bytes, max_waiting=10_000)
    stored: dict[int, bytes] = {}
    for number, output in enumerate(outputs):
        segments.add(output)
        if number % 3 == 0:
            for segment in segments.changed():
                stored[segment.number] = segment.content
                segments.stored(segment)
            assert segments.changed() == []
    for segment in segments.changed():
        stored[segment.number] = segment.content
        segments.stored(segment)
    assert b"".join(stored[number] for number in sorted(stored)) == b"".join(outputs)


def test_output_that_waits_too_long_for_the_storage_is_dropped_and_counted() -> None:
    segments = LogSegments(segment_bytes=10, max_waiting=2)
    for _ in range(5):
        segments.add(b"123456789\n")
    waiting = segments.changed()
    assert [segment.content for segment in waiting] == [b"123456789\n"] * 2
    for segment in waiting:
        segments.stored(segment)
    segments.add(b"then\n")
    [after] = segments.changed()
    assert b"30 bytes of output were not stored\nthen\n" in after.content


def test_node_stores_heartbeats_and_its_output_until_its_end(tmp_path: Path) -> None:
    storage = LocalFolder(tmp_path)
    running = recorder(storage)
    running.start(b'{"name": "art"}')
    wait_until(lambda: bool(read_nodes(storage)))
    [node] = read_nodes(storage)
    assert node.is_live(time.time())
    first = node.record
    assert (first.state, first.exit_code) == ("preparing", None)
    running.add(b"step 1\n")
    running.set_state("training")
    wait_until(lambda: read_nodes(storage)[0].record.ran > first.ran)
    wait_until(lambda: read_nodes(storage)[0].record.state == "training")
    running.add(b"step 2\n")
    running.finish(3)
    [node] = read_nodes(storage)
    assert (node.record.state, node.record.exit_code) == ("ended", 3)
    assert stored_log(storage) == b"step 1\nstep 2\n"
    assert (tmp_path / "job-records/run.json").read_bytes() == b'{"name": "art"}'


def test_middle_of_a_long_log_keeps_its_event_lines(tmp_path: Path) -> None:
    storage = LocalFolder(tmp_path)
    running = recorder(storage, segments=LogSegments(segment_bytes=20), newest_segments=2)
    running.start()
    for number in range(FIRST_SEGMENTS + 6):
        running.add(f'SMT {{"kind": {number}}}\ntext {number}\n'.encode())
    running.finish(0)
    log = stored_log(storage).decode()
    assert [line for line in log.splitlines() if line.startswith("SMT")] == [
        f'SMT {{"kind": {number}}}' for number in range(FIRST_SEGMENTS + 6)
    ]
    kept = [int(line.removeprefix("text ")) for line in log.splitlines() if "text" in line]
    assert kept == [0, 1, 2, 3, FIRST_SEGMENTS + 4, FIRST_SEGMENTS + 5]
    assert events_only(b'a\n7: SMT {"kind"}\nSMT is a word\n') == b'7: SMT {"kind"}\n'


def test_request_to_stop_counts_for_nodes_that_started_before_it(tmp_path: Path) -> None:
    storage, received = LocalFolder(tmp_path), list[StopRequest]()
    store_stop_request(storage, "the user")
    storage.set_modified_ns(STOP_FILE, int((time.time() - 60) * 1e9))
    running = recorder(storage, on_stop=received.append)
    running.start()
    wait_until(lambda: bool(read_nodes(storage)))
    assert received == []
    store_stop_request(storage, "the user")
    wait_until(lambda: bool(received))
    running.finish(0)
    assert [request.by for request in received] == ["the user"]
    assert read_nodes(storage)[0].record.stopped_by == "the user"


def test_storage_that_fails_is_reported_once_and_used_again(tmp_path: Path) -> None:
    (tmp_path / "job-records").write_text("a file in its place")
    storage, warnings = LocalFolder(tmp_path), list[str]()
    running = recorder(storage, warn=warnings.append)
    running.add(b"early\n")
    running.start()
    wait_until(lambda: bool(warnings))
    time.sleep(0.1)
    (tmp_path / "job-records").unlink()
    wait_until(lambda: bool(read_nodes(storage)))
    running.finish(0)
    assert len(warnings) == 1
    assert "records are not stored at" in warnings[0]
    assert stored_log(storage) == b"early\n"


def test_node_is_lost_when_its_heartbeats_cease(tmp_path: Path) -> None:
    node = record(started=STARTED, seen=STARTED + 100, ran=100.0, machine="gpu-07")
    found = StoredNode(node, (), STARTED + 3700)
    assert found.is_live(found.seen + MISSING_SECONDS)
    assert found.is_lost(found.seen + MISSING_SECONDS + 1)
    assert (node.label, found.started) == ("algo-1 (gpu-07)", STARTED + 3600)
    write_file(LocalFolder(tmp_path), node.file, node.to_json())
    write_file(LocalFolder(tmp_path), "job-records/algo-2-1700000000/node.json", b"[1]")
    assert [found.record for found in read_nodes(LocalFolder(tmp_path))] == [node]


def test_output_of_children_is_printed_and_recorded() -> None:
    program = """
import subprocess, sys
from sm_train.entrypoints.clusters.node_recorder import recorded_output
recorded = []
print("before", flush=True)
with recorded_output(recorded.append):
    print("own")
    subprocess.run([sys.executable, "-c", "import sys; print('child', file=sys.stderr)"])
print(b"".join(recorded))
"""
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        check=True,
        timeout=DEADLINE,
    )
    before, *both, recorded = done.stdout.splitlines()
    assert before == "before"
    assert sorted(both) == ["child", "own"]
    assert eval(recorded) == "".join(f"{line}\n" for line in both).encode()


def test_a_node_stores_its_record_when_it_starts(tmp_path: Path) -> None:
    """A node that dies in its first half minute is known, too."""
    storage = LocalFolder(tmp_path)
    recording = recorder(storage, interval=3600.0)
    recording.start()
    wait_until(lambda: bool(read_nodes(storage)))
    recording.finish(0)
