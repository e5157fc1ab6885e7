"""Metrics of past jobs as CSV and as event files that TensorBoard reads."""

from __future__ import annotations

import csv
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from sm_train.entrypoints.base.pip_install import install_command
from sm_train.toolkit.analysis.review.build import find_sources
from sm_train.toolkit.analysis.review.job_log import JobLog
from sm_train.toolkit.analysis.review.log_parser import parse_log
from sm_train.toolkit.analysis.review.metric_export import export_jobs, require_tensorboard
from sm_train.toolkit.analysis.review.sources import ReviewSource
from sm_train.toolkit.base.errors import UserError

from tests.conftest import Cli
from tests.support.job_log_lines import SimulatedJob


@pytest.fixture
def stage(tmp_path: Path) -> Path:
    """The folder of a local run's stage: its log and its evaluation images, one of them damaged."""
    folder = tmp_path / "out" / "256px"
    samples = folder / "checkpoints" / "samples"
    samples.mkdir(parents=True)
    Image.new("RGB", (30, 10), (9, 0, 0)).save(samples / "step-00000100.png")
    (samples / "step-00000200.png").write_bytes(b"truncated")
    lines = [text for _, text in SimulatedJob(nodes=2, intervals=30).lines()]
    (folder / "events.log").write_text("\n".join(lines))
    return folder


def exported(cli: Cli, stage: Path, target_format: str) -> tuple[Path, list[dict[str, Any]]]:
    """Export the stage; return its folder, and the reference values of its log."""
    result = cli("review", stage, "--export", target_format, "--out", "exports")
    assert result.returncode == 0, result.stderr
    assert result.stdout == ""
    folder = stage.parents[1] / "exports" / "out-256px"
    assert "wrote exports/out-256px: " in result.stderr
    assert "1 images" in result.stderr
    table = cli("review", stage, "--export", "csv", "--out", "reference")
    assert table.returncode == 0, table.stderr
    with (stage.parents[1] / "reference/out-256px/metrics.csv").open(newline="") as file:
        return folder, list(csv.DictReader(file))


def test_csv_has_a_row_for_each_value(cli: Cli, stage: Path) -> None:
    folder, rows = exported(cli, stage, "csv")
    losses = [row for row in rows if row["metric"] == "train/loss"]
    assert len(losses) == 30
    assert [float(row["time"]) for row in rows] == sorted(float(row["time"]) for row in rows)
    metrics = {row["metric"] for row in rows}
    assert {"train/learning_rate", "speed/images_per_second"} <= metrics
    assert {"node 0/gpu_utilization_mean", "node 1/gpu_utilization_mean"} <= metrics
    assert [path.name for path in (folder / "images").iterdir()] == ["step-00000100.png"]


def test_tensorboard_reads_the_same_values_times_and_images(cli: Cli, stage: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    folder, rows = exported(cli, stage, "tensorboard")
    events = EventAccumulator(str(folder), {"scalars": 0, "images": 0}).Reload()
    assert set(events.Tags()["scalars"]) == {row["metric"] for row in rows}
    for tag in events.Tags()["scalars"]:
        expected = [row for row in rows if row["metric"] == tag]
        found = events.Scalars(tag)
        assert [event.step for event in found] == [int(row["step"]) for row in expected]
        values, times = ([float(row[key]) for row in expected] for key in ("value", "time"))
        assert [event.value for event in found] == pytest.approx(values, rel=1e-6)
        assert [event.wall_time for event in found] == pytest.approx(times, abs=1e-3)
    [image] = events.Images("samples")
    assert (image.step, image.width, image.height) == (100, 30, 10)


def test_existing_folders_and_other_outputs_are_refused(cli: Cli, stage: Path) -> None:
    assert cli("review", stage, "--export", "csv").returncode == 0
    again = cli("review", stage, "--export", "csv")
    assert again.returncode == 2
    assert "--out: exports/out-256px exists already" in again.stderr
    both = cli("review", stage, "--export", "csv", "--json")
    assert both.returncode == 2
    assert "--export: cannot be combined with" in both.stderr


def test_interrupted_export_leaves_nothing_that_the_same_command_refuses(
    monkeypatch: pytest.MonkeyPatch, stage: Path
) -> None:
    other = shutil.copytree(stage, stage.with_name("512px"))
    sources, _ = find_sources([str(stage), str(other)], region=None, profile=None, config=None)

    def parse(source: ReviewSource) -> JobLog:
        if source is sources[-1]:
            raise KeyboardInterrupt
        return parse_log(source.blocks())

    out = stage.parents[1] / "exports"
    assert len(sources) == 2
    with pytest.raises(KeyboardInterrupt):
        export_jobs(sources, parse, "csv", out)
    assert [*out.iterdir()] == []


def test_missing_tensorboard_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    with pytest.raises(UserError, match=re.escape(install_command("tensorboard"))):
        require_tensorboard()
