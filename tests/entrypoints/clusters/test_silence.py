"""What a watcher makes of the records of a stage's nodes."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from sm_train.entrypoints.clusters.attempts import attempts, clock_findings
from sm_train.entrypoints.clusters.node_record import (
    STOP_FILE,
    NodeRecord,
    StoredNode,
    read_nodes,
    read_stop_request,
    store_stop_request,
)
from sm_train.entrypoints.clusters.silence import find_silence
from sm_train.entrypoints.clusters.watcher import (
    WatchedStage,
    alert_on_silence,
    node_hours,
    stop_at_budget,
)
from sm_train.entrypoints.job_interface.job_config import AlertsConfig
from sm_train.entrypoints.monitoring.alert_outbox import ALERTS_FILE, AlertState, read_alerts
from sm_train.entrypoints.storage.lease_files import AgedFile
from sm_train.entrypoints.storage.storage import LocalFolder, write_file

from tests.entrypoints.clusters.node_recorder_support import record
from tests.entrypoints.clusters.silence_support import NOW, ended, node
from tests.support.deadline import DEADLINE
from tests.support.webhook_server import WebhookServer, webhook_server


@pytest.mark.parametrize(
    ("nodes", "expected"),
    [
        ([], None),
        ([node("algo-1", 10), node("algo-2", 170)], None),
        ([node("algo-1", 10), node("algo-2", 200)], ("silence of some", "warning")),
        ([node("algo-1", 200), node("algo-2", 300)], ("silence", "critical")),
        ([node("algo-1", 200), ended("algo-2", 300, 1)], ("silence", "critical")),
        ([ended("algo-1", 100, 1), ended("algo-2", 100, 143)], None),
        ([ended("algo-1", 300, 1), ended("algo-2", 300, 143)], ("silence", "critical")),
        ([ended("algo-1", 300, 143), ended("algo-2", 300, 143)], ("silence", "critical")),
        ([ended("algo-1", 300, 0), ended("algo-2", 300, 0)], None),
        ([ended("algo-1", 300, 1, stopped_by="the user"), ended("algo-2", 300, 1)], None),
        ([ended("algo-1", 900, 1), node("algo-1", 10, started=NOW - 60)], None),
    ],
)
def test_silence_is_what_nobody_has_planned(
    nodes: list[StoredNode], expected: tuple[str, str] | None
) -> None:
    silence = find_silence(nodes, NOW)
    assert (silence and (silence.key, silence.level)) == expected


def test_node_that_runs_on_while_another_restarts_belongs_to_the_newest_attempt() -> None:
    first, second = node("algo-1", 10), ended("algo-2", 500, 1)
    again = node("algo-2", 10, started=NOW - 400)
    groups = attempts([first, second, again])
    assert [[start.record.node for start in group] for group in groups] == [
        ["algo-2"],
        ["algo-2", "algo-1"],
    ]


def stage(folder: Path, level: str = "warning") -> WatchedStage:
    alerts = AlertsConfig(None, None, None, level)  # type: ignore[arg-type]
    return WatchedStage("art", "256px", LocalFolder(folder), alerts, usd_per_hour=24.0)


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Any:
    with webhook_server() as running:
        monkeypatch.setenv("SM_TRAIN_WEBHOOK", running.address)
        yield running


def titles(server: WebhookServer) -> list[tuple[str, bool]]:
    return [(alert["key"], alert["resolved"]) for alert in server.received]


def test_each_problem_is_sent_once_and_its_end(tmp_path: Path, server: WebhookServer) -> None:
    watched = stage(tmp_path)
    some = [node("algo-1", 10), node("algo-2", 200)]
    everyone = [node("algo-1", 200), node("algo-2", 300)]
    for nodes in (some, some, everyone, everyone, [node("algo-1", 1)], [node("algo-1", 1)]):
        alert_on_silence(watched, nodes, NOW)
    assert titles(server) == [("silence of some", False), ("silence", False), ("silence", True)]
    stored = json.loads((tmp_path / "job-records/alerts.json").read_bytes())
    assert (stored["opened"], stored["outbox"]) == ({}, [])


def test_alert_that_did_not_arrive_is_sent_again(tmp_path: Path, server: WebhookServer) -> None:
    server.responses += [(503, {})]
    nodes = [node("algo-1", 300)]
    [failed] = alert_on_silence(stage(tmp_path), nodes, NOW)
    assert failed.problems == ("webhook: HTTP 503",)
    [sent] = alert_on_silence(stage(tmp_path), nodes, NOW)
    assert sent.arrived
    assert len(server.received) == 1


@pytest.mark.parametrize("status", [503, 403])
def test_broken_sink_repeats_nothing_to_the_others(
    tmp_path: Path, server: WebhookServer, monkeypatch: pytest.MonkeyPatch, status: int
) -> None:
    nodes = [node("algo-1", 300)]
    with webhook_server() as broken:
        monkeypatch.setenv("SM_TRAIN_SLACK_WEBHOOK", broken.address)
        broken.responses += [(status, {})] * 10
        for check in range(10):
            sent = alert_on_silence(stage(tmp_path), nodes, NOW + check)
            if check == 0:
                assert sent[0].problems == (f"slack: HTTP {status}",)
        assert titles(server) == [("silence", False)]
        # Nobody retries what a receiver refuses for good.
        assert len(broken.received) == 0
        expected = 1 if status == 503 else 0
        broken.responses.clear()
        alert_on_silence(stage(tmp_path), nodes, NOW + 10)
        assert len(broken.received) == expected
    assert titles(server) == [("silence", False)]


def test_budget_and_end_of_a_problem_arrive_after_a_check_without_sinks_that_work(
    tmp_path: Path, server: WebhookServer
) -> None:
    watched, silent, live = stage(tmp_path), [node("algo-1", 300)], [node("algo-1", 10)]
    alert_on_silence(watched, silent, NOW)
    server.responses += [(503, {})] * 2
    assert [item.arrived for item in stop_at_budget(watched, live, 101.0, 100.0, NOW)] == [False]
    assert [item.alert.key for item in alert_on_silence(watched, live, NOW)] == [
        "budget",
        "silence",
    ]
    assert stop_at_budget(watched, live, 101.0, 100.0, NOW + 1) == []
    alert_on_silence(watched, live, NOW + 1)
    alert_on_silence(watched, live, NOW + 2)
    assert sorted(titles(server)) == [("budget", False), ("silence", False), ("silence", True)]


def test_machine_without_sinks_leaves_the_alert_to_others(
    tmp_path: Path, server: WebhookServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes = [node("algo-1", 10)]
    with monkeypatch.context() as laptop:
        laptop.delenv("SM_TRAIN_WEBHOOK")
        [undelivered] = stop_at_budget(stage(tmp_path), nodes, 101.0, 100.0, NOW)
        assert undelivered.sinks == 0
    assert len(stop_at_budget(stage(tmp_path), nodes, 101.0, 100.0, NOW + 60)) == 1
    assert titles(server) == [("budget", False)]


def test_alerts_of_another_format_are_refused_and_damaged_ones_are_none(tmp_path: Path) -> None:
    storage = LocalFolder(tmp_path)
    for content in (
        b"",
        b"[]",
        b'{"version": 2, "opened": {"x": "y"}}',
        b'{"version": 2, "outbox": [1]}',
    ):
        write_file(storage, ALERTS_FILE, content)
        assert read_alerts(storage) == AlertState()
    write_file(storage, ALERTS_FILE, b'{"silence": 1.0}')
    with pytest.raises(OSError, match="format 1, this sm-train reads 2; delete the file"):
        read_alerts(storage)


DAMAGED_FIELDS: list[tuple[str, object]] = [
    ("seen", "soon"),
    ("seen", float("inf")),
    ("seen", float("nan")),
    ("ran", -1.0),
    ("ran", "long"),
    ("started", -5),
    ("started", True),
    ("started", None),
    ("nodes", 0),
    ("nodes", 2.5),
    ("exit_code", "1"),
    ("state", "lost"),
    ("state", []),
    ("commands", []),
    ("commands", {"stop": 1}),
    ("machine", 7),
    ("node", None),
]


def test_record_with_a_field_of_another_type_or_range_is_no_record(tmp_path: Path) -> None:
    """The others are watched on, and the budget is judged by theirs."""
    storage, healthy, other = LocalFolder(tmp_path), record("algo-2"), record("algo-1")
    write_file(storage, healthy.file, healthy.to_json())
    for field, value in DAMAGED_FIELDS:
        damaged = json.dumps(json.loads(other.to_json()) | {field: value}).encode()
        write_file(storage, other.file, damaged)
        with pytest.raises(ValueError, match=f"^{field}: "):
            NodeRecord.parse(damaged)
        assert [stored.record for stored in read_nodes(storage)] == [healthy], (field, value)


def test_level_of_the_run_file_decides(tmp_path: Path, server: WebhookServer) -> None:
    some = [node("algo-1", 10), node("algo-2", 200)]
    assert alert_on_silence(stage(tmp_path, "critical"), some, NOW) == []
    assert server.received == []


def test_budget_stops_live_nodes_once(tmp_path: Path, server: WebhookServer) -> None:
    watched, nodes = stage(tmp_path), [node("algo-1", 10)]
    assert stop_at_budget(watched, nodes, 99.0, 100.0, NOW) == []
    assert stop_at_budget(watched, [ended("algo-1", 10, 1)], 101.0, 100.0, NOW) == []
    assert len(stop_at_budget(watched, nodes, 101.0, 100.0, NOW)) == 1
    assert stop_at_budget(watched, nodes, 101.0, 100.0, NOW + 10) == []
    request = read_stop_request(LocalFolder(tmp_path))
    assert request is not None
    assert request.requested == pytest.approx(time.time(), abs=DEADLINE)
    LocalFolder(tmp_path).set_modified_ns(STOP_FILE, int(NOW * 1e9))
    # An attempt that starts later is stopped as well.
    again = [node("algo-1", 10, started=NOW + 20)]
    assert len(stop_at_budget(watched, again, 102.0, 100.0, NOW + 30)) == 1
    assert [alert["title"] for alert in server.received] == ["the budget is spent"] * 2


def test_damaged_requests_and_records_are_no_requests(tmp_path: Path) -> None:
    storage = LocalFolder(tmp_path)
    for content in (b"", b"[]", b'{"version": 3}', b"\xff", b'{"version": 3, "by": 1}'):
        write_file(storage, STOP_FILE, content)
        assert read_stop_request(storage) is None
        with pytest.raises(ValueError):
            NodeRecord.parse(content)
    store_stop_request(storage, "the user")
    storage.set_modified_ns(STOP_FILE, int(NOW * 1e9))
    request = read_stop_request(storage)
    assert request is not None
    assert (request.by, request.requested) == ("the user", pytest.approx(NOW, abs=1))


def test_records_and_requests_of_another_format_are_refused_in_one_line(tmp_path: Path) -> None:
    storage, node = LocalFolder(tmp_path), record()
    first_format = json.loads(node.to_json())
    del first_format["version"]
    write_file(storage, node.file, json.dumps(first_format).encode())
    with pytest.raises(OSError, match=r"node.json: format 1, this sm-train reads 3; .*manifest"):
        read_nodes(storage)
    write_file(storage, STOP_FILE, b'{"requested": 1.0, "by": "a"}')
    with pytest.raises(OSError, match=r"stop.json: format 1, .* repeat `sm-train stop`"):
        read_stop_request(storage)


@dataclass
class SkewedNode:
    """A node that started at ``began`` and whose clock is ``offset`` seconds ahead."""

    storage: LocalFolder
    began: float
    offset: float

    def heartbeat(self, at: float) -> None:
        """Store a heartbeat when the storage's clock shows ``at``."""
        started, seen = self.began + self.offset, at + self.offset
        own = record(started=started, seen=seen, ran=at - self.began, state="training")
        write_file(self.storage, own.file, own.to_json())
        self.storage.set_modified_ns(own.file, int(at * 1e9))


