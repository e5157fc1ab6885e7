"""``--help``: groups, examples that parse, options before and after the command, hints."""

from __future__ import annotations

import itertools
import json
import shlex
from pathlib import Path

import click
import pytest
from sm_train.toolkit.cli import cli as root
from sm_train.toolkit.command_base.command import GLOBAL_OPTIONS, Command
from sm_train.toolkit.commands._table import COMMANDS, GROUPS, HINTS

from tests.conftest import Cli
from tests.support.run_files import one_line, write_run


def command_named(name: str) -> Command:
    command = root.get_command(click.Context(root), name)
    assert isinstance(command, Command)
    return command


def test_help_groups_the_commands_within_80_columns(cli: Cli) -> None:
    shown = cli("--help", env={"COLUMNS": "80"}).stdout
    headings = [line[:-1] for line in shown.splitlines() if line[:1].isupper() and line[-1] == ":"]
    assert headings == ["Options", "Start", "Data", "Plan", "Run", "Monitor", "Fix", "Setup"]
    for name, line in COMMANDS.items():
        # A summary that does not fit is wrapped, which makes the list hard to read.
        assert any(row.split()[:1] == [name] and row.endswith(line) for row in shown.splitlines())
    assert set(COMMANDS) == {name for group in GROUPS.values() for name in group}


@pytest.mark.parametrize("name", COMMANDS)
def test_examples_of_the_help_text_parse(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for file in ("run.yaml", "packed/index.parquet"):
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).touch()
    (tmp_path / "models" / "clip").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    command = command_named(name)
    assert command.examples
    for example in command.examples:
        assert len(example) <= 98
        text = example.removeprefix('eval "$(').removesuffix(')"').partition(" > ")[0]
        program, *words = shlex.split(text)
        assert (program, words[0]) == ("sm-train", name)
        with command.make_context(name, words[1:], parent=click.Context(root, obj={})) as context:
            assert context.params is not None


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_takes_the_global_options(name: str) -> None:
    own = {parameter.name for parameter in command_named(name).params}
    assert own >= set(GLOBAL_OPTIONS)
    assert len(own) == len(command_named(name).params)


def test_help_of_a_command_shows_its_examples(cli: Cli) -> None:
    shown = cli("logs", "--help").stdout
    assert "Examples:\n  sm-train logs my-model --follow\n" in shown
    assert shown.index("Global options:") < shown.index("--region R")


def test_global_options_are_taken_before_and_after_the_command(cli: Cli, tmp_path: Path) -> None:
    run = write_run(tmp_path)
    before = cli("--region", "eu-west-1", "--json", "image", run)
    after = cli("image", run, "--json", "--region", "eu-west-1")
    assert before.returncode == 0, before.stderr
    assert json.loads(before.stdout)["region"] == "eu-west-1"
    assert before.stdout == after.stdout
    both = cli("--region", "us-west-2", "image", run, "--region", "eu-west-1", "--json")
    assert both.stdout == after.stdout
    for arguments in (["--profile", "none", "list"], ["list", "--profile", "none"]):
        refused = cli(*arguments)
        assert (refused.returncode, "profile: 'none'" in refused.stderr) == (4, True)


def test_json_before_a_command_that_prints_none_is_refused(cli: Cli) -> None:
    result = cli("--json", "completion", "bash")
    assert (result.returncode, result.stdout) == (2, "")
    assert "--json: completion prints no JSON" in result.stderr


@pytest.mark.parametrize("region", ["--region=us-est-1", "--region=eu-west-9"])
def test_mistyped_region_is_refused_with_the_nearest(cli: Cli, tmp_path: Path, region: str) -> None:
    run = write_run(tmp_path)
    for arguments in (
        ["cost", run, region],
        ["check", run, "--offline", region],
        ["submit", run, "--dry-run", region],
        ["cost", "--instance=ml.p5.48xlarge", "--instances=1", "--its=1", "--steps=9", region],
    ):
        result = cli(*arguments)
        assert (result.returncode, result.stdout) == (2, ""), arguments
        line = one_line(result.stderr)
        assert line.startswith("sm-train: --region: ")
        assert "is not an AWS region; did you mean " in line


def test_mistyped_region_of_the_run_file_is_an_error_of_that_field(
    cli: Cli, tmp_path: Path
) -> None:
    result = cli("cost", write_run(tmp_path, region="us-est-1"))
    assert result.returncode == 2
    expected = "region: 'us-est-1': is not an AWS region; did you mean us-east-1 or us-west-1?"
    assert expected in one_line(result.stderr)


@pytest.mark.parametrize("word", ["train", "run", "plan", "launch", "version"])
def test_command_of_another_tool_gets_a_hint(cli: Cli, word: str) -> None:
    result = cli(word, "run.yaml")
    assert result.returncode == 2
    assert HINTS[word] in result.stderr


def test_hints_name_commands_that_exist() -> None:
    assert not HINTS.keys() & COMMANDS.keys()
    for hint in HINTS.values():
        for before, word in itertools.pairwise(hint.split()):
            is_known = word in COMMANDS or word == "COMMAND" or word.startswith("-")
            assert before != "sm-train" or is_known, hint


def test_quiet_prints_neither_plan_nor_hints(cli: Cli, tmp_path: Path) -> None:
    run = write_run(tmp_path)
    quiet = cli("submit", run, "--dry-run", "--quiet", "--json")
    assert (quiet.returncode, quiet.stderr) == (0, "")
    assert json.loads(quiet.stdout)["requests"]
    assert cli("init", "new.yaml", "-q").stderr == ""
    # Findings are the result of check, and errors are never hidden.
    assert "ok (" in cli("-q", "check", run, "--offline").stderr
    assert cli("-q", "cost", "missing.yaml").stderr.startswith("sm-train: missing.yaml")
