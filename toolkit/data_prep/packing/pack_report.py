"""Shows the progress of a pack, and the results of packing and indexing."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any, TypedDict

from sm_train.entrypoints.data_prep.work.worker_pool import WorkProgress
from sm_train.entrypoints.job_interface.job_config import UNRECORDED_COLOR, ColorPolicy
from sm_train.entrypoints.sample_metadata.color_counts import ColorCounts
from sm_train.entrypoints.shards.shard_index import IndexHeader, RejectedInput
from sm_train.toolkit.data_prep.packing.append import Comparison
from sm_train.toolkit.data_prep.packing.file_kinds import SkippedKind, describe_skipped
from sm_train.toolkit.data_prep.packing.index import IndexResult
from sm_train.toolkit.data_prep.packing.pack import Appended, PackResult
from sm_train.toolkit.terminal.console import stderr_console
from sm_train.toolkit.terminal.formatting import plural

FASTFILE_BYTES = 150_000_000
"""FastFile reads few large objects best; AWS recommends at least 150 MB."""

_MAX_NAMED_INPUTS = 2
"""Rejected inputs that are named for each reason; the index lists all of them."""

_MAX_NAMED_DAMAGE = 5
"""Damaged regions that are named; the index lists all of them."""


COMPLETES_APPEND = "completes an unfinished append; run the command again to add other new images"


class SkippedDocument(TypedDict):
    """Files that are not packed: their number and the first three."""

    count: int
    first: list[str]


class AppendedDocument(TypedDict):
    """What ``pack --append`` added.

    ``changed`` are images with the name of a packed one, but another size, caption or column: they
    are not packed. ``missing`` is the number of packed images that are not in the source.
    """

    samples: int
    shards: int
    changed: SkippedDocument
    missing: int


class PackDocument(TypedDict):
    """The output of ``pack --json``.

    ``rejected`` is the number of inputs for each reason. ``skipped`` are the files that are neither
    images nor captions, by kind. ``filtered`` is the number of rows that do not fulfil ``--where``.
    ``appended`` is null without ``--append``. ``colors`` counts the images of the pack
    (:class:`ColorCounts`).
    """

    shards: int
    samples: int
    bytes: int
    rejected: dict[str, int]
    skipped: dict[str, SkippedDocument]
    filtered: int
    appended: AppendedDocument | None
    colors: dict[str, Any]
    index: str
    shards_path: str


class DamageDocument(TypedDict):
    """One damaged region of a shard."""

    shard: str
    detail: str


class UnusableDocument(TypedDict):
    """Samples that cannot be trained on: their number and the first three names."""

    count: int
    first: list[str]


class IndexDocument(TypedDict):
    """The output of ``index --json``.

    ``unusable`` are the samples that cannot be trained on, by reason: ``no-image``, ``no-caption``,
    ``dotted-name``, ``separated``, ``repeated-file``, ``hard-link``, ``sparse``, and ``compressed``
    for whole shards. ``described`` is the number of
    shards that the index did not describe before. ``colors`` counts the images
    (:class:`ColorCounts`).
    """

    index: str
    shards: int
    samples: int
    bytes: int
    colors: dict[str, Any]
    damaged: list[DamageDocument]
    unusable: dict[str, UnusableDocument]
    described: int
    up_to_date: bool


@contextmanager
def progress_bar() -> Iterator[Callable[[WorkProgress], None]]:
    """Yield a function that updates a progress bar; it does nothing if stderr is no terminal."""
    if not sys.stderr.isatty():
        yield lambda progress: None
        return
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.completed:.0f}/{task.total:.0f}"),
        TextColumn("{task.fields[rate]}"),
        TextColumn("rejected {task.fields[rejected]}"),
        TimeRemainingColumn(),
        console=stderr_console(),
        transient=True,
    )
    with bar:
        task = bar.add_task("", total=None, start=True, rate="", rejected=0, visible=False)

        def update(progress: WorkProgress) -> None:
            seconds = bar.tasks[0].elapsed or 1e-9
            images, megabytes = progress.done / seconds, progress.bytes / seconds / 1e6
            bar.update(
                task,
                description=progress.label,
                completed=progress.done,
                total=progress.total,
                rate=f"{images:,.0f} images/s  {megabytes:,.0f} MB/s",
                rejected=progress.rejected,
                visible=True,
            )

        yield update


def print_pack_summary(result: PackResult, *, list_rejected: bool = False) -> None:
    """Print on standard error what was packed and rejected, and advice.

    ``list_rejected`` adds a line for each rejected input.
    """
    print_lines(pack_summary(result))
    if list_rejected:
        print_lines(
            f"rejected: {item.source}: {item.reason}: {item.detail}"
            for item in result.index.rejected()
        )


def pack_summary(result: PackResult) -> list[str]:
    """Return the lines of the summary of a pack."""
    index = result.index
    lines = [_describe_pack(result)]
    if result.rejected_by_reason:
        lines.append(describe_rejected(result.index.rejected(), result.index_path))
    if result.filtered:
        lines.append(describe_filtered(result.filtered))
    lines += describe_colors(index.header, ColorPolicy(*_color_options(index.header)))
    lines += describe_skipped(result.skipped)
    if result.appended is not None:
        lines += describe_comparison(result.appended.comparison)
    largest = int(index.bytes.max())
    if len(index) > 1 and largest < FASTFILE_BYTES:
        lines.append(
            f"warning: shards of {largest / 1e6:,.1f} MB are small for FastFile; use a "
            "--shard-size of 150 MB or more"
        )
    return lines


def describe_colors(header: IndexHeader, policy: ColorPolicy | None = None) -> list[str]:
    """Return the lines on the colors of images; none if all are in sRGB.

    With ``policy``, they say what training would see differently from people under it.
    """
    counts = ColorCounts.of(header.colors)
    lines = [] if counts.is_usual else [f"colors: {counts.describe()}"]
    if policy is not None:
        lines += [f"warning: {found}; {fix}" for _, found, fix in counts.distortions(policy)]
    return lines


def _color_options(header: IndexHeader) -> tuple[Any, ...]:
    """Return the color policy of a pack."""
    return tuple(header.options.get(name, value) for name, value in vars(UNRECORDED_COLOR).items())


def _describe_pack(result: PackResult) -> str:
    header, appended = result.index.header, result.appended
    samples, shards = plural(header.samples, "sample"), plural(header.shards, "shard")
    where = f"({header.bytes / 1e6:,.1f} MB) in {result.shards_path}"
    if appended is None:
        verb = "already packed" if result.up_to_date else "packed"
        return f"{verb} {samples} into {shards} {where}"
    if result.up_to_date:
        return f"nothing to append: {samples} in {shards} {where}"
    return (
        f"appended {plural(appended.samples, 'sample')} in {plural(appended.shards, 'shard')}: "
        f"now {samples} in {shards} {where}"
    )


def describe_comparison(comparison: Comparison) -> list[str]:
    """Return the lines on packed images that differ from those of the source."""
    lines = []
    if count := comparison.changed:
        first = ", ".join(comparison.first_changed)
        more = ", …" if count > len(comparison.first_changed) else ""
        lines.append(
            f"error: {plural(count, 'image')} not packed, because another size, caption or column "
            f"is packed under the same name: {first}{more}; rename them to append them"
        )
    if comparison.missing:
        pronoun = "it" if comparison.missing == 1 else "them"
        lines.append(
            f"{plural(comparison.missing, 'packed image')} not in the source: "
            f"the pack keeps {pronoun}"
        )
    return lines


def describe_filtered(count: int) -> str:
    """Return one line: the number of rows that do not fulfil the condition."""
    return f"filtered {plural(count, 'row')} by --where"


def describe_rejected(rejected: Iterable[RejectedInput], all_in: str | None = None) -> str:
    """Return one line: the number of rejected inputs by reason, with the first of each.

    ``all_in`` is the index that lists all of them.
    """
    counts: Counter[str] = Counter()
    named: dict[str, list[str]] = {}
    for item in rejected:
        counts[item.reason] += 1
        if counts[item.reason] <= _MAX_NAMED_INPUTS:
            named.setdefault(item.reason, []).append(item.source)
    parts = []
    for reason, sources in named.items():
        more = ", …" if counts[reason] > len(sources) else ""
        parts.append(f"{counts[reason]:,} {reason} ({', '.join(sources)}{more})")
    is_cut = any(count > _MAX_NAMED_INPUTS for count in counts.values())
    where = f"; -v lists all, as does {all_in}" if is_cut and all_in else ""
    return f"rejected {counts.total():,}: {', '.join(parts)}{where}"


def pack_document(result: PackResult) -> PackDocument:
    """Return the document that ``pack --json`` prints."""
    return {
        "shards": result.shards,
        "samples": result.samples,
        "bytes": result.bytes,
        "rejected": result.rejected_by_reason,
        "skipped": skipped_document(result.skipped),
        "filtered": result.filtered,
        "appended": _appended_document(result.appended),
        "colors": asdict(ColorCounts.of(result.index.header.colors)),
        "index": result.index_path,
        "shards_path": result.shards_path,
    }


def skipped_document(skipped: Mapping[str, SkippedKind]) -> dict[str, SkippedDocument]:
    """Return the files that are not packed, by kind."""
    return {kind: {"count": files.count, "first": files.first} for kind, files in skipped.items()}


def _appended_document(appended: Appended | None) -> AppendedDocument | None:
    if appended is None:
        return None
    comparison = appended.comparison
    return {
        "samples": appended.samples,
        "shards": appended.shards,
        "changed": {"count": comparison.changed, "first": comparison.first_changed},
        "missing": comparison.missing,
    }


def print_index_summary(result: IndexResult, policy: ColorPolicy) -> None:
    """Print on standard error what was indexed, and what is damaged or not seen as people do.

    ``policy`` is that of the training.
    """
    header = result.header
    verb = "is up to date" if result.up_to_date else "written"
    lines = [
        f"{result.location} {verb}: {header.samples:,} samples in {header.shards:,} shards "
        f"({header.bytes / 1e6:,.1f} MB)"
        + (f", of which {result.described:,} were read" if result.known else ""),
        *describe_colors(header, policy),
    ]
    lines += [
        f"damaged: {item.source}: {item.detail}" for item in result.damage[:_MAX_NAMED_DAMAGE]
    ]
    if len(result.damage) > _MAX_NAMED_DAMAGE:
        lines.append(f"… {len(result.damage):,} damaged regions in total, listed in the index")
    lines += [
        f"error: {samples.count:,} {_UNUSABLE[reason].format(s='' if samples.count == 1 else 's')}"
        f": {', '.join(samples.first)}{', …' if samples.count > len(samples.first) else ''}; "
        f"{_UNUSABLE_FIXES[reason]}"
        for reason, samples in result.unusable.items()
    ]
    print_lines(lines)


def index_document(result: IndexResult) -> IndexDocument:
    """Return the document that ``index --json`` prints."""
    return {
        "index": result.location,
        "shards": result.header.shards,
        "samples": result.header.samples,
        "bytes": result.header.bytes,
        "colors": asdict(ColorCounts.of(result.header.colors)),
        "damaged": [{"shard": item.source, "detail": item.detail} for item in result.damage],
        "unusable": {
            reason: {"count": samples.count, "first": samples.first}
            for reason, samples in result.unusable.items()
        },
        "described": result.described,
        "up_to_date": result.up_to_date,
    }


_UNUSABLE = {
    "no-image": "sample{s} without an image",
    "image-unreadable": "image{s} whose header cannot be read",
    "no-caption": "sample{s} without a caption",
    "dotted-name": "image{s} with a dot in the name",
    "separated": "part{s} of samples whose files do not follow each other",
    "repeated-file": "file{s} that the sample has already",
    "hard-link": "link{s} in place of a file",
    "compressed": "compressed shard{s}",
    "sparse": "file{s} that tar stored without their zeros",
}
_UNUSABLE_FIXES = {
    "no-image": "name the image's extension in data.image_key and pass --for RUN",
    "image-unreadable": "training skips them up to data.max_bad_fraction; `sm-train pack` leaves "
    "them out",
    "no-caption": "name the caption's extension or JSON field in data.caption and pass --for RUN",
    "dotted-name": "a sample's key ends at the first dot: rename the files, or run `sm-train pack`",
    "separated": "write the shards with sorted names: tar --sort=name",
    "repeated-file": "training reads the first one: write each file once, under a name of its own",
    "hard-link": "store the files themselves: tar --hard-dereference, with -h for symbolic links",
    "compressed": "decompress them, as with gunzip",
    "sparse": "write the shards without tar's --sparse",
}


def print_lines(lines: Iterable[str]) -> None:
    """Print lines on standard error, as they are."""
    console = stderr_console(shows_results=True)
    for line in lines:
        # Paths may contain brackets, which must not be read as markup.
        console.print(line, markup=False, soft_wrap=True)
