"""README and docs: links resolve, code blocks are valid, and spelling is that of a dictionary."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import pytest
import yaml
from sm_train.estimators.config.load import load_run
from sm_train.toolkit.cli import cli

ROOT = Path(__file__).parent.parent
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "CHANGELOG.md",
    *sorted(ROOT.glob("docs/**/*.md")),
]
MAX_README_LINES = 130

EXISTING_FILES = {"toolkit/templates/local-image.Dockerfile"}
"""Paths of the repository that commands in the documentation read."""

NOT_A_RUN_FILE = "not a run file"
"""In a YAML block's first line: its content belongs to another tool."""

LANGUAGES = {"", "python", "yaml", "json", "text"}


@dataclass(frozen=True)
class Block:
    """A fenced code block: its page, first line's number, language and content."""

    page: Path
    line: int
    language: str
    content: str

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT).as_posix()}:{self.line}"


def blocks() -> list[Block]:
    found = []
    for page in PAGES:
        text = page.read_text()
        for match in re.finditer(r"^```(\w*)\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
            line = text.count("\n", 0, match.start()) + 2
            found.append(Block(page, line, match[1], match[2]))
    return found


BLOCKS = blocks()


def names(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def of(language: str) -> list[Block]:
    return [block for block in BLOCKS if block.language == language]


def command_lines(page: Path) -> list[str]:
    """The ``sm-train`` lines of a page's code blocks and inline code, without comments."""
    text = page.read_text()
    lines = [
        line.removeprefix("$ ")
        for block in BLOCKS
        if block.page == page
        for line in block.content.splitlines()
    ]
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
        if not target.startswith("http")
        and not (page.parent / target).exists()
        # Generated pages of the site; a strict build checks them.
        and not (ROOT / "docs" in page.parents and "reference/" in target)
    ]
    assert missing == []


@pytest.mark.parametrize("page", PAGES, ids=names)
def test_commands_and_options_exist(page: Path) -> None:
    context = click.Context(cli)
    for line in command_lines(page):
        words = shlex.split(line.replace("…", ""))[1:]
        command = cli.get_command(context, words[0]) if words else None
        if command is None:
            assert words[0].startswith("-") or words[0].isupper(), line
            continue
        known = {
            option
            for parameter in command.params
            for option in parameter.opts + parameter.secondary_opts
        }
        known |= {option for parameter in cli.params for option in parameter.opts}
        options = {word.partition("=")[0] for word in words if re.match(r"--?[a-z]", word)}
        assert options <= known | {"--help", "-h"}, line


class MissingFileError(Exception):
    """A command line names a file that does not exist."""


def parse(words: list[str]) -> None:
    command = cli.get_command(click.Context(cli), words[0])
    assert command is not None
    try:
        command.make_context(words[0], words[1:])
    except click.UsageError as error:
        if "does not exist" in error.message:
            raise MissingFileError from error
        raise


@pytest.mark.parametrize(
    "block", [block for block in of("") if "sm-train" in block.content], ids=str
)
def test_command_lines_are_parsed_by_click(block: Block) -> None:
    """Arguments, values and choices, not only the options' names."""
    for line in block.content.splitlines():
        line = re.sub(r"\s+#.*|\s+[>|].*", "", line.removeprefix("$ "))
        if re.match(r"sm-train [a-z]", line) and "…" not in line:
            # Files of the user's are not here.
            with suppress(MissingFileError):
                parse(shlex.split(line)[1:])


@pytest.mark.parametrize("block", of("yaml"), ids=str)
def test_yaml_blocks_are_valid_run_files(block: Block, tmp_path: Path) -> None:
    """A fragment is merged into a small run; a complete file is taken as it is."""
    if NOT_A_RUN_FILE in block.content.partition("\n")[0]:
        return
    document = yaml.safe_load(block.content)
    if "name" not in document:
        document = merged(base(document), document)
    write_code(document, tmp_path)
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(document))
    load_run(path)


@pytest.mark.parametrize("block", of("json"), ids=str)
def test_json_blocks_parse(block: Block) -> None:
    json.loads(block.content)


@pytest.mark.parametrize("block", of("python"), ids=str)
def test_python_blocks_compile(block: Block) -> None:
    compile(block.content, str(block), "exec")


def test_languages_are_known() -> None:
    """A block of another language would not be tested."""
    assert {block.language for block in BLOCKS} <= LANGUAGES


def test_files_of_the_repository_in_commands_exist() -> None:
    text = "".join(block.content for block in BLOCKS)
    assert [name for name in EXISTING_FILES if name in text and not (ROOT / name).exists()] == []


def test_spelling() -> None:
    """codespell knows common misspellings, so it needs no list of correct words."""
    result = subprocess.run(
        [
            sys.executable,
            "-m",
            "codespell_lib",
            *map(str, PAGES),
            "toolkit",
            "estimators",
            "cost",
            "entrypoints",
            "--skip",
            "*.csv,*.json,*.toml,requirements*.txt",
            "--ignore-words-list",
            "ans,fo,nd,te,ser,hist,ot,reencode,skipp,andler,rocess",
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.stdout == "", result.stdout


def test_every_page_installs_with_the_lines_of_the_include() -> None:
    text = (ROOT / "docs" / "includes" / "install.md").read_text()
    [lines] = re.findall(r"^```\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    commands = [line.partition(" #")[0].strip() for line in lines.splitlines()]
    assert lines in (ROOT / "README.md").read_text()
    for page in [*PAGES, *(ROOT / "toolkit" / "templates").iterdir()]:
        written = re.findall(r"pip install .*?(?=[`#\n])", page.read_text())
        ours = [command.strip() for command in written if re.search(r"sm-train\b|\.\[", command)]
        assert set(ours) <= set(commands), page


def test_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= MAX_README_LINES


def base(fragment: dict[str, Any]) -> dict[str, Any]:
    """A small run that a fragment of a run file completes."""
    stage = {
        "name": "256px",
        "resolution": 256,
        "instances": 2,
        "per_device_batch_size": 8,
        "max_steps": 1000,
        "learning_rate": 1e-4,
    }
    spot = fragment.get("cluster", {}).get("capacity") == "spot"
    return {
        "name": "docs",
        "region": "us-east-1",
        "bucket": "my-bucket",
        "role": "arn:aws:iam::111122223333:role/sm-train",
        "data": {"uri": "s3://my-bucket/shards/"},
        "model": {"preset": "sd2"},
        "stages": [stage],
        "cluster": {"instance_type": "ml.p4de.24xlarge", **({"max_wait": "6d"} if spot else {})},
    }


def merged(document: dict[str, Any], fragment: dict[str, Any]) -> dict[str, Any]:
    """Return ``document`` with the keys of ``fragment``; lists are replaced."""
    result = dict(document)
    for key, value in fragment.items():
        both = isinstance(value, dict) and isinstance(result.get(key), dict)
        result[key] = merged(result[key], value) if both else value
    return result


def write_code(document: dict[str, Any], folder: Path) -> None:
    """Create the user code and presets that a document names."""
    if "entry" in document or "code" in document:
        code = folder / document.setdefault("code", "./my_code")
        code.mkdir(exist_ok=True)
        (code / document.get("entry", "losses.py")).write_text("def huber(): ...\n")
    preset = document["model"].get("preset", "sd2")
    if preset.startswith("./"):
        source = ROOT / "entrypoints" / "models" / "presets" / "tiny-dit.json"
        (folder / preset).write_bytes(source.read_bytes())
