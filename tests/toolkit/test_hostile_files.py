"""Files from outside that exhaust memory or the stack are refused with one line."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.conftest import Cli

DEEP = "[" * 100_000
HUGE = "1" + "0" * 10_000

RUN = ["cost", "run.yaml"]
FILES = {
    "captions": (DEEP, ["pack", "captions.jsonl", "out"]),
    "caption with a number": (HUGE, ["pack", "captions.jsonl", "out"]),
    "configuration": (f"region = {DEEP}", ["config"]),
    "configuration with a number": (f"region = {HUGE}", ["config"]),
    "cost with the configuration": (f"region = {DEEP}", RUN),
    "preset": (DEEP, ["check", "custom.yaml", "--offline"]),
    "preset with a number": (HUGE, ["check", "custom.yaml", "--offline"]),
}


@pytest.fixture
def run_file(cli: Cli, tmp_path: Path) -> Path:
    path = tmp_path / "run.yaml"
    assert cli("init", path, "--preset", "bria-2.0").returncode == 0
    return path


@pytest.mark.parametrize("kind", FILES)
def test_deep_and_huge_values_are_refused(
    cli: Cli, tmp_path: Path, run_file: Path, kind: str
) -> None:
    content, command = FILES[kind]
    text = run_file.read_text()
    (tmp_path / "custom.yaml").write_text(text.replace("preset: sd2 ", "preset: ./deep.json "))
    config = tmp_path / "config" / "sm-train" / "config.toml"
    config.parent.mkdir(parents=True)
    for path in (tmp_path / "file", tmp_path / "captions.jsonl", tmp_path / "deep.json"):
        path.write_text(content)
    env = {}
    if "configuration" in kind:
        config.write_text(content)
        env = {"XDG_CONFIG_HOME": str(tmp_path / "config")}
    result = cli(*command, env=env)
    assert result.returncode == 2
    assert "unexpected" not in result.stderr
    assert result.stderr.count("sm-train: ") == 1
    assert len(result.stderr) < 500


@pytest.mark.parametrize("option", ["--prices", "--measured"])
def test_a_device_is_no_input(cli: Cli, run_file: Path, option: str) -> None:
    result = cli("cost", run_file, option, "/dev/zero")
    assert result.returncode == 2
    assert "is a device" in result.stderr


@pytest.mark.integration
def test_huge_files_are_refused_before_they_are_read(
    cli: Cli, tmp_path: Path, run_file: Path
) -> None:
    """The files have no content on disk, but 1 TiB of zeros to read, as a device has."""
    text = run_file.read_text()
    run_file.with_name("custom.yaml").write_text(
        text.replace("preset: sd2 ", "preset: ./huge.json ")
    )
    config = tmp_path / "config" / "sm-train" / "config.toml"
    config.parent.mkdir(parents=True)
    measured = run_file.with_name("bria-2-0.measured.json")
    huge = tmp_path / "huge.json"
    env = {"XDG_CONFIG_HOME": str(tmp_path / "config")}
    for path, limit, command in (
        (huge, "512 MiB", ["cost", "run.yaml", "--prices", "huge.json"]),
        (huge, "1 MiB", ["check", "custom.yaml", "--offline"]),
        (run_file, "1 MiB", ["check", "run.yaml", "--offline"]),
        (measured, "16 MiB", RUN),
        (config, "1 MiB", ["config"]),
    ):
        before = path.read_bytes() if path.exists() else None
        path.touch()
        os.truncate(path, 2**40)
        result = cli(*command, env=env)
        assert (result.returncode, result.stderr.count("more than " + limit)) == (2, 1), result
        path.unlink()
        if before is not None:
            path.write_bytes(before)
