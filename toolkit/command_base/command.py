"""The class of all commands: examples in the help text, grouped options, and the global options."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import click
from sm_train.toolkit.base.errors import UserError

GLOBAL_OPTIONS = ("region", "profile", "owners", "bucket_keys", "quiet", "verbose")
"""Names of the options that every command and `sm-train` itself take."""


def global_options() -> list[click.Option]:
    """Return new options that store their values in the context's object."""
    return [
        click.Option(
            ["--region"],
            metavar="R",
            help="AWS region; default: the run file's.",
            expose_value=False,
            callback=_store,
        ),
        click.Option(
            ["--profile"],
            metavar="P",
            help="AWS profile for credentials.",
            expose_value=False,
            callback=_store,
        ),
        click.Option(
            ["--bucket-owner", "owners"],
            multiple=True,
            metavar="B=ACCOUNT",
            help="Account that owns bucket B, if not yours; `any` accepts every owner.",
            expose_value=False,
            callback=_declare(
                "owners", "([0-9]{12}|any)", "BUCKET=ACCOUNT with 12 digits, or BUCKET=any"
            ),
        ),
        click.Option(
            ["--bucket-kms-key", "bucket_keys"],
            multiple=True,
            metavar="B=KEY",
            help="KMS key of new objects in bucket B; `default` leaves it to the bucket.",
            expose_value=False,
            callback=_declare(
                "keys",
                "[a-zA-Z0-9:/_-]+",
                "BUCKET=KEY with the ID, ARN or alias of a key, or BUCKET=default",
            ),
        ),
        click.Option(
            ["-q", "--quiet"],
            is_flag=True,
            help="Print results, warnings and errors only.",
            expose_value=False,
            callback=_store,
        ),
        click.Option(
            ["-v", "--verbose"],
            is_flag=True,
            help="Show the traceback of a failure.",
            expose_value=False,
            callback=_store,
        ),
    ]


def _store(ctx: click.Context, parameter: click.Parameter, value: Any) -> None:
    """Keep a value that is given; the one after the command replaces the one before it."""
    if value and parameter.name == "region":
        from sm_train.estimators.regions import region_problem

        if problem := region_problem(value):
            raise UserError(f"--region: {value!r} {problem}")
    if value and parameter.name is not None:
        ctx.ensure_object(dict).update({parameter.name: value, f"{parameter.name}_flag": True})
        if parameter.name == "quiet":
            from sm_train.toolkit.terminal.console import hide_messages

            hide_messages()


def _declare(
    setting: str, pattern: str, expected: str
) -> Callable[[click.Context, click.Parameter, Sequence[str]], None]:
    """Return the callback of an option with a value for each bucket, as ``declare_buckets`` takes.

    Values have the form BUCKET=``pattern``; ``expected`` describes it in the error.
    """

    def declare(ctx: click.Context, parameter: click.Parameter, value: Sequence[str]) -> None:
        for pair in value:
            if not re.fullmatch(f"[a-z0-9.-]+={pattern}", pair):
                raise UserError(f"{parameter.opts[0]}: {pair!r} must be {expected}")
        if value:
            from sm_train.entrypoints.storage.bucket_settings import declare_buckets

            declare_buckets(**{setting: dict(pair.split("=") for pair in value)})

    return declare


def json_option() -> click.Option:
    """Return a new option ``--json``, which commands get as ``as_json``."""
    return click.Option(["--json", "as_json"], is_flag=True, help="Print JSON on standard output.")


class Command(click.Command):
    """A command with examples, whose options may be in groups, and that takes global options.

    ``option_groups`` maps a heading to the options below it, such as ``--prices``; the others are
    under *Options*. Unless ``prints_json`` is false it takes ``--json``.
    """

    def __init__(
        self,
        *arguments: Any,
        examples: Sequence[str] = (),
        option_groups: Mapping[str, Sequence[str]] | None = None,
        prints_json: bool = True,
        **settings: Any,
    ) -> None:
        super().__init__(*arguments, **settings)
        if prints_json:
            self.params.append(json_option())
        self.examples = tuple(examples)
        self._option_groups = dict(option_groups or {})
        self.params += global_options()

    def format_help_text(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        super().format_help_text(ctx, formatter)
        if self.examples:
            with formatter.section("Examples"):
                for example in self.examples:
                    formatter.write(f"{'':{formatter.current_indent}}{example}\n")

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        sections: dict[str, list[tuple[str, str]]] = {"Options": []}
        sections |= {heading: [] for heading in self._option_groups} | {"Global options": []}
        for parameter in sorted(self.get_params(ctx), key=self._position):
            is_option = isinstance(parameter, click.Option)
            record = parameter.get_help_record(ctx) if is_option else None
            if record is not None:
                sections[self._heading(parameter)].append(record)
        for heading, records in sections.items():
            if records:
                with formatter.section(heading):
                    formatter.write_dl(records)

    def _position(self, parameter: click.Parameter) -> int:
        """Return the place of an option of a group, which lists them in order."""
        grouped = [name for options in self._option_groups.values() for name in options]
        return next((grouped.index(name) for name in parameter.opts if name in grouped), 0)

    def _heading(self, parameter: click.Parameter) -> str:
        if parameter.name in GLOBAL_OPTIONS or "--help" in parameter.opts:
            return "Global options"
        found = (
            heading
            for heading, options in self._option_groups.items()
            if set(options) & set(parameter.opts)
        )
        return next(found, "Options")


def command(*examples: str, **settings: Any) -> Callable[[Callable[..., Any]], Command]:
    """Return a decorator that makes a function a :class:`Command` with ``examples``."""
    return click.command(cls=Command, examples=examples, **settings)
