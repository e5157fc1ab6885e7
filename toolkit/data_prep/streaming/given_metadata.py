"""Writes the captions and columns of a table next to the images that a stream packs.

A file that an image has already is kept, so a caption of its author stays, and the same command can
be repeated.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal

from sm_train.entrypoints.data_prep.packing.plan import CAPTION_SUFFIXES, PackInput, next_to
from sm_train.entrypoints.data_prep.streaming.arrivals import is_image
from sm_train.entrypoints.data_prep.streaming.companions import (
    SIDECAR_SUFFIX,
    DeclaredColumns,
    NotYetError,
)
from sm_train.entrypoints.data_prep.streaming.stream_state import S3_REQUESTS
from sm_train.entrypoints.data_prep.work.work_stages import in_groups
from sm_train.entrypoints.data_prep.work.worker_pool import WorkProgress
from sm_train.entrypoints.storage.store import S3Access, open_store
from sm_train.toolkit.aws.aws_errors import translate_aws_errors
from sm_train.toolkit.aws.s3 import split_uri
from sm_train.toolkit.base.errors import UserError
from sm_train.toolkit.data_prep.packing.table_files import find_tables, no_table
from sm_train.toolkit.data_prep.packing.table_preview import preview_tables
from sm_train.toolkit.data_prep.packing.tables import TableOptions

_CAPTION_COLUMN = TableOptions.caption_columns[0]

OPTION = "--captions"

Outcome = Literal["caption", "file of columns", "kept"]
"""What was written, or that there was such a file already."""


@dataclass(frozen=True)
class MetadataTable:
    """A table of images and its columns of images and captions, as `stream --captions` names them.

    Without ``caption_columns``, that is the column ``caption`` if the table has it.
    """

    location: str
    image_column: str = TableOptions.image_column
    caption_columns: tuple[str, ...] = ()

    def options(
        self, declared: DeclaredColumns, access: S3Access
    ) -> tuple[TableOptions, tuple[str, ...]]:
        """Return which columns of the table are read: captions, and those that are ``declared``.

        Also return those of them that the stack takes from tags.

        Raises:
            UserError: there is no such table, or it lacks some of the columns.
        """
        with TemporaryDirectory(prefix="sm-train-table-") as folder:
            tables = find_tables(self.location, access, Path(folder))
            if not tables:
                raise UserError(f"{OPTION}: {no_table(self.location)}")
            names = [column.name for column in preview_tables(tables)]
        captions = self.caption_columns or tuple({_CAPTION_COLUMN} & {*names})
        is_sidecar = declared.origin == "sidecar"
        keep = [name for name in declared.types if name in names and is_sidecar]
        lacking = [name for name in declared.types if name not in names]
        if keep and lacking:
            raise UserError(
                f"{OPTION}: {self.location}: has {keep[0]} but not {lacking[0]}, which the stack "
                "declares, too; add the column"
            )
        if not keep and not captions:
            wanted = [_CAPTION_COLUMN, *(declared.types if is_sidecar else ())]
            raise UserError(
                f"{OPTION}: {self.location}: has no column {' and no column '.join(wanted)}; it "
                f"has {', '.join(names)}; name the captions with --caption-column"
            )
        unused = () if is_sidecar else tuple(name for name in declared.types if name in names)
        return TableOptions(self.image_column, captions, tuple(keep)), unused


@dataclass(frozen=True)
class GivenImages:
    """The images of a table, as they were planned, which must be below ``root``."""

    planned: Iterable[PackInput]
    root: str
    declared: DeclaredColumns
    access: S3Access

    def absent(self) -> list[str]:
        """Return the images that are no objects of the kinds that a stream packs.

        Require that all are below the root, and that their files can be written.

        Raises:
            UserError: a column has another type than the declared one, a caption is not UTF-8, or
                two rows give a file different contents.
        """
        absent = []
        for _, group in groupby(self.planned, _name_start):
            files: dict[str, tuple[bytes, str]] = {}
            for item in group:
                if not _is_present(item):
                    absent.append(item.address)
                if not item.address.startswith(self.root):
                    raise UserError(f"{OPTION}: {item.address}: is not below {self.root}")
                for address, content in self._files(item).items():
                    other, owner = files.setdefault(address, (content, item.address))
                    if other != content:
                        both = f"{owner} and {item.address}" if owner != item.address else owner
                        raise UserError(
                            f"{OPTION}: {both}: two rows give {address} different contents; keep "
                            "one of them"
                        )
        return absent

    def _files(self, item: PackInput) -> dict[str, bytes]:
        """Return what is written next to an image, by address.

        Raises:
            UserError: it cannot be written.
        """
        files = {}
        if item.caption is not None and item.caption.strip():
            try:
                files[next_to(item.address)] = item.caption.encode()
            except UnicodeEncodeError:
                raise UserError(f"{OPTION}: {item.address}: the caption is not UTF-8") from None
        document = {} if item.table_fields is None else json.loads(item.table_fields)
        if columns := document.get("columns", {}):
            try:
                cells = self.declared.cells(columns, item.address)
            except NotYetError as error:
                raise UserError(f"{OPTION}: {error}, as the stack declares it") from None
            content = json.dumps(cells, ensure_ascii=False).encode()
            files[next_to(item.address, SIDECAR_SUFFIX)] = content
        return files

    def write(self, item: PackInput) -> list[Outcome]:
        """Write what an image lacks; return what became of each of its files."""
        return [self._write(*file, item.address) for file in self._files(item).items()]

    def _write(self, address: str, content: bytes, image: str) -> Outcome:
        store = open_store(self.access)
        is_caption = not address.endswith(SIDECAR_SUFFIX)
        for suffix in CAPTION_SUFFIXES[1:] if is_caption else ():
            if store.head(*split_uri(next_to(image, suffix))) is not None:
                return "kept"
        if store.put_if(*split_uri(address), content, etag=None) is None:
            return "kept"
        return "caption" if is_caption else "file of columns"

    def present(self) -> Iterator[PackInput]:
        """Yield the images that are objects of these kinds."""
        return filter(_is_present, self.planned)


def _is_present(item: PackInput) -> bool:
    return item.bytes > 0 and is_image(item.address)


def _name_start(item: PackInput) -> str:
    """Return what the names of images have in common that share a file, up to the first dot.

    Images are sorted by name, so those with the same start follow each other.
    """
    folder, slash, name = item.address.rpartition("/")
    return folder + slash + name.partition(".")[0]


@dataclass
class WrittenFiles:
    """What became of the files next to ``images``: how many of each :data:`Outcome`."""

    images: int = 0
    counts: Counter[Outcome] = field(default_factory=Counter)


def write_given(
    given: GivenImages, total: int, on_progress: Callable[[WorkProgress], None]
) -> WrittenFiles:
    """Write what the images of a table lack, of ``total``.

    Raises:
        UserError: access is denied.
    """
    written = WrittenFiles()
    with translate_aws_errors(given.root), ThreadPoolExecutor(S3_REQUESTS) as pool:
        for group in in_groups(given.present(), S3_REQUESTS * 8):
            for outcomes in pool.map(given.write, group):
                written.counts.update(outcomes)
            written.images += len(group)
            done = WorkProgress(written.images, total, 0, 0, "writing captions and columns")
            on_progress(done)
    return written
