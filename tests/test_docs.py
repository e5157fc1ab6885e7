"""README and docs: links resolve, and the commands and options in them exist."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import click
import pytest
from sm_train.toolkit.cli import cli

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
MAX_README_LINES = 200


def names(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def command_lines(page: Path) -> list[str]:
    """The ``sm-train`` lines of a page's code blocks and inline code, without comments."""
    text = page.read_text()
    blocks = re.findall(r"^```\w*\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    lines = [line.removeprefix("$ ") for block in blocks for line in block.splitlines()]
    inline = re.findall(r"`(sm-train [^`]+)`", re.sub(r"^```.*?^```", "", text, flags=re.M | re.S))
    return [
        re.sub(r"\s+#.*|\s+>.*", "", line)
        for line in [*lines, *inline]
        if line.startswith("sm-train ")
    ]


@pytest.mark.parametrize("page", PAGES, ids=names)
def test_links_resolve(page: Path) -> None:
    targets = re.findall(r"\]\(([^)#\s]+)", page.read_text())
    missing = [
        target
        for target in targets
        if not target.startswith("http") and not (page.parent / target).exists()
    ]
    assert missing == []


@pytest.mark.parametrize("page", PAGES, ids=names)
def test_commands_and_options_exist(page: Path) -> None:
    context = click.Context(cli)
    for line in command_lines(page):
        words = shlex.split(line.replace("…", ""))[1:]
        command = cli.get_command(context, words[0]) if words else None
        if command is None:
            assert words[0].startswith("-"), line
            continue
        known = {option for one in command.params for option in one.opts + one.secondary_opts}
        options = {word.partition("=")[0] for word in words if re.match(r"--?[a-z]", word)}
        assert options <= known | {"--help", "-h"}, line


def test_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= MAX_README_LINES
