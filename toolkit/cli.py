"""``sm-train``: runs a command, and reports every failure as one line and an exit code."""

from __future__ import annotations

import errno
import os
import signal
import sys
from contextlib import suppress
from typing import Any, TextIO

import click
from sm_train.entrypoints.base.error import Error
from sm_train.entrypoints.base.signals import interruption, was_interrupted, was_terminated
from sm_train.toolkit.base.errors import ExitCode, UserError
from sm_train.toolkit.base.settings import default_profile
from sm_train.toolkit.base.wings import wing_module
from sm_train.toolkit.command_base.command import global_options, json_option
from sm_train.toolkit.commands._table import COMMANDS, COMMANDS_OF_WINGS, GROUPS, HINTS
from sm_train.toolkit.terminal.formatting import printable
from sm_train.toolkit.terminal.interrupts import handle_interrupts

_WRONG_PATHS = {
    *(errno.ENOENT, errno.EEXIST, errno.ENOTDIR, errno.EISDIR, errno.ENOTEMPTY),
    *(errno.ENAMETOOLONG, errno.EINVAL, errno.ELOOP, errno.EXDEV),
}
"""Errors of a path that was given; any other error of the system is the disk's or the network's."""


ENTRY_POINTS = "sm_train.commands"
"""The group of entry points by which other packages add commands."""


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
            return _command_of_another_package(cmd_name)
        wing = next(
            (f"{wing}." for wing, names in COMMANDS_OF_WINGS.items() if cmd_name in names), ""
        )
        module = wing_module(f"sm_train.toolkit.{wing}commands.{cmd_name.replace('-', '_')}")
        command: click.Command = module.command
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        width = max(map(len, COMMANDS))
        for heading, commands in GROUPS.items():
            with formatter.section(heading):
                formatter.write_dl([(name.ljust(width), line) for name, line in commands.items()])

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        try:
            return super().resolve_command(ctx, args)
        except click.UsageError as error:
            raise click.UsageError(f"{error.message}{_hint(args[0])}", error.ctx) from None


def _command_of_another_package(name: str) -> click.Command | None:
    """Return the command that an installed package adds (entry points of ``sm_train.commands``).

    They are looked up for names that the table lacks, so that none replaces a command of ours.

    Raises:
        UserError: two packages add it, or it is no command.
    """
    from importlib.metadata import entry_points

    found = list(entry_points(group=ENTRY_POINTS, name=name))
    if not found:
        return None
    packages = sorted(point.dist.name if point.dist else "?" for point in found)
    if len(packages) > 1:
        raise UserError(f"{name}: {' and '.join(packages)} both add this command; remove one")
    try:
        command = found[0].load()
    except (Exception, SystemExit) as error:  # whatever the package does when it is imported
        raise UserError(
            f"{name}: the command of {packages[0]} cannot be loaded: {error}"
        ) from error
    if not isinstance(command, click.Command):
        raise UserError(f"{name}: {found[0].value} of {packages[0]} is no command of click")
    return command


def _hint(name: str) -> str:
    """Return what to type in place of the unknown command ``name``."""
    if name in HINTS:
        return f" {HINTS[name]}."
    from difflib import get_close_matches

    matches = get_close_matches(name, COMMANDS, n=1)
    return f" Did you mean {matches[0]!r}?" if matches else ""


@click.group(
    cls=_LazyGroup,
    context_settings={"help_option_names": ["-h", "--help"]},
    params=[*global_options(), json_option()],
    epilog="RUN is a run file (run.yaml), or for commands that follow a run also its name, one of "
    "its jobs, or the folder of a local run. Options in this list are accepted before and after "
    "the command. `sm-train COMMAND --help` has examples.",
)
@click.version_option(package_name="sm-train")
@click.pass_context
def cli(ctx: click.Context, as_json: bool) -> None:
    """Train foundation diffusion models on Amazon SageMaker from a laptop."""
    options = ctx.ensure_object(dict)
    for name in ("region", "profile"):
        options.setdefault(name, None)
    if options["profile"] is None:
        options["profile"] = default_profile()
    if as_json:
        _request_json(ctx)


def _request_json(ctx: click.Context) -> None:
    """Give the command ``--json``, as if it were after the command.

    Raises:
        UsageError: the command has no such option.
    """
    name = ctx.invoked_subcommand or ""
    command = cli.get_command(ctx, name)
    assert command is not None
    flag = next((option.name for option in command.params if "--json" in option.opts), None)
    if flag is None:
        raise click.UsageError(f"--json: {name} prints no JSON")
    ctx.default_map = {name: {flag: True}}


def main(arguments: list[str] | None = None) -> None:
    """Run the command line and exit with a code of :class:`ExitCode`."""
    handle_interrupts()
    code = _run(sys.argv[1:] if arguments is None else arguments)
    # The command is complete. Python's exit restores the default action of a handled signal, by
    # which the process would end as interrupted.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    if _is_closed(sys.stdout):
        code = ExitCode.OK
    _is_closed(sys.stderr)
    if code == ExitCode.INTERRUPTED and was_terminated():
        code = ExitCode.TERMINATED
    if code in (ExitCode.INTERRUPTED, ExitCode.TERMINATED):
        # Commands have cleaned up. Python's own exit would also end libraries, which the interrupt
        # may have left in the middle of a native call: pyarrow then aborts the process.
        with suppress(BrokenPipeError):
            sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


