"""What a finished part says of itself: its new columns, and the images without them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from sm_train.entrypoints.base.stored_fields import (
    list_of,
    mapping_of,
    optional,
    record_of,
    size,
    text,
)
from sm_train.entrypoints.data_prep.enrichment.column_maker import EnrichedItem
from sm_train.entrypoints.sample_metadata.column_types import common_type, type_of

SUMMARY_KEY = b"sm-train"
"""Key of the summary in the metadata of a Parquet file of a table."""

_VECTOR = "vector"


@dataclass(frozen=True)
class ImageFailure:
    """An image without new columns, and the reason: a fixed code and its detail."""

    source: str
    reason: str
    detail: str


@dataclass
class PartSummary:
    """The number of ``images``, the new ``columns`` with their types, and the ``failures``.

    A column's type is null if it has no value.
    """

    images: int = 0
    columns: dict[str, str | None] = field(default_factory=dict)
    failures: list[ImageFailure] = field(default_factory=list)

    def add(self, item: EnrichedItem[Any], source: str) -> None:
        """Count an image, which is named ``source``."""
        self.images += 1
        if item.error is not None:
            self.failures.append(ImageFailure(source, item.error.reason, item.error.detail))
        for name, value in item.columns.items():
            self.columns[name] = _common(self.columns.get(name), _kind(value))

    def as_dict(self) -> dict[str, Any]:
        """Return the summary as JSON values."""
        return asdict(self)

    @classmethod
    def from_dict(cls, document: dict[str, Any]) -> PartSummary:
        """Return what :meth:`as_dict` has returned.

        Raises:
            ValueError: a field is missing, or has another type or range; the message names it.
        """
        return cls(**record_of(_SUMMARY_FIELDS)(document))


@dataclass(frozen=True)
class EnrichmentResult:
    """What an enrichment came to: the sum of its ``parts``.

    ``failed`` is the number of images without columns for each reason, the most frequent first.
    ``failures`` are the first of them.
    """

    images: int
    parts: int
    columns: dict[str, str | None]
    failed: dict[str, int]
    failures: list[ImageFailure]

    @classmethod
    def of(cls, summaries: Iterable[PartSummary], max_failures: int) -> EnrichmentResult:
        """Return the sum of the parts, with at most ``max_failures`` failures."""
        images = parts = 0
        columns: dict[str, str | None] = {}
        failed, failures = Counter[str](), list[ImageFailure]()
        for summary in summaries:
            images, parts = images + summary.images, parts + 1
            failed.update(failure.reason for failure in summary.failures)
            failures += summary.failures[: max_failures - len(failures)]
            for name, kind in summary.columns.items():
                columns[name] = _common(columns.get(name), kind)
        return cls(images, parts, columns, dict(failed.most_common()), failures)

    def plus(self, other: EnrichmentResult, max_failures: int) -> EnrichmentResult:
        """Return the sum of both."""
        failed = Counter(self.failed) + Counter(other.failed)
        columns = dict(self.columns)
        for name, kind in other.columns.items():
            columns[name] = _common(columns.get(name), kind)
        return EnrichmentResult(
            self.images + other.images,
            self.parts + other.parts,
            columns,
            dict(failed.most_common()),
            [*self.failures, *other.failures][:max_failures],
        )

    @classmethod
    def from_dict(cls, document: dict[str, Any]) -> EnrichmentResult:
        """Return the result in ``document``, which was read with :data:`RESULT_FIELDS`."""
        return cls(**{each.name: document[each.name] for each in fields(cls)})


def _failure(value: Any) -> ImageFailure:
    """Return the failure of a stored object; ValueError for another one."""
    return ImageFailure(**record_of({"source": text, "reason": text, "detail": text})(value))


_SUMMARY_FIELDS = {
    "images": size,
    "columns": mapping_of(optional(text)),
    "failures": list_of(_failure),
}
RESULT_FIELDS = _SUMMARY_FIELDS | {
    "parts": size,
    "failed": mapping_of(size),
    "code": list_of(text),
}
"""The fields of a stored result: those of :class:`EnrichmentResult`, and of the plan's code."""


def _kind(value: Any) -> str | None:
    return _VECTOR if isinstance(value, list) else type_of(value)


def _common(left: str | None, right: str | None) -> str | None:
    if left is None or right is None or left == right:
        return left or right
    if _VECTOR in (left, right):
        return "mixed"
    return common_type(left, right)  # type: ignore[arg-type]
