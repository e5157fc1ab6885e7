"""What a streaming pack has: its messages, its staged, sealed and rejected images."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TypedDict

from sm_train.entrypoints.data_prep.streaming.stream_state import (
    StreamCounts,
    count_stream,
    rejected_inputs,
)
from sm_train.entrypoints.job_interface.index_location import INDEX_NAME
from sm_train.entrypoints.shards.shard_index import IndexHeader, RejectedInput, read_header
from sm_train.entrypoints.storage.storage import S3Prefix, open_storage
from sm_train.entrypoints.storage.store import S3Access
from sm_train.toolkit.aws.aws_errors import translate_aws_errors
from sm_train.toolkit.data_prep.packing.file_kinds import describe_skipped
from sm_train.toolkit.data_prep.streaming.given_metadata import WrittenFiles
from sm_train.toolkit.data_prep.streaming.notifications import Notifications
from sm_train.toolkit.data_prep.streaming.stack import StreamStack
from sm_train.toolkit.terminal.formatting import format_bytes, format_usd, plural


class StreamDocument(TypedDict):
    """The output of ``stream --json``.

    ``waiting``, ``in_flight`` and ``dead_letters`` are messages, as SQS estimates them; the others
    are counted in S3. ``claimed`` shards are being sealed. ``sealed`` shards and ``rejected``
    inputs are those that the index does not have yet; ``indexed_shards``, ``indexed_samples`` and
    ``indexed_rejected`` those that it has, with what `sm-train pack` wrote.
    """

    destination: str
    waiting: int
    in_flight: int
    dead_letters: int
    staged: int
    staged_bytes: int
    claimed: int
    sealed: int
    rejected: int
    indexed_shards: int
    indexed_samples: int
    indexed_rejected: int


@dataclass(frozen=True)
class StreamStatus:
    """The messages of a stack, its objects in S3, and the header of its index."""

    stack: StreamStack
    waiting: int
    in_flight: int
    dead_letters: int
    counts: StreamCounts
    index: IndexHeader


def read_status(stack: StreamStack, access: S3Access) -> StreamStatus:
    """Count messages and objects.

    Raises:
        UserError: access is denied.
    """
    messages = stack.messages()
    with translate_aws_errors(stack.destination):
        destination = open_storage(stack.destination, access)
        assert isinstance(destination, S3Prefix)
        try:
            with destination.open(INDEX_NAME) as file:
                index = read_header(file, destination.address(INDEX_NAME))
        except FileNotFoundError:
            index = IndexHeader()
        return StreamStatus(stack, *messages, count_stream(destination), index)


def read_rejected_inputs(stack: StreamStack, access: S3Access) -> list[RejectedInput]:
    """Return all rejected inputs of the pack, sorted.

    Raises:
        UserError: access is denied.
    """
    with translate_aws_errors(stack.destination):
        destination = open_storage(stack.destination, access)
        assert isinstance(destination, S3Prefix)
        return rejected_inputs(destination)


def rejected_lines(inputs: Sequence[RejectedInput]) -> Iterator[str]:
    """Yield a line for each rejected input."""
    for item in inputs:
        yield f"{item.source}: {item.reason}: {item.detail}"


def rejected_documents(inputs: Sequence[RejectedInput]) -> list[dict[str, str]]:
    """Return what ``stream --rejected --json`` prints."""
    return [vars(item) for item in inputs]


def status_lines(status: StreamStatus) -> Iterator[str]:
    """Yield the lines that describe a status."""
    counts, index = status.counts, status.index
    yield status.stack.destination
    in_flight = f", {status.in_flight:,} in flight" if status.in_flight else ""
    yield f"  queue         {plural(status.waiting, 'message')}{in_flight}"
    again = "; --dead lists them, --redrive delivers them again" if status.dead_letters else ""
    yield f"  dead letters  {plural(status.dead_letters, 'message')}{again}"
    yield (
        f"  staged        {plural(counts.staged, 'sample')}, {format_bytes(counts.staged_bytes)}; "
        f"a shard takes {format_bytes(status.stack.shard_bytes)}"
    )
    if types := status.stack.columns.types:
        named = ", ".join(f"{name} ({kind})" for name, kind in types.items())
        origins = {"sidecar": ".json files next to the images", "tags": "tags of the objects"}
        yield f"  columns       {named} of {origins[status.stack.columns.origin]}"
    if counts.claimed:
        yield f"  sealing       {plural(counts.claimed, 'shard')}"
    missing = f"; {plural(counts.sealed, 'shard')} not yet" if counts.sealed else ""
    yield (
        f"  indexed       {plural(index.samples, 'sample')} in {plural(index.shards, 'shard')}"
        f"{missing}"
    )
    missing = f"; {counts.rejected:,} not yet" if counts.rejected else ""
    listed = "; --rejected lists them" if index.rejected or counts.rejected else ""
    yield f"  rejected      {plural(index.rejected, 'input')} in the index{missing}{listed}"


def status_document(status: StreamStatus) -> StreamDocument:
    """Return the document that ``stream --json`` prints."""
    counts, index = status.counts, status.index
    return {
        "destination": status.stack.destination,
        "waiting": status.waiting,
        "in_flight": status.in_flight,
        "dead_letters": status.dead_letters,
        "staged": counts.staged,
        "staged_bytes": counts.staged_bytes,
        "claimed": counts.claimed,
        "sealed": counts.sealed,
        "rejected": counts.rejected,
        "indexed_shards": index.shards,
        "indexed_samples": index.samples,
        "indexed_rejected": index.rejected,
    }


def written_line(written: WrittenFiles) -> str:
    """Return the line that says what was written next to images."""
    counts = written.counts
    made = [plural(counts["caption"], "caption")] if counts["caption"] else []
    if number := counts["file of columns"]:
        made.append(f"{plural(number, 'file')} of columns")
    kept = f"; kept {plural(counts['kept'], 'file')} already there" if counts["kept"] else ""
    return f"wrote {' and '.join(made) or 'no file'} for {plural(written.images, 'image')}{kept}"


def plan_lines(notifications: Notifications) -> Iterator[str]:
    """Yield the lines that say which images will be packed, and what that costs."""
    found = notifications.inputs
    known = f"; {notifications.known:,} are packed already" if notifications.known else ""
    for item in islice(notifications.rejected, 1):
        inputs = plural(len(notifications.rejected), "input")
        yield f"{inputs} left out, the first: {item.source}: {item.reason}: {item.detail}"
    if notifications.unused:
        unused = ", ".join(notifications.unused)
        yield f"not used of the table: {unused}, which the stack takes from tags"
    if absent := notifications.absent:
        yield (
            f"{plural(len(absent), 'image')} of the table without a JPEG, PNG or WebP object, the "
            f"first: {absent[0]}; repeat the command when it has arrived"
        )
    images = plural(notifications.images, "image")
    yield f"{images} to pack, {format_bytes(found.image_bytes)}{known}"
    yield from describe_skipped(found.skipped)
    if notifications.images:
        yield (
            f"about {format_usd(float(notifications.usd))} for S3 requests, SQS and Lambda "
            "(us-east-1)"
        )
