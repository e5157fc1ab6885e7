"""``sm-train``: runs a command, and reports every failure as one line and an exit code."""

from __future__ import annotations

import errno
import os
import re
import signal
import sys
from contextlib import suppress
from importlib import import_module
from typing import Any

import click
from sm_train.entrypoints.common.bucket_owner import declare_owners
from sm_train.toolkit.errors import ExitCode, UserError
from sm_train.toolkit.terminal.interrupts import handle_interrupts, was_interrupted
from sm_train.toolkit.terminal.printable import printable

# Name → the line in `sm-train --help`. Kept here so that help imports no command.
COMMANDS = {
    "init": "Write a commented run file.",
    "pack": "Pack images and captions into WebDataset shards.",
    "index": "Build the index of existing shards.",
    "fetch-model": "Copy a pretrained model from the Hugging Face Hub.",
    "check": "Find errors and waste before money is spent.",
    "cost": "Estimate what a run costs, in dollars and days.",
    "submit": "Show plan and cost, ask for confirmation, and start the run.",
    "list": "List the runs of this account and region.",
    "status": "Show a run's progress, its cost so far and its projected cost.",
    "logs": "Print or follow the log of a run's job.",
    "watch": "Follow a run, restart lost jobs and enforce the budget.",
    "alarms": "Create CloudWatch alarms for a run.",
    "stop": "Stop a run after a checkpoint.",
    "resume": "Continue a run at the step where it ended.",
    "image": "Print the container image of a run, or a Dockerfile for your own.",
    "iam": "Print the least-privilege IAM policies for a run: yours and its job's.",
    "review": "Report how well a job used its time, with evidence and fixes.",
    "diagnose": "Find out why a job failed, from its logs.",
    "doctor": "Test a cluster's GPUs, network and storage, and their effect on the run.",
    "sample": "Sample images from a checkpoint into a grid.",
    "export": "Turn a checkpoint into a model for other tools.",
    "compare": "Build a page for blind comparison of two checkpoints.",
    "template": "Print a template for packing or watching in AWS Lambda.",
    "schema": "Print the run file's JSON Schema.",
    "completion": "Print the completion script for a shell.",
}


class _OutputClosedError(Exception):
    """The reader of standard output, such as ``head``, has ended."""


class _LazyGroup(click.Group):
    """A group that imports a command only when it runs."""

    # click and rich exit with 1 on a closed pipe, from which a caller cannot see the reason.
    def make_context(self, *arguments: Any, **options: Any) -> click.Context:
        try:
            return super().make_context(*arguments, **options)
        except BrokenPipeError as error:
            raise _OutputClosedError from error

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except BrokenPipeError as error:
            raise _OutputClosedError from error

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module = import_module(f"sm_train.toolkit.commands.{cmd_name.replace('-', '_')}")
        command: click.Command = module.command
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        try:
            return super().resolve_command(ctx, args)
        except click.UsageError as error:
            from difflib import get_close_matches

            matches = get_close_matches(args[0], COMMANDS, n=1)
            if not matches:
                raise
            message = f"{error.message} Did you mean {matches[0]!r}?"
            raise click.UsageError(message, error.ctx) from None


@click.group(cls=_LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--region", metavar="R", help="AWS region; default: the run file's.")
@click.option("--profile", metavar="P", help="AWS profile for credentials.")
@click.option(
    "--bucket-owner",
    "owners",
    multiple=True,
    metavar="B=ACCOUNT",
    help="Account that owns bucket B, if not yours; `any` accepts every owner.",
)
@click.option("-v", "--verbose", is_flag=True, help="Show the traceback of a failure.")
@click.version_option(package_name="sm-train")
@click.pass_context
def cli(
    ctx: click.Context,
    region: str | None,
    profile: str | None,
    owners: tuple[str, ...],
    verbose: bool,
) -> None:
    """Train foundation diffusion models on Amazon SageMaker from a laptop."""
    for owner in owners:
        if not re.fullmatch(r"[a-z0-9.-]+=([0-9]{12}|any)", owner):
            raise UserError(
                f"--bucket-owner: {owner!r} must be BUCKET=ACCOUNT with 12 digits, or BUCKET=any"
            )
    declare_owners(dict(owner.split("=") for owner in owners))
    ctx.obj = {"region": region, "profile": profile, "verbose": verbose}


def main(arguments: list[str] | None = None) -> None:
    """Run the command line and exit with a code of :class:`ExitCode`."""
    handle_interrupts()
    code = _run(sys.argv[1:] if arguments is None else arguments)
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        code = ExitCode.OK
        _discard_output()
    if code == ExitCode.INTERRUPTED:
        # Commands have cleaned up. Python's own exit would also end libraries, which the interrupt
        # may have left in the middle of a native call: pyarrow then aborts the process.
        with suppress(BrokenPipeError):
            sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


def _run(arguments: list[str]) -> int:
    try:
        result: Any = cli.main(args=arguments, prog_name="sm-train", standalone_mode=False)
        return result if isinstance(result, int) else ExitCode.OK
    except UserError as error:
        return _fail(str(error), error.exit_code)
    except click.ClickException as error:
        error.show(sys.stderr)
        return ExitCode.USAGE
    except (click.Abort, KeyboardInterrupt):
        # A second Ctrl-C would print a traceback of the exit.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        return _fail("interrupted", ExitCode.INTERRUPTED)
    except _OutputClosedError:
        _discard_output()
        return ExitCode.OK
    except OSError as error:
        return _fail_os(error)
    except Exception as error:
        if was_interrupted():
            # pyarrow's compiled modules drop a KeyboardInterrupt while they import pandas, which is
            # then half imported and fails with another exception.
            return _fail("interrupted", ExitCode.INTERRUPTED)
        if "-v" in arguments or "--verbose" in arguments:
            raise
        return _fail(
            f"unexpected {type(error).__name__}: {error} (-v shows the traceback)",
            ExitCode.UNEXPECTED,
        )


def _discard_output() -> None:
    """Direct the output nowhere: the interpreter flushes it at exit, into the broken pipe."""
    null = os.open(os.devnull, os.O_WRONLY)
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # a stream without a descriptor
            os.dup2(null, stream.fileno())


def _fail(message: str, code: ExitCode) -> ExitCode:
    with suppress(BrokenPipeError):  # with 2>&1, the reader of the output may have ended
        for line in printable(message).splitlines():
            sys.stderr.write(f"sm-train: {line}\n")
    return code


def _fail_os(error: OSError) -> ExitCode:
    """Report a file system error as the user's to fix: the path, without a traceback."""
    where = f"{error.filename}: " if error.filename else ""
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return _fail(
            f"{where}{error.strerror}; choose a folder you may write to", ExitCode.PERMISSION
        )
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return _fail(f"{where}{error.strerror}; free some space", ExitCode.UNEXPECTED)
    return _fail(f"{where}{error.strerror or error}", ExitCode.USAGE)
