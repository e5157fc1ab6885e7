"""The protocol is all that a platform needs: one of a test's own works in the commands."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
from sm_train.cost.prices import ON_DEMAND
from sm_train.entrypoints.job_interface.events import FIELDS, TEXTS, format_event
from sm_train.toolkit.cli import main
from sm_train.toolkit.planning.price_table import price_table
from sm_train.toolkit.platforms.adapters import ADAPTERS

from tests.support.run_documents import run, stage

HOUR = 3600.0
TYPE, NODES = "ml.p4de.24xlarge", 4
BEGIN_AGO = 2 * HOUR


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run whose job began to train two hours ago, and has stopped no step ago."""
    monkeypatch.setitem(ADAPTERS, "json", f"{__package__}.json_folder")
    monkeypatch.chdir(tmp_path)
    jobs = tmp_path / "runs" / "demo" / "jobs"
    jobs.mkdir(parents=True)
    document = run(stages=[stage("256px", max_steps=20_000)])
    (jobs.parent / "run.json").write_text(json.dumps(document))
    write_job(jobs, status="InProgress")
    now = time.time()
    lines = ["loading the model"]
    for ago, kind, fields in (
        (BEGIN_AGO - 600, "start", {"stage": "256px", "resumed_from_step": None}),
        (
            HOUR,
            "step",
            {"step": 3_600, "steps_per_second": 2.0, "timed_seconds": 100.0, "timed_steps": 200},
        ),
        (
            5,
            "step",
            {"step": 10_800, "steps_per_second": 2.0, "timed_seconds": 100.0, "timed_steps": 200},
        ),
    ):
        values = {name: "1" if name in TEXTS else 1 for name in FIELDS[kind]} | fields
        values |= {"precision": "bf16"} if kind == "start" else {}
        lines.append(format_event(kind, values, time=now - ago, node=0, rank=0))
    (jobs / "256px-0001.log").write_text("".join(f"{line}\n" for line in lines))
    return jobs.parent


def write_job(jobs: Path, **facts: Any) -> None:
    facts = {"started": time.time() - BEGIN_AGO, "type": TYPE, "nodes": NODES} | facts
    (jobs / "256px-0001.json").write_text(json.dumps(facts))


def command(*arguments: str) -> int:
    """Run a command in this process, which has the platform in its table; return the exit code."""
    with pytest.raises(SystemExit) as ended:
        main([*arguments])
    return int(ended.value.code or 0)


def document(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> dict[str, Any]:
    assert command(*arguments, "--json") == code
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def hourly() -> float:
    price = price_table().price(TYPE, "us-east-1", ON_DEMAND).usd_per_instance_hour
    assert price is not None
    return NODES * float(price)


def test_the_adapter_fits_a_page() -> None:
    source = Path(__file__).with_name("json_folder.py").read_text()
    assert len(source.splitlines()) <= 150


def test_status_shows_its_job_and_its_dollars(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status = document(capsys, "status", "runs/demo")
    assert (status["state"], status["region"]) == ("training", "us-east-1")
    assert status["spent_usd"] == pytest.approx(2 * hourly(), rel=0.01)
    [shown] = status["stages"]
    assert (shown["step"], shown["steps_per_second"]) == (10_800, pytest.approx(2.0))
    assert shown["remaining_seconds"] == pytest.approx(9_200 / 2.0)
    assert status["next_command"] == "sm-train watch runs/demo"
    assert command("status", "runs/demo") == 0
    assert "demo in runs/demo" in capsys.readouterr().out


def test_list_shows_it(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    [listed] = document(capsys, "list", "runs")["runs"]
    assert (listed["run"], listed["job"], listed["status"]) == ("demo", "256px-0001", "InProgress")
    assert listed["spent_usd"] == pytest.approx(2 * hourly(), rel=0.01)


def test_logs_prints_its_lines(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command("logs", "runs/demo") == 0
    assert capsys.readouterr().out == "algo-1 | loading the model\n"


def test_watch_follows_it_and_stops_it_at_the_budget(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    watched = document(capsys, "watch", "runs/demo", "--once")
    assert (watched["action"], watched["message"]) == ("wait", "256px-0001 is training")
    config = json.loads((folder / "run.json").read_text())
    (folder / "run.json").write_text(json.dumps(config | {"budget": {"usd": 1.5 * hourly()}}))
    watched = document(capsys, "watch", "runs/demo", "--once", "--dry-run", code=7)
    assert not list(folder.glob("jobs/*.stop"))
    watched = document(capsys, "watch", "runs/demo", "--once", code=7)
    assert (watched["action"], [path.stem for path in folder.glob("jobs/*.stop")]) == (
        "stop",
        ["256px-0001"],
    )
    write_job(folder / "jobs", status="Stopped", ended=time.time())
    watched = document(capsys, "watch", "runs/demo", "--once", code=7)
    assert (watched["action"], watched["state"]) == ("end", "stopped")


def test_stop_asks_for_it_and_says_how_to_continue(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command("stop", "runs/demo") == 0
    assert (folder / "jobs" / "256px-0001.stop").exists()
    text = capsys.readouterr().err
    assert "256px-0001 saves a checkpoint and ends. To continue: submit-json runs/demo" in text
    assert command("stop", "runs/demo", "--after-stage") == 2
    assert "runs/demo is a run on a folder of JSON files" in capsys.readouterr().err


def test_its_actual_cost_is_accounted_for(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    actual = document(capsys, "cost", "runs/demo", "--actual")
    [job] = actual["jobs"]
    assert job["name"] == "256px-0001"
    assert job["billed_usd"] == pytest.approx(2 * hourly(), rel=0.01)
    assert actual["history"] is None
