"""Applies the user's function to images: decodes ahead in threads, and calls it with batches."""

from __future__ import annotations

import os
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from sm_train.entrypoints.data_prep.enrichment.enrichment_batch import (
    ColumnFunction,
    EnrichmentBatch,
    EnrichmentError,
    call_function,
)
from sm_train.entrypoints.data_prep.work.work_stages import in_groups
from sm_train.entrypoints.images.image_header import DecodeError
from sm_train.entrypoints.job_interface.job_config import ColorPolicy, Hdr, IccProfile
from sm_train.entrypoints.job_interface.user_function import load_user_function
from sm_train.entrypoints.sample_metadata.column_types import MadeBy

OPTION = "--with"

_BATCHES_AHEAD = 2
"""Batches that are decoded while the function computes."""

_Item = TypeVar("_Item")


@dataclass(frozen=True)
class LoadedImage:
    """A decoded image, uint8 (height, width, 3), its name and what is known of it."""

    name: str
    pixels: NDArray[np.uint8]
    row: dict[str, Any]


@dataclass(frozen=True)
class EnrichedItem(Generic[_Item]):
    """An item, what was known of it, and the columns that were made for it, or why there are none.

    Nothing is known of an item without columns.
    """

    item: _Item
    known: dict[str, Any]
    columns: dict[str, Any]
    error: DecodeError | None = None


@dataclass(frozen=True)
class ColumnMaker:
    """The user's ``function`` (``module:function``), and how it is called; can be pickled.

    Its module is below the folder ``code``, None if that is on Python's path. ``model`` is a folder
    that the function gets, and ``device`` is where it may compute. Images are scaled down to a
    longer side of ``max_side`` pixels; ``icc_profile`` and ``hdr`` are the :class:`ColorPolicy` of
    their colors. ``cores`` are those of a process.
    """

    function: str
    code: str | None
    model: str | None
    batch_size: int
    max_side: int
    icc_profile: IccProfile
    hdr: Hdr
    device: str = "cpu"
    cores: int = 1

    @property
    def color(self) -> ColorPolicy:
        """How stored colors become the RGB that the function gets."""
        return ColorPolicy(self.icc_profile, self.hdr)

    @property
    def origin(self) -> MadeBy:
        """What is recorded of a column that it makes."""
        return {"function": self.function, **vars(self.color)}

    def as_dict(self) -> dict[str, Any]:
        """Return what the columns depend on, without the places of code, model and computation."""
        places = ("code", "model", "device", "cores")
        return {name: value for name, value in asdict(self).items() if name not in places}

    def make_columns(
        self, items: Iterable[_Item], load: Callable[[_Item], LoadedImage], threads: int
    ) -> Iterator[list[EnrichedItem[_Item]]]:
        """Yield the items with their new columns in order, a batch at a time.

        ``load`` is called in ``threads`` threads. An item for which it raises a DecodeError has no
        new columns, and the function does not get it.

        Raises:
            EnrichmentError: the function failed.
        """
        function = _load_function(self.function, self.code, self.cores)
        groups = in_groups(items, self.batch_size)
        pending: deque[tuple[Sequence[_Item], list[Future[LoadedImage]]]] = deque()
        with ThreadPoolExecutor(threads) as pool:

            def start(group: Sequence[_Item]) -> None:
                pending.append((group, [pool.submit(load, item) for item in group]))

            try:
                for group in islice(groups, _BATCHES_AHEAD):
                    start(group)
                while pending:
                    ready, futures = pending.popleft()
                    loaded = [_result(future) for future in futures]
                    for group in islice(groups, 1):
                        start(group)
                    yield self._call(function, ready, loaded)
            finally:
                for _, futures in pending:
                    for future in futures:
                        future.cancel()

    def _call(
        self,
        function: ColumnFunction,
        items: Sequence[_Item],
        loaded: Sequence[LoadedImage | DecodeError],
    ) -> list[EnrichedItem[_Item]]:
        images = [image for image in loaded if isinstance(image, LoadedImage)]
        columns: dict[str, list[Any]] = {}
        if images:
            batch = EnrichmentBatch(
                [Image.fromarray(image.pixels) for image in images],
                [image.row for image in images],
                [image.name for image in images],
                self.device,
                None if self.model is None else Path(self.model),
            )
            columns = call_function(function, self.function, batch)
            self._require_new(columns, images)
        made = iter(range(len(images)))
        enriched = []
        for item, image in zip(items, loaded, strict=True):
            if isinstance(image, DecodeError):
                enriched.append(EnrichedItem(item, {}, {}, image))
            else:
                row = next(made)
                values = {name: column[row] for name, column in columns.items()}
                enriched.append(EnrichedItem(item, image.row, values))
        return enriched

    def _require_new(self, columns: dict[str, list[Any]], images: Sequence[LoadedImage]) -> None:
        """Require that no image has a column of these names.

        Raises:
            EnrichmentError: one has.
        """
        for image in images:
            for name in columns.keys() & image.row.keys():
                raise EnrichmentError(
                    f"{self.function}: column {name}: {image.name} has it already; return it under "
                    "another name"
                )


def _result(future: Future[LoadedImage]) -> LoadedImage | DecodeError:
    try:
        return future.result()
    except DecodeError as error:
        return error


@cache
def _load_function(name: str, code: str | None, cores: int) -> ColumnFunction:
    """Return the function, once in each process, whose module is imported from ``code``."""
    # What the module imports, such as PyTorch, would start a thread for each core of the machine.
    os.environ.setdefault("OMP_NUM_THREADS", str(cores))
    if code is not None:
        sys.path.insert(0, code)
    return load_user_function(OPTION, name)
