"""Messages between watchdogs, as real datagrams on loopback."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sm_train.entrypoints.base.digests import message_key, seal
from sm_train.entrypoints.monitoring.first_failure import Failure
from sm_train.entrypoints.monitoring.heartbeat import Phase
from sm_train.entrypoints.monitoring.peers import (
    NodeStatus,
    PeerLink,
    PeerStall,
    rendezvous_address,
)
from sm_train.entrypoints.monitoring.stall_detector import RankStatus
from sm_train.entrypoints.monitoring.stragglers import BusyTotals

from tests.entrypoints.monitoring.peers_support import free_port

RANK = RankStatus(8, 1, Phase.STEP, 5, 11)
STATUS = NodeStatus((RANK,), PeerStall("no heartbeat", 2.0), None, (BusyTotals(8, 1, 5, 2.5, 0.0),))
OWN = NodeStatus()
KEY = b"key of the tests"


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def linked_pair(clock: Clock, jobs: tuple[str, str] = ("run", "run")) -> tuple[PeerLink, PeerLink]:
    address = ("127.0.0.1", free_port())
    first, second = (
        PeerLink(job, node, 2, address, key=KEY, poll_seconds=1, clock=clock)
        for node, job in enumerate(jobs)
    )
    return first, second


def poll_until(condition: Callable[[], bool], *polls: Callable[[], None]) -> None:
    """Poll repeatedly: loopback delivers with a delay, and drops nothing."""
    for _ in range(1000):
        for poll in polls:
            poll()
        if condition():
            return
    raise AssertionError("nothing arrived")


def test_first_node_receives_statuses_and_the_others_receive_its_reply() -> None:
    clock = Clock()
    first, second = linked_pair(clock)
    assert first.is_reporter
    assert second.is_reporter  # there is no reply yet
    poll_until(
        lambda: bool(first.statuses()) and not second.is_reporter,
        lambda: second.exchange(STATUS),
        lambda: first.exchange(OWN),
    )
    assert first.statuses() == [RANK]
    assert first.stalls() == {1: PeerStall("no heartbeat", 2.0)}
    assert first.busy_totals() == [BusyTotals(8, 1, 5, 2.5, 0.0)]
    assert first.failures() == []
    clock.now = 5
    assert first.silent_nodes() == {}
    clock.now = 5 + 1
    assert first.silent_nodes() == {1: 5 + 1}
    # Cut off from the first node, the second one reports itself.
    assert second.is_reporter


def test_nodes_know_each_others_machines_also_after_one_is_lost() -> None:
    clock = Clock()
    first, second = linked_pair(clock)
    poll_until(
        lambda: bool(first.statuses()) and not second.is_reporter,
        lambda: second.exchange(replace(STATUS, machine="gpu-07")),
        lambda: first.exchange(NodeStatus(machine="gpu-03")),
    )
    assert first.machines() == second.machines() == {0: "gpu-03", 1: "gpu-07"}
    clock.now = 5 + 1
    assert first.silent_nodes().keys() == {1}
    assert first.machines()[1] == "gpu-07"


def test_failures_reach_the_first_node_and_come_back_with_its_replies() -> None:
    first, second = linked_pair(Clock())
    local = Failure("disconnected", "rank 8 failed: connection reset by peer", 1, 8)
    killed = Failure("killed", "rank 0 died without an error: SIGKILL", 0, 0)
    poll_until(
        lambda: first.failures() == [local] and second.failures() == [killed],
        lambda: second.exchange(NodeStatus(failure=local)),
        lambda: first.exchange(NodeStatus(failure=killed)),
    )


def test_first_node_sends_a_new_failure_to_nodes_that_it_heard_from_before() -> None:
    """It may end before they poll again."""
    first, second = linked_pair(Clock())
    killed = Failure("killed", "rank 0 died without an error: SIGKILL", 0, 0)
    poll_until(
        lambda: not second.is_reporter, lambda: second.exchange(OWN), lambda: first.exchange(OWN)
    )
    poll_until(lambda: not first._own.failure, lambda: first.exchange(OWN))
    first.exchange(NodeStatus(failure=killed))
    poll_until(lambda: second.failures() == [killed], second._receive)


def test_node_that_never_sent_anything_is_silent_once_others_have() -> None:
    clock, address = Clock(), ("127.0.0.1", free_port())
    first, second = (
        PeerLink("run", node, 3, address, key=KEY, poll_seconds=1, clock=clock) for node in (0, 1)
    )
    clock.now = 60.0
    assert first.silent_nodes() == {}
    poll_until(
        lambda: bool(first.silent_nodes()),
        lambda: second.exchange(STATUS),
        lambda: first.exchange(OWN),
    )
    assert first.silent_nodes() == {2: 60.0}


def test_datagrams_of_another_job_are_ignored() -> None:
    first, second = linked_pair(Clock(), ("run", "other"))
    for _ in range(100):
        second.exchange(STATUS)
        first.exchange(OWN)
    assert first.statuses() == []
    assert second.is_reporter


@settings(max_examples=40)
@given(
    st.one_of(
        st.binary(max_size=300),
        st.recursive(
            st.none() | st.booleans() | st.integers() | st.text(max_size=9),
            lambda inner: (
                st.lists(inner, max_size=3)
                | st.dictionaries(
                    st.sampled_from(
                        ["job", "node", "ranks", "stall", "failure", "busy", "rank", "phase"]
                    ),
                    inner,
                )
            ),
        ).map(lambda document: json.dumps(document).encode()),
    )
)
def test_malformed_datagrams_are_ignored(message: bytes) -> None:
    first = PeerLink("run", 0, 2, ("127.0.0.1", 0), key=KEY, poll_seconds=1)
    assert first._parse(message) is None
    assert first._parse(seal(message, KEY)) is None
    assert first.statuses() == []


@pytest.mark.parametrize(
    ("part", "change"),
    [
        ("ranks", {"node": 0}),
        ("ranks", {"rank": "8"}),
        ("ranks", {"phase": 99}),
        ("ranks", {"state": "SS"}),
        ("ranks", {"in_collective": "no"}),
        ("ranks", {"sequence": None}),
        ("busy", {"node": 0}),
        ("busy", {"steps": 1.5}),
        ("busy", {"busy_seconds": "much"}),
        ("stall", {"text": None}),
        ("failure", {"kind": "curse"}),
        ("failure", {"rank": "8"}),
    ],
)
def test_foreign_and_invalid_statuses_are_rejected(part: str, change: dict[str, object]) -> None:
    first = PeerLink("run", 0, 2, ("127.0.0.1", 0), key=KEY, poll_seconds=1)
    status = replace(STATUS, failure=Failure("killed", "rank 8 died", 1, 8))
    document: dict[str, Any] = {
        "job": "run",
        "node": 1,
        "sent_ns": time.time_ns(),
        **asdict(status),
    }
    assert first._parse(seal(json.dumps(document).encode(), KEY)) == 1
    document["sent_ns"] += 1
    whole = document[part]
    changed = [whole[0] | change] if isinstance(whole, tuple) else whole | change
    assert first._parse(seal(json.dumps(document | {part: changed}).encode(), KEY)) is None
    assert first.statuses() == [RANK]


def test_forged_and_repeated_datagrams_are_ignored() -> None:
    """Whoever reaches the port could otherwise blame a rank, or hide that a node is silent."""
    clock = Clock()
    first = PeerLink("run", 0, 2, ("127.0.0.1", 0), key=KEY, poll_seconds=1, clock=clock)
    sent_ns = time.time_ns()
    document: dict[str, Any] = {"job": "run", "node": 1, "sent_ns": sent_ns, **asdict(STATUS)}
    content = json.dumps(document).encode()
    for forged in (
        content,
        seal(content, b"another key"),
        seal(content, KEY)[:-1],
        seal(content, KEY)[:16],
        b"",
        seal(content, KEY) + b" ",
        seal(content, KEY)[1:],
        # Of an earlier attempt of the job.
        seal(json.dumps(document | {"sent_ns": sent_ns - 2 * 3600 * 10**9}).encode(), KEY),
        seal(content.replace(str(sent_ns).encode(), b"Infinity"), KEY),
        bytes(60_000),
    ):
        assert first._parse(forged) is None
    assert first.statuses() == []
    assert first._parse(seal(content, KEY)) == 1
    clock.now = 5 + 1
    assert first._parse(seal(content, KEY)) is None
    assert first.silent_nodes() == {1: 5 + 1}
    assert first._parse(seal(json.dumps(document | {"sent_ns": sent_ns + 1}).encode(), KEY)) == 1
    assert first.silent_nodes() == {}
    # A message of the first node, sent back to it.
    own = document | {"node": 0, "ranks": [], "busy": []}
    assert first._parse(seal(json.dumps(own).encode(), KEY)) is None
    # A message to the first node, repeated to another one.
    third = PeerLink("run", 2, 3, ("127.0.0.1", 0), key=KEY, poll_seconds=1, clock=clock)
    assert third._parse(seal(content, KEY)) is None


def test_nodes_with_another_run_document_are_ignored(tmp_path: Path) -> None:
    (tmp_path / "job.json").write_text('{"256px": {"run": "a"}}')
    (tmp_path / "copy.json").write_text('{"256px": {"run": "a"}}')
    (tmp_path / "other.json").write_text('{"256px": {"run": "b"}}')
    key, copy, other = (message_key(tmp_path / f"{name}.json") for name in ("job", "copy", "other"))
    assert key == copy != other
    assert b"run" not in key


def test_peer_port_is_next_to_the_rendezvous_port(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    assert rendezvous_address() is None
    monkeypatch.setenv("MASTER_ADDR", "algo-1")
    for port, peer_port in (("7777", 7778), ("65535", 65534)):
        monkeypatch.setenv("MASTER_PORT", port)
        assert rendezvous_address() == ("algo-1", peer_port)