@pytest.mark.parametrize("offset", [-200.0, -7200.0, 7200.0, 30.0])
def test_storage_says_whether_a_node_lives_whatever_its_clock_shows(
    tmp_path: Path, offset: float
) -> None:
    """Slow by 200 s it was reported as lost for ever; fast by 2 h, a loss was seen 2 h late."""
    storage = LocalFolder(tmp_path)
    now = time.time()
    skewed = SkewedNode(storage, now - 620, offset)
    skewed.heartbeat(now - 20)
    [live] = read_nodes(storage)
    assert find_silence([live], now) is None
    assert live.started == pytest.approx(now - 620, abs=DEADLINE)
    assert live.clock_offset == pytest.approx(offset, abs=1)
    assert len(clock_findings([live])) == (abs(offset) > 60)
    skewed.heartbeat(now - 200)
    silence = find_silence(read_nodes(storage), now)
    assert silence is not None
    assert silence.key == "silence"


@dataclass(frozen=True)
class SkewedFolder(LocalFolder):
    """A folder of a server whose clock is ``offset`` seconds ahead of this machine's."""

    offset: float = 0.0

    def read_aged(self, name: str) -> AgedFile:
        found = super().read_aged(name)
        return replace(found, modified=found.modified + self.offset)


@pytest.mark.parametrize("offset", [-7200.0, -1.0, 0.0, 1.5, 7200.0])
def test_reader_compares_ages_whatever_its_clock_shows(tmp_path: Path, offset: float) -> None:
    storage, now = SkewedFolder(tmp_path, offset), time.time()
    own = record(started=now + offset - 100, seen=now + offset, ran=100.0)
    write_file(storage, own.file, own.to_json())
    store_stop_request(storage, "the user")
    [found] = read_nodes(storage)
    assert found.is_live(time.time())
    assert found.clock_offset == pytest.approx(0.0, abs=DEADLINE)
    assert found.started == pytest.approx(now - 100, abs=DEADLINE)
    request = read_stop_request(storage)
    assert request is not None
    assert request.applies_to(found.started)
    assert not request.applies_to(time.time() + DEADLINE)


