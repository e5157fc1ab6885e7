"""What machines tell each other, over real datagrams on loopback."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable
from dataclasses import asdict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sm_train.entrypoints.monitoring.heartbeat import Phase
from sm_train.entrypoints.monitoring.peers import (
    SILENT_POLLS,
    PeerFault,
    PeerLink,
    rendezvous_address,
)
from sm_train.entrypoints.monitoring.stall_detector import RankStatus

SEEN = RankStatus(8, 1, Phase.STEP, 5, 11)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def free_port() -> int:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def pair(clock: Clock, jobs: tuple[str, str] = ("run", "run")) -> tuple[PeerLink, PeerLink]:
    address = ("127.0.0.1", free_port())
    first, second = (
        PeerLink(job, node, 2, address, look_seconds=1, clock=clock)
        for node, job in enumerate(jobs)
    )
    return first, second


def until(condition: Callable[[], bool], *looks: Callable[[], None]) -> None:
    """Look again and again; loopback delivers in its own time, and drops nothing."""
    for _ in range(1000):
        for look in looks:
            look()
        if condition():
            return
    raise AssertionError("nothing arrived")


def test_the_first_machine_hears_the_others_and_they_hear_that_it_does() -> None:
    clock = Clock()
    first, second = pair(clock)
    assert first.speaks
    assert second.speaks  # nobody has answered yet
    until(
        lambda: bool(first.others()) and not second.speaks,
        lambda: second.exchange([SEEN], PeerFault("stall", "no sign")),
        lambda: first.exchange([], None),
    )
    assert first.others() == [SEEN]
    assert first.troubles() == {1: PeerFault("stall", "no sign")}
    clock.now = SILENT_POLLS
    assert first.silent() == {}
    clock.now = SILENT_POLLS + 1
    assert first.silent() == {1: SILENT_POLLS + 1}
    # Cut off from the first, the second speaks for itself.
    assert second.speaks


def test_a_machine_that_never_came_is_named_where_others_did() -> None:
    clock, address = Clock(), ("127.0.0.1", free_port())
    first, second = (
        PeerLink("run", node, 3, address, look_seconds=1, clock=clock) for node in (0, 1)
    )
    clock.now = 60.0
    assert first.silent() == {}
    until(
        lambda: bool(first.silent()),
        lambda: second.exchange([SEEN], None),
        lambda: first.exchange([], None),
    )
    assert first.silent() == {2: 60.0}


def test_another_job_is_not_listened_to() -> None:
    first, second = pair(Clock(), ("run", "other"))
    for _ in range(100):
        second.exchange([SEEN], None)
        first.exchange([], None)
    assert first.others() == []
    assert second.speaks


@settings(max_examples=40)
@given(
    st.one_of(
        st.binary(max_size=300),
        st.recursive(
            st.none() | st.booleans() | st.integers() | st.text(max_size=9),
            lambda inner: (
                st.lists(inner, max_size=3)
                | st.dictionaries(
                    st.sampled_from(["job", "node", "seen", "trouble", "rank", "section"]), inner
                )
            ),
        ).map(lambda document: json.dumps(document).encode()),
    )
)
def test_no_datagram_does_harm(message: bytes) -> None:
    first = PeerLink("run", 0, 2, ("127.0.0.1", 0), look_seconds=1)
    assert first._take(message) is None
    assert first.others() == []


@pytest.mark.parametrize(
    "change",
    [
        {"node": 0},
        {"rank": "8"},
        {"section": 99},
        {"state": "SS"},
        {"waits": "no"},
        {"marks": None},
    ],
)
def test_a_machine_speaks_for_itself_and_in_order(change: dict[str, object]) -> None:
    first = PeerLink("run", 0, 2, ("127.0.0.1", 0), look_seconds=1)
    whole = {"job": "run", "node": 1, "trouble": None, "seen": [asdict(SEEN)]}
    assert first._take(json.dumps(whole).encode()) == 1
    whole["seen"] = [asdict(SEEN) | change]
    assert first._take(json.dumps(whole).encode()) is None
    assert first.others() == [SEEN]


def test_the_meeting_point_is_beside_the_rendezvous(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    assert rendezvous_address() is None
    monkeypatch.setenv("MASTER_ADDR", "algo-1")
    for port, beside in (("7777", 7778), ("65535", 65534)):
        monkeypatch.setenv("MASTER_PORT", port)
        assert rendezvous_address() == ("algo-1", beside)