def _run(arguments: list[str]) -> int:
    options: dict[str, Any] = {"arguments": arguments}
    try:
        result: Any = cli.main(
            args=arguments, prog_name="sm-train", standalone_mode=False, obj=options
        )
        return result if isinstance(result, int) else ExitCode.OK
    except (click.Abort, KeyboardInterrupt):
        # A second signal would print a traceback of the exit.
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
        return _fail(interruption(), ExitCode.INTERRUPTED)
    except _OutputClosedError:
        _discard_output()
        return ExitCode.OK
    except Exception as error:
        says_so = isinstance(error, UserError) and error.exit_code == ExitCode.INTERRUPTED
        if was_interrupted() and not says_so:
            # Compiled modules may drop a KeyboardInterrupt and fail with another exception, which
            # code that reads a file then takes for damage: pyarrow imports a half of pandas, and
            # PyTorch cannot determine the shape of a tensor.
            return _fail(interruption(), ExitCode.INTERRUPTED)
        return _fail_error(error, is_verbose=bool(options.get("verbose")))


def _aws_refusal(error: Exception) -> UserError | None:
    """Return the line of an AWS error that no command has described; None for other errors."""
    if "boto3" not in sys.modules:
        return None
    from boto3.exceptions import S3UploadFailedError
    from botocore.exceptions import BotoCoreError, ClientError
    from sm_train.toolkit.aws.aws_errors import as_user_error

    is_of_aws = isinstance(error, ClientError | BotoCoreError | S3UploadFailedError)
    return as_user_error(error) if is_of_aws else None


def _fail_error(error: Exception, *, is_verbose: bool) -> int:
    match error:
        case Error():
            return _fail(str(error), ExitCode(error.exit_code))
        case click.ClickException():
            return _fail_usage(error)
        case OSError():
            return _fail_os(error)
        case ModuleNotFoundError() if not is_verbose:
            from sm_train.toolkit.base.extras import missing_extra

            if (missing := missing_extra(error)) is not None:
                return _fail(str(missing), missing.exit_code)
        case MemoryError():
            return _fail(
                "not enough memory; use a machine with more, or a smaller input",
                ExitCode.UNEXPECTED,
            )
    if not is_verbose and (refusal := _aws_refusal(error)) is not None:
        return _fail(str(refusal), refusal.exit_code)
    if is_verbose:
        import traceback

        return _fail("".join(traceback.format_exception(error)), ExitCode.UNEXPECTED)
    return _fail(
        f"unexpected {type(error).__name__}: {error} (-v shows the traceback)",
        ExitCode.UNEXPECTED,
    )


def _is_closed(stream: TextIO) -> bool:
    """Write what ``stream`` has buffered; return whether its reader has ended."""
    try:
        stream.flush()
    except BrokenPipeError:
        _discard_output()
        return True
    return False


def _discard_output() -> None:
    """Direct the output nowhere: the interpreter flushes it at exit, into the broken pipe."""
    null = os.open(os.devnull, os.O_WRONLY)
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # a stream without a descriptor
            os.dup2(null, stream.fileno())


def _fail(message: str, code: ExitCode) -> ExitCode:
    with suppress(BrokenPipeError):  # with 2>&1, the reader of the output may have ended
        for line in printable(message).splitlines():
            sys.stderr.write(f"{_wrapped(f'sm-train: {line}')}\n")
    return code


def _fail_usage(error: click.ClickException) -> ExitCode:
    """Report a mistake in the arguments, below the usage of the command."""
    context = getattr(error, "ctx", None)
    with suppress(BrokenPipeError):
        if context is not None:
            sys.stderr.write(f"{context.get_usage()}\n")
            sys.stderr.write(f"Try '{context.command_path} --help' for help.\n\n")
        sys.stderr.write(f"{_wrapped(f'Error: {printable(error.format_message())}')}\n")
    return ExitCode.USAGE


def _wrapped(line: str) -> str:
    """Wrap a message between words on a terminal; elsewhere it stays one line."""
    if not sys.stderr.isatty():
        return line
    import textwrap

    from sm_train.toolkit.terminal.text_table import terminal_width

    return textwrap.fill(
        line,
        terminal_width(),
        subsequent_indent="  ",
        break_long_words=False,
        break_on_hyphens=False,
    )


def _fail_os(error: OSError) -> ExitCode:
    """Report a file system error as the user's to fix: the path, without a traceback."""
    where = f"{error.filename}: " if error.filename else ""
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return _fail(
            f"{where}{error.strerror}; choose a folder you may write to", ExitCode.PERMISSION
        )
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return _fail(f"{where}{error.strerror}; free some space", ExitCode.UNEXPECTED)
    is_usage = error.errno in _WRONG_PATHS
    code = ExitCode.USAGE if is_usage else ExitCode.UNEXPECTED
    return _fail(f"{where}{error.strerror or error}", code)
