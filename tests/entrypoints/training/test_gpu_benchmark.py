"""The script that proves on a GPU what no CPU exercises runs, part by part, on a CPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.capabilities import link_optional_package
from tests.support.deadline import DEADLINE

pytestmark = pytest.mark.integration

ROOT = Path(__file__).parents[3]
COMPILED = ("mmdit-compile", "sd2-compile", "mmdit-fp8")


def run_parts(folder: Path, *arguments: str) -> tuple[int, str, dict[str, Any]]:
    """Run the script with tiny networks; return its exit code, its output and its figures."""
    output = folder / "gpu.json"
    command = [sys.executable, "-W", "ignore", str(ROOT / "benchmarks" / "gpu.py")]
    command += ["--device", "cpu", "--quick", "--output", str(output), *arguments]
    result = subprocess.run(
        command,
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=4 * DEADLINE,
        check=False,
    )
    assert output.exists(), result.stderr
    return result.returncode, result.stdout, json.loads(output.read_bytes())


@pytest.mark.slow
def test_every_part_runs_on_a_cpu(tmp_path: Path) -> None:
    """But for the compiled ones, which take minutes."""
    listed = (
        "families",
        "sync",
        "sd2",
        "snapshot",
        "resume",
        "mmdit",
        "fsdp",
        "nan",
        "rollback",
        "optimizers",
        "loader",
        "node",
        "encoders",
    )
    arguments = [word for name in listed for word in ("--part", name)]
    code, output, document = run_parts(tmp_path, "--seconds", "600", *arguments)
    outcomes = {name: part["outcome"] for name, part in document["parts"].items()}
    assert outcomes == dict.fromkeys(listed, "ok"), output
    assert code == 0
    assert document["parts"]["snapshot"]["figures"]["different"] == []


@pytest.mark.slow
def test_a_part_without_its_package_says_so(tmp_path: Path) -> None:
    code, output, _ = run_parts(tmp_path, "--part", "adamw8bit", "--part", "mmdit-fp8")
    lines = output.splitlines()
    for line, package in zip(lines[:2], ("bitsandbytes", "torchao"), strict=True):
        assert line.startswith("not installed")
        assert package in line
    assert code == 0


@pytest.mark.slow
@pytest.mark.parametrize("name", COMPILED)
def test_compiled_parts_run_on_a_cpu(tmp_path: Path, name: str) -> None:
    link_optional_package("torchao", tmp_path)
    code, output, _ = run_parts(tmp_path, "--part", name, "--optional", str(tmp_path))
    assert code == 0, output
    assert output.startswith("ok"), output


@pytest.mark.slow
def test_parts_after_the_end_of_the_time_are_reported_as_not_run(tmp_path: Path) -> None:
    code, output, document = run_parts(tmp_path, "--seconds", "1", "--part", "nan")
    assert document["parts"]["nan"]["outcome"] == "not run"
    assert "nan                 the time is over" in output
    assert code == 0


@pytest.mark.slow
def test_an_unknown_part_is_named(tmp_path: Path) -> None:
    command = [sys.executable, "-W", "ignore", "benchmarks/gpu.py", "--part", "warp"]
    result = subprocess.run(
        [*command, "--device", "cpu"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert result.returncode == 2
    assert "--part: warp: unknown; use one of families, sync" in result.stderr
