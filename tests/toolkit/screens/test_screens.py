"""The screens of every command at 80 and 120 columns equal the files next to this one.

After an intended change, ``make screens`` writes them again; look at the difference as a user.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import click
import pytest
from sm_train.toolkit.cli import cli as root
from sm_train.toolkit.commands._table import COMMANDS

from tests.toolkit.screens.inputs import write_inputs
from tests.toolkit.screens.screens_support import compare
from tests.toolkit.screens.terminal import draw, normalize

SCREENS: dict[str, list[str]] = {
    "help": ["--help"],
    "unknown-command": ["train"],
    "init": ["init", "new.yaml", "--no-input", "--data", "s3://photos/shards/"],
    "pack": ["pack", "photos", "packed"],
    "index": ["index", "photos-packed/shards"],
    "enrich": ["enrich", "photos", "scores", "--with", "scores:area"],
    "remove": ["remove", "photos-indexed", "0001", "0002", "--dry-run"],
    "lineage": ["lineage", "photos-indexed", "0001"],
    "data-report": ["data-report", "photos-indexed"],
    "data-preview": ["data-preview", "photos-indexed", "--samples", "3"],
    "check": ["check", "owned.yaml", "--offline"],
    "cost": ["cost", "run.yaml"],
    "cost-explain": ["cost", "run.yaml", "--stage", "512px", "--explain"],
    "cost-alternatives": ["cost", "run.yaml", "--alternatives"],
    "cost-regions": ["cost", "run.yaml", "--regions"],
    "cost-compare": ["cost", "run.yaml", "--compare", "other.yaml"],
    "measure": ["measure", "run.yaml", "--stage", "512px", "--dry-run"],
    "instances": ["instances", "--gpu", "100"],
    "plan": ["submit", "run.yaml", "--dry-run"],
    "submit-refused": ["submit", "run.yaml", "--yes"],
    "status-local": ["status", "local-runs/tiny"],
    "logs-local": ["logs", "local-runs/tiny"],
    "review": ["review", "local-runs/tiny"],
    "review-several": ["review", "local-runs/tiny", "local-runs/other"],
    "diagnose": ["diagnose", "failed.log"],
    "image": ["image", "run.yaml"],
    "config": ["config", "--run", "run.yaml"],
    "run-file-errors": ["cost", "wrong.yaml"],
    "fetch-model-refused": ["fetch-model", "org/name", "missing/folder"],
    "sample-refused": ["sample", "step-00001000", "--prompts", "prompts.txt"],
    "export-refused": ["export", "missing/folder", "model"],
    "doctor-refused": ["doctor", "run.yaml", "--yes"],
    "iam": ["iam", "run.yaml", "--only", "trust"],
    "manifest-refused": ["manifest", "run.yaml", "--to", "trainjob"],
    "watch-local": ["watch", "local-runs/tiny"],
    "credentials": ["list", "--region", "us-east-1"],
    "plans": ["plans", "run.yaml", "--days", "7"],
}
"""File → the command."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with run files, shards, logs and prices that do not get old."""
    path = tmp_path_factory.mktemp("screens")
    write_inputs(path)
    return path


@pytest.mark.parametrize("columns", [80, pytest.param(120, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", SCREENS)
def test_screen(name: str, columns: int, folder: Path, tmp_path: Path) -> None:
    work = tmp_path / "work"
    shutil.copytree(folder, work, symlinks=True)
    text = normalize(draw(SCREENS[name], columns=columns, cwd=work))
    assert "Traceback" not in text
    compare(name, columns, text)


def test_help_of_every_command() -> None:
    context = click.Context(root, info_name="sm-train", terminal_width=80)
    texts = []
    for name in COMMANDS:
        command = root.get_command(context, name)
        assert command is not None
        # click keeps the option of the first context, whose names another test may have given.
        command._help_option = None
        inner = click.Context(command, info_name=name, parent=context, terminal_width=80)
        texts.append(command.get_help(inner))
    compare("help-of-commands", 80, "\n\n".join(texts) + "\n")


def test_every_command_has_a_screen() -> None:
    """Those on AWS have theirs in test_screens_of_aws."""
    from tests.toolkit.screens.screens_of_aws_support import AWS_SCREENS, STREAM_SCREENS

    screens = SCREENS | AWS_SCREENS | STREAM_SCREENS
    shown = {screen[0] for screen in screens.values()}
    only_help = {"compare", "completion", "schema", "template"}
    assert set(COMMANDS) - only_help == shown & set(COMMANDS)
