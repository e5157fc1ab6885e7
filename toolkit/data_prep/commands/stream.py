"""``sm-train stream``: images that are packed as they arrive, by Lambda."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click
from sm_train.toolkit.command_base.command import command as sm_train_command

if TYPE_CHECKING:
    from sm_train.entrypoints.storage.store import S3Access
    from sm_train.toolkit.data_prep.streaming.given_metadata import MetadataTable
    from sm_train.toolkit.data_prep.streaming.stack import StreamStack


@sm_train_command(
    "sm-train stream photo-pack",
    "sm-train stream photo-pack --add s3://photos/2025/",
    "sm-train stream photo-pack --add s3://photos/ --captions rights.csv",
    "sm-train stream photo-pack --flush",
    "sm-train stream photo-pack --dead",
    "sm-train stream photo-pack --redrive",
)
@click.argument("stack_name", metavar="STACK")
@click.option(
    "--add",
    "source",
    metavar="SRC",
    help="Pack the images that were in the bucket before: an S3 prefix, or the manifest.json of an "
    "S3 inventory.",
)
@click.option(
    "--captions",
    metavar="TABLE",
    help="--add: write the captions, and the columns that the stack takes from files, of a CSV, "
    "JSONL or Parquet table next to the images that have none.",
)
@click.option(
    "--image-column",
    metavar="NAME",
    help="--captions: column with the images; by default `image`.",
)
@click.option(
    "--caption-column",
    "caption_columns",
    metavar="NAME",
    multiple=True,
    help="--captions: column with the captions; by default `caption`, if the table has it. Of "
    "several, the first that is not blank.",
)
@click.option(
    "--flush", is_flag=True, help="Seal all staged samples now, and add them to the index."
)
@click.option(
    "--redrive", is_flag=True, help="Deliver the messages of the dead-letter queue again."
)
@click.option(
    "--dead", is_flag=True, help="List the images of the dead letters, and why they are not packed."
)
@click.option("--rejected", is_flag=True, help="List the rejected inputs with their reasons.")
@click.option("--dry-run", is_flag=True, help="--add: show the images and the price.")
@click.option("--yes", is_flag=True, help="--add: do not ask for confirmation.")
@click.pass_obj
def command(
    options: dict[str, Any],
    stack_name: str,
    source: str | None,
    captions: str | None,
    image_column: str | None,
    caption_columns: tuple[str, ...],
    flush: bool,
    redrive: bool,
    dead: bool,
    rejected: bool,
    dry_run: bool,
    yes: bool,
    as_json: bool,
) -> int:
    """Show images that are packed as they arrive, pack older ones, or flush.

    STACK is the CloudFormation stack of `sm-train template pack-lambda`. Without an option, the
    command counts the messages in its queues, the staged samples that wait for a shard, the sealed
    shards and the rejected inputs.

    --add sends a notification for each image that the pack does not have. It can be repeated at any
    time: an image that was staged or packed is skipped. A message with an image that lacks its
    caption, a .txt or .caption file next to it, or its columns becomes a dead letter after eight
    attempts; its other images are packed.
    """
    from sm_train.entrypoints.storage.store import S3Access
    from sm_train.toolkit.aws.session import open_session, resolve_region
    from sm_train.toolkit.base.errors import ExitCode, UsageError
    from sm_train.toolkit.data_prep.streaming.given_metadata import MetadataTable
    from sm_train.toolkit.data_prep.streaming.stack import find_stack
    from sm_train.toolkit.data_prep.streaming.stream_status import (
        read_status,
        status_document,
        status_lines,
    )
    from sm_train.toolkit.terminal.console import note, write_json, write_line
    from sm_train.toolkit.terminal.formatting import plural

    if (source is not None) + flush + redrive + dead + rejected > 1:
        raise UsageError("--add, --flush, --redrive, --dead and --rejected exclude each other")
    if (dry_run or yes or captions is not None) and source is None:
        raise UsageError("--captions, --dry-run and --yes require --add")
    if (caption_columns or image_column) and captions is None:
        raise UsageError("--image-column and --caption-column require --captions")
    region = resolve_region(options["region"], None, options["profile"])
    stack = find_stack(open_session(options["profile"], region), stack_name)
    access = S3Access(options["profile"], region)
    if dead or rejected:
        _list_problems(stack, access, dead=dead, as_json=as_json)
        return ExitCode.OK
    if source is not None:
        table = None
        if captions is not None:
            table = MetadataTable(captions, image_column or "image", caption_columns)
        _add(stack, source, access, table, dry_run=dry_run, yes=yes)
    elif flush:
        note("sealing staged samples; this takes a minute for each 2 GB")
        answer = stack.flush()
        sealed = plural(answer["sealed"], "shard")
        note(f"sealed {sealed}, added {answer['indexed']:,} to the index")
    elif redrive:
        stack.redrive()
        note("SQS moves the dead letters back to the queue")
    status = read_status(stack, access)
    if as_json:
        write_json(status_document(status))
    else:
        for line in status_lines(status):
            write_line(line)
    return ExitCode.OK


def _list_problems(stack: StreamStack, access: S3Access, *, dead: bool, as_json: bool) -> None:
    """List the images of the ``dead`` letters, or else the rejected inputs."""
    from sm_train.toolkit.data_prep.streaming.dead_letters import (
        dead_letter_documents,
        dead_letter_lines,
        read_dead_letters,
    )
    from sm_train.toolkit.data_prep.streaming.stream_status import (
        read_rejected_inputs,
        rejected_documents,
        rejected_lines,
    )
    from sm_train.toolkit.terminal.console import write_json, write_line

    if dead:
        letters = read_dead_letters(stack, access)
        documents, lines = dead_letter_documents(letters), dead_letter_lines(letters)
    else:
        inputs = read_rejected_inputs(stack, access)
        documents, lines = rejected_documents(inputs), rejected_lines(inputs)
    if as_json:
        write_json(documents)
    else:
        for line in lines:
            write_line(line)


def _add(
    stack: StreamStack,
    source: str,
    access: S3Access,
    table: MetadataTable | None,
    *,
    dry_run: bool,
    yes: bool,
) -> None:
    """Send notifications for the images of ``source`` after showing their price."""
    from sm_train.entrypoints.base.signals import raise_on_signals
    from sm_train.toolkit.data_prep.packing.pack_report import progress_bar
    from sm_train.toolkit.data_prep.streaming.given_metadata import write_given
    from sm_train.toolkit.data_prep.streaming.notifications import (
        plan_notifications,
        send_notifications,
    )
    from sm_train.toolkit.data_prep.streaming.stream_status import plan_lines, written_line
    from sm_train.toolkit.terminal.confirmation import ask
    from sm_train.toolkit.terminal.console import note
    from sm_train.toolkit.terminal.formatting import plural

    with plan_notifications(stack, source, access, table) as notifications:
        for line in plan_lines(notifications):
            note(line)
        if notifications.images == 0 or dry_run:
            return
        if not yes:
            ask("Pack them?")
        if (given := notifications.given) is not None:
            with raise_on_signals(), progress_bar() as on_progress:
                written = write_given(given, notifications.images, on_progress)
            note(written_line(written))
        with raise_on_signals(), progress_bar() as on_progress:
            sent = send_notifications(stack, notifications, on_progress)
    images = plural(sent, "image")
    note(f"sent notifications for {images}; the stack packs them in the next minutes")
