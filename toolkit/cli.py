"""``sm-train``: finds the command, runs it, and turns every failure into one line and a code."""

from __future__ import annotations

import errno
import sys
from importlib import import_module
from typing import Any

import click
from sm_train.toolkit.errors import ExitCode, UserError

# Name → the line in `sm-train --help`. Kept here so that help imports no command.
COMMANDS = {
    "init": "Write a commented run file.",
    "pack": "Pack images and captions into WebDataset shards.",
    "index": "Describe shards that came without an index.",
    "check": "Find what would go wrong before money is spent.",
    "cost": "Say what a run costs, in dollars and days.",
    "submit": "Show the plan and the dollars, ask, and start the run.",
    "list": "List the runs of this account and region.",
    "status": "Show where a run is, and what it has cost and will.",
    "logs": "Print what a run's jobs said, or follow it.",
    "watch": "Follow a run; start it again by cause, mind the budget.",
    "alarms": "Make CloudWatch alarms that tell of a run when nothing else does.",
    "stop": "Let a run checkpoint and end.",
    "resume": "Go on with a run at the step where it ended.",
    "image": "Print the container image of a run, or a Dockerfile for your own.",
    "iam": "Print the least IAM policies for a run: yours and its job's.",
    "review": "Say how well a job's time was used, with evidence and mends.",
    "diagnose": "Say why a job failed, from its logs.",
    "doctor": "Examine a cluster: GPUs, network, files, and what they do to the run.",
    "sample": "Draw images from a checkpoint into a grid.",
    "compare": "Make a page on which people judge two checkpoints blindly.",
    "template": "Print a CloudFormation template: packing or watching in Lambda.",
    "schema": "Print the run file's JSON Schema.",
    "completion": "Print the completion script for a shell.",
}


class _LazyGroup(click.Group):
    """A group whose commands are imported when they are run."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module = import_module(f"sm_train.toolkit.commands.{cmd_name}")
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

            near = get_close_matches(args[0], COMMANDS, n=1)
            if not near:
                raise
            message = f"{error.message} Did you mean {near[0]!r}?"
            raise click.UsageError(message, error.ctx) from None


@click.group(cls=_LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--region", metavar="R", help="AWS region; the run file's own otherwise.")
@click.option("--profile", metavar="P", help="AWS profile for credentials.")
@click.option("-v", "--verbose", is_flag=True, help="Show the traceback of a failure.")
@click.version_option(package_name="sm-train")
@click.pass_context
def cli(ctx: click.Context, region: str | None, profile: str | None, verbose: bool) -> None:
    """Train foundation diffusion models on Amazon SageMaker from a laptop."""
    ctx.obj = {"region": region, "profile": profile, "verbose": verbose}


def main(arguments: list[str] | None = None) -> None:
    """Run the command line and exit with the contract's code."""
    arguments = sys.argv[1:] if arguments is None else arguments
    try:
        result: Any = cli.main(args=arguments, prog_name="sm-train", standalone_mode=False)
        code = result if isinstance(result, int) else ExitCode.OK
    except UserError as error:
        code = _fail(str(error), error.exit_code)
    except click.ClickException as error:
        error.show(sys.stderr)
        code = ExitCode.USAGE
    except (click.Abort, KeyboardInterrupt):
        code = _fail("interrupted", ExitCode.INTERRUPTED)
    except OSError as error:
        code = _fail_os(error)
    except Exception as error:
        if "-v" in arguments or "--verbose" in arguments:
            raise
        code = _fail(
            f"unexpected {type(error).__name__}: {error} (-v shows the traceback)",
            ExitCode.UNEXPECTED,
        )
    sys.exit(code)


def _fail(message: str, code: ExitCode) -> ExitCode:
    for line in message.splitlines():
        sys.stderr.write(f"sm-train: {line}\n")
    return code


def _fail_os(error: OSError) -> ExitCode:
    """A file system's refusal is the user's to mend: no traceback, the path named."""
    where = f"{error.filename}: " if error.filename else ""
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return _fail(f"{where}{error.strerror}; choose a place you may write", ExitCode.PERMISSION)
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return _fail(f"{where}{error.strerror}; free some space", ExitCode.UNEXPECTED)
    return _fail(f"{where}{error.strerror or error}", ExitCode.USAGE)
