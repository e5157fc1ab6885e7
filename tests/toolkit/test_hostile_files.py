"""Files from outside that exhaust memory or the stack are refused with one line."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conftest import Cli

DEEP = "[" * 100_000
HUGE = "1" + "0" * 10_000

RUN = ["cost", "run.yaml"]
FILES = {
    "price list": (DEEP, [*RUN, "--price-list", "file"]),
    "price list with a number": (HUGE, [*RUN, "--price-list", "file"]),
    "history": (DEEP, [*RUN, "--history", "file"]),
    "captions": (DEEP, ["pack", "captions.jsonl", "out"]),
    "caption with a number": (HUGE, ["pack", "captions.jsonl", "out"]),
    "configuration": (f"region = {DEEP}", ["config"]),
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
    names = {"configuration": config, "cost with the configuration": config}
    for path in (tmp_path / "file", tmp_path / "captions.jsonl", tmp_path / "deep.json"):
        path.write_text(content)
    env = {}
    if kind in names:
        config.write_text(content)
        env = {"XDG_CONFIG_HOME": str(tmp_path / "config")}
    result = cli(*command, env=env)
    assert result.returncode == 2
    assert "unexpected" not in result.stderr
    assert result.stderr.count("sm-train: ") == 1
    assert len(result.stderr) < 500


@pytest.mark.parametrize("option", ["--prices", "--price-list", "--history", "--measured"])
def test_a_device_is_no_input(cli: Cli, run_file: Path, option: str) -> None:
    result = cli("cost", run_file, option, "/dev/zero")
    assert result.returncode == 2
    assert "is a device" in result.stderr