def test_clock_findings_name_the_nodes_and_the_largest_difference() -> None:
    nodes = [
        node("algo-1", 10, machine="gpu-07"),
        replace(node("algo-2", 10, machine="gpu-08"), clock_offset=-200.0),
        replace(node("algo-3", 10), clock_offset=7_200.0),
    ]
    assert clock_findings(nodes[:2]) == [
        "algo-2 (gpu-08): its clock is 200 s behind that of the storage; the times in logs are "
        "wrong by that, so synchronize it (chrony)"
    ]
    [several] = clock_findings(nodes)
    assert several.startswith("algo-2 (gpu-08), algo-3: their clocks are up to 7,200 s ahead of")


def test_hours_are_those_of_the_monotonic_clock() -> None:
    """A node whose clock was set back by an hour while it ran."""
    jumped = StoredNode(record(started=NOW, seen=NOW - 3000, ran=600.0), (), NOW)
    assert node_hours([jumped]) == pytest.approx(600 / 3600)


def test_budget_is_announced_once_although_heartbeats_come_at_uneven_times(
    tmp_path: Path, server: WebhookServer
) -> None:
    """When a node started is known to a second only, by what the storage says of its record."""
    watched, own = stage(tmp_path), record("algo-1", state="training", ran=3590.0)
    for check in range(20):
        jitter = (check * 7 % 10) / 10
        found = StoredNode(own, (), NOW - 10 + jitter)
        stop_at_budget(watched, [found], 101.0, 100.0, NOW)
        LocalFolder(tmp_path).set_modified_ns(STOP_FILE, int(NOW * 1e9))
    assert [alert["key"] for alert in server.received] == ["budget"]


