"""The reference of the command line, from click."""

from __future__ import annotations

import click
from sm_train.toolkit.cli import cli
from tables import code, row, table

HEAD = """\
# Command line

Generated from the commands themselves; `sm-train COMMAND --help` prints the same text.

| exit code | meaning |
|---|---|
| 0 | success |
| 1 | unexpected error, or a service that a retry may reach |
| 2 | usage, or an invalid file |
| 3 | preflight checks failed |
| 4 | missing credentials or permission |
| 5 | no capacity, or a quota |
| 6 | the job failed |
| 7 | over budget |
| 8 | stalled |
| 130 | interrupted |
"""


def render() -> str:
    """Return the page: global options, then every command with its help text."""
    root = click.Context(cli, info_name="sm-train")
    parts = [HEAD, "\n## Global options\n\n", _options(cli, root)]
    for name in cli.list_commands(root):
        command = cli.get_command(root, name)
        if command is not None and not command.hidden:
            parts.append(_command(name, command, root))
    return "".join(parts)


def _command(name: str, command: click.Command, root: click.Context) -> str:
    context = click.Context(command, info_name=name, parent=root)
    usage = " ".join(command.collect_usage_pieces(context))
    lines = [f"\n## {name}\n\n", f"```\nsm-train {name} {usage}\n```\n\n"]
    lines.append(_help(command.help or "") + "\n\n")
    if any(isinstance(parameter, click.Option) for parameter in command.get_params(context)):
        lines.append(_options(command, context))
    return "".join(lines)


def _help(text: str) -> str:
    """Return a help text as Markdown: click's ``\\b`` paragraphs become code blocks."""
    paragraphs = []
    for paragraph in text.replace("\f", "").split("\n\n"):
        if paragraph.startswith("\b\n"):
            paragraphs.append(f"```text\n{paragraph[2:].rstrip()}\n```")
        else:
            paragraphs.append(paragraph.replace("<", "\\<").replace("*", "\\*"))
    return "\n\n".join(paragraphs)


def _options(command: click.Command, context: click.Context) -> str:
    rows = []
    for option in command.get_params(context):
        if isinstance(option, click.Option) and not option.hidden:
            record = option.get_help_record(context)
            if record is not None:
                rows.append(row(code(record[0]), record[1].replace("<", "\\<").replace("*", "\\*")))
    return table(("option", "effect"), rows)
