"""``cost --compare``: as a diff on the terminal, as Markdown, and in a GitHub workflow."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.conftest import Cli, clean_environment
from tests.support.run_documents import stage
from tests.support.run_files import write_run


@pytest.fixture
def two_runs(tmp_path: Path) -> tuple[Path, Path]:
    """A run file, and one with a longer, a removed, an added and an unchanged stage."""
    before = write_run(
        tmp_path, stages=[stage("ab"), stage("c", resolution=512), stage("d")]
    ).rename(tmp_path / "before.yaml")
    after = write_run(
        tmp_path, stages=[stage("ab", max_steps=2000), stage("d"), stage("e", resolution=512)]
    )
    return before, after


def test_diff_marks_stages_and_ends_with_the_total(cli: Cli, two_runs: tuple[Path, Path]) -> None:
    before, after = two_runs
    result = cli("cost", before, "--compare", after)
    assert result.returncode == 0, result.stderr
    lines = result.stdout.splitlines()
    marks = {line.split()[1]: line[0] for line in lines if line[:1] in "+-~" and line[1:2] == " "}
    assert marks == {"ab": "~", "c": "-", "e": "+"}
    assert "      max_steps: 1,000 → 2,000" in lines
    assert "  (1 unchanged)" in lines
    assert re.search(r"^  total +\$[\d,.]+ +\$[\d,.]+ +[+−]\$[\d,.]+ \([+−]\d+\.\d %\)$", lines[-2])
    assert lines[-1].startswith("  Time: ")
    for columns in ("60", "80"):
        narrow = cli("cost", before, "--compare", after, env={"COLUMNS": columns}).stdout
        assert max(map(len, narrow.splitlines())) <= int(columns)
        assert set(narrow.split()) <= set(result.stdout.split())
    assert "\x1b[" not in result.stdout


def test_same_run_file_is_no_change(cli: Cli, two_runs: tuple[Path, Path]) -> None:
    result = cli("cost", two_runs[0], "--compare", two_runs[0])
    assert "(3 unchanged)" in result.stdout
    assert "no change" in result.stdout


def test_markdown_is_a_table_that_names_cannot_break(cli: Cli, two_runs: tuple[Path, Path]) -> None:
    before, after = two_runs
    text = cli("cost", before, "--compare", after, "--markdown").stdout
    table = [line for line in text.splitlines() if line.startswith("|")]
    assert {len(re.split(r"(?<!\\)\|", line)) for line in table} == {7}
    assert "| `~` | ab | " in text
    assert "| `-` | c | " in text
    assert "| `+` | e | " in text
    assert "- **ab**: max\\_steps: 1,000 → 2,000" in text
    alone = cli("cost", after, "--markdown").stdout
    assert alone.startswith("### Training cost: $")
    refused = cli("cost", after, "--markdown", "--json")
    assert refused.returncode == 2


def workflow(cli: Cli) -> dict[str, Any]:
    printed = cli("template", "github-action")
    assert printed.returncode == 0, printed.stderr
    document: dict[str, Any] = yaml.safe_load(printed.stdout)
    return document


def shell_step(document: dict[str, Any], name: str) -> str:
    [step] = [item for item in document["jobs"]["cost"]["steps"] if item.get("name") == name]
    script: str = step["run"]
    return script


def git(folder: Path, *arguments: str) -> None:
    identity = ["-c", "user.name=t", "-c", "user.email=t@example.com"]
    subprocess.run(["git", *identity, *arguments], cwd=folder, check=True, capture_output=True)


def test_workflow_comments_the_cost_of_a_pull_request(cli: Cli, tmp_path: Path) -> None:
    """Its shell steps run as GitHub runs them, in a repository whose base branch is a remote's."""
    document = workflow(cli)
    assert document[True]["pull_request"]  # YAML 1.1 reads the key `on` as true
    assert document["permissions"] == {"contents": "read", "pull-requests": "write"}
    repository, tools = tmp_path / "repository", tmp_path / "tools"
    (repository / "runs").mkdir(parents=True)
    tools.mkdir()
    (tools / "sm-train").write_text(
        f'#!/bin/sh\nexec "{sys.executable}" -m sm_train.toolkit "$@"\n'
    )
    (tools / "gh").write_text('#!/bin/sh\necho "$@" > gh.txt\n')
    for tool in tools.iterdir():
        tool.chmod(0o755)
    write_run(repository / "runs")
    git(repository, "init", "-q", "-b", "main")
    git(repository, "add", ".")
    git(repository, "commit", "-qm", "base")
    git(repository, "update-ref", "refs/remotes/origin/main", "HEAD")
    write_run(repository / "runs", stages=[stage(max_steps=2000)])

    def run_step(name: str, run: str) -> None:
        environment = clean_environment(tmp_path) | {
            "PATH": f"{tools}:{os.environ['PATH']}",
            "RUN": run,
            "GITHUB_BASE_REF": "main",
            "GITHUB_STEP_SUMMARY": str(tmp_path / "summary.md"),
            "PULL_REQUEST": "7",
        }
        script = shell_step(document, name)
        command = ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", script]
        done = subprocess.run(
            command, cwd=repository, env=environment, check=False, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr

    run_step("Estimate", "runs/run.yaml")
    run_step("Comment", "runs/run.yaml")
    comment = (repository / "cost.md").read_text()
    assert "max\\_steps: 1,000 → 2,000" in comment
    assert (tmp_path / "summary.md").read_text() == comment
    assert (repository / "gh.txt").read_text().split() == [
        "pr",
        "comment",
        "7",
        "--edit-last",
        "--create-if-none",
        "--body-file",
        "cost.md",
    ]
    # A run file that the base branch does not have.
    (repository / "runs" / "run.yaml").rename(repository / "runs" / "new.yaml")
    run_step("Estimate", "runs/new.yaml")
    assert (repository / "cost.md").read_text().startswith("### Training cost: $")