def test_copied_folder_keeps_the_order_of_attempts(tmp_path: Path) -> None:
    """`aws s3 sync` and `cp` give all files the time of the copy."""
    storage, now = LocalFolder(tmp_path), time.time()
    for started, ran, code in ((now - 90_000, 600.0, 1), (now - 80_000, 70_000.0, 0)):
        seen = started + ran
        own = record(started=started, seen=seen, ran=ran, state="ended", exit_code=code)
        write_file(storage, own.file, own.to_json())
        storage.set_modified_ns(own.file, int(now * 1e9))
    assert [found.record.exit_code for found in read_nodes(storage)] == [1, 0]


def test_minutes_of_silence_are_those_since_the_newest_heartbeat() -> None:
    some = find_silence([node("algo-1", 10), node("algo-2", 300)], NOW)
    every = find_silence([node("algo-1", 600), node("algo-2", 900)], NOW)
    assert some is not None
    assert every is not None
    assert "no heartbeat of algo-2 for 5 minutes; 1 of 2 nodes" in some.symptom
    assert "no heartbeat of algo-1, algo-2 for 10 minutes" in every.symptom


def test_clocks_are_reported_from_a_minute_on() -> None:
    assert clock_findings([node("algo-1", 10)]) == []
    agrees = replace(node("algo-1", 10), clock_offset=59.0)
    assert clock_findings([agrees]) == []
    [line] = clock_findings([replace(agrees, clock_offset=-61.0)])
    assert "its clock is 61 s behind that of the storage" in line
