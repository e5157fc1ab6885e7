"""Commands that other packages add by entry points."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from sm_train.toolkit.base.errors import ExitCode

from tests.conftest import clean_environment
from tests.support.deadline import DEADLINE

CODE = """\
import click


@click.command()
@click.option("--size", type=int, default=3)
@click.pass_obj
def tally(options, size):
    "Count shards."
    click.echo(f"{size} shards in {options['region']}")


broken = 3
"""


def install(folder: Path, name: str, entries: str) -> None:
    """Install a package of one module with these entry points, as pip leaves it."""
    (folder / f"{name}.py").write_text(CODE)
    info = folder / f"{name}-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[sm_train.commands]\n{entries}\n")


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "sm_train.toolkit", *arguments],
        env=clean_environment(folder) | {"PYTHONPATH": str(folder)},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=DEADLINE,
        check=False,
    )


def test_a_package_adds_a_command_and_replaces_none_of_ours(tmp_path: Path) -> None:
    install(tmp_path, "shard_tools", "tally = shard_tools:tally\nschema = shard_tools:tally")
    added = run(tmp_path, "--region", "eu-west-1", "tally", "--size", "5")
    assert (added.returncode, added.stdout) == (0, "5 shards in eu-west-1\n"), added.stderr
    assert run(tmp_path, "schema").stdout.startswith("{")
    # `--help` reads no other package.
    assert "tally" not in run(tmp_path, "--help").stdout


@pytest.mark.parametrize(
    ("entries", "problem"),
    [
        ("tally = shard_tools:missing", "the command of shard_tools cannot be loaded: "),
        ("tally = no_such_module:tally", "the command of shard_tools cannot be loaded: "),
        ("tally = shard_tools:broken", "shard_tools:broken of shard_tools is no command of click"),
    ],
)
def test_a_wrong_entry_is_one_line(tmp_path: Path, entries: str, problem: str) -> None:
    install(tmp_path, "shard_tools", entries)
    failed = run(tmp_path, "tally")
    assert failed.returncode == ExitCode.USAGE
    [line] = failed.stderr.splitlines()
    assert line.startswith(f"sm-train: tally: {problem}")


def test_two_packages_with_one_command_are_named(tmp_path: Path) -> None:
    install(tmp_path, "shard_tools", "tally = shard_tools:tally")
    install(tmp_path, "image_tools", "tally = image_tools:tally")
    failed = run(tmp_path, "tally")
    assert "tally: image_tools and shard_tools both add this command; remove one" in failed.stderr
