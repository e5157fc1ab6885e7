"""What a function of the user gets and returns when it makes columns for images."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    from PIL.Image import Image


@dataclass(frozen=True)
class EnrichmentBatch:
    """Images, and what is known of each of them.

    ``images`` are upright, without transparency, and in the colors of a
    :class:`ColorPolicy`: sRGB by default. ``rows`` are the columns of the table
    or of the sample's JSON file, with the caption as ``caption`` if there is one. ``names`` are the
    images' paths, addresses or keys. ``model`` is the folder that ``--model`` names. ``device`` is
    where this process may compute, ``"cuda"`` or ``"cpu"``.
    """

    images: list[Image]
    rows: list[dict[str, Any]]
    names: list[str]
    device: str
    model: Path | None

    def __len__(self) -> int:
        return len(self.images)


ColumnFunction: TypeAlias = Callable[[EnrichmentBatch], Mapping[str, Sequence[Any]]]
"""Returns columns by their names, each with a value for every image of the batch.

A value is a text, a number, a boolean, None, or a vector of numbers, as a list, an array or a
tensor.
"""


class EnrichmentError(ValueError):
    """The function gave no usable columns; the message is one line that names it."""


def call_function(
    function: ColumnFunction, name: str, batch: EnrichmentBatch
) -> dict[str, list[Any]]:
    """Return the columns that the function ``name`` makes for a batch, as JSON values.

    Raises:
        EnrichmentError: it raised an error or returned something else than columns.
    """
    try:
        result = function(batch)
    except Exception as error:
        detail = " ".join(f"{type(error).__name__}: {error}".split())
        frame = traceback.extract_tb(error.__traceback__)[-1]
        place = f"{Path(frame.filename).name}:{frame.lineno}"
        raise EnrichmentError(f"{name}: {batch.names[0]}: {place}: {detail}") from error
    if not isinstance(result, Mapping):
        kind = type(result).__name__
        raise EnrichmentError(f"{name}: returned {kind}; return a dict of columns")
    return {
        str(column): _column(name, str(column), values, len(batch))
        for column, values in result.items()
    }


def _column(function: str, column: str, values: Any, count: int) -> list[Any]:
    """Return a column with one value for each of ``count`` images.

    Raises:
        EnrichmentError: it has another length, or a value of another type.
    """
    if hasattr(values, "tolist"):  # an array or a tensor
        values = values.tolist()
    if isinstance(values, str | bytes) or not isinstance(values, Sequence):
        kind = type(values).__name__
        raise EnrichmentError(f"{function}: column {column} is {kind}; return a list of values")
    if len(values) != count:
        raise EnrichmentError(
            f"{function}: column {column} has {len(values)} values for {count} images"
        )
    return [_value(function, column, value) for value in values]


def _value(function: str, column: str, value: Any) -> Any:
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, float):
        return value if value == value and abs(value) != float("inf") else None
    if value is None or isinstance(value, bool | int | str):
        return value
    is_vector = isinstance(value, list | tuple)
    if is_vector and all(isinstance(number, int | float) for number in value):
        return [float(number) for number in value]
    kind = "a nested list" if is_vector else type(value).__name__
    raise EnrichmentError(
        f"{function}: column {column} holds {kind}; return texts, numbers, booleans or vectors"
    )
