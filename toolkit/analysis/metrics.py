"""The result of ``Job.metrics()``: one row for each logged step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sm_train.toolkit.analysis.review.build import find_sources
from sm_train.toolkit.analysis.review.log_parser import parse_log
from sm_train.toolkit.report_html.notebook import data_frame, html_table
from sm_train.toolkit.terminal.formatting import format_number

if TYPE_CHECKING:
    import pandas as pd

_SHOWN = ("step", "loss", "learning_rate", "steps_per_second", "images_per_second", "mfu")
_SHOWN_ROWS = 10


@dataclass(frozen=True, repr=False)
class Metrics:
    """The metrics of the logged steps, oldest first.

    ``rows`` are mappings with ``job`` (the job's name, or the folder of a local stage), ``time``
    (Unix seconds), ``step``, ``loss``, ``learning_rate``, ``gradient_norm``, ``steps_per_second``,
    ``images_per_second``, ``data_wait_share`` and ``mfu`` (shares of 1). A value that was not
    logged is None.
    """

    rows: tuple[Mapping[str, Any], ...]

    @property
    def last(self) -> Mapping[str, Any] | None:
        """The newest row; None without any."""
        return self.rows[-1] if self.rows else None

    def column(self, name: str) -> tuple[Any, ...]:
        """Return the values of one metric, such as ``"loss"``."""
        return tuple(row[name] for row in self.rows)

    def to_frame(self) -> pd.DataFrame:
        """Return a data frame with one row for each logged step.

        Raises:
            Error: pandas is not installed (the extra ``notebook``).
        """
        return data_frame(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    def __repr__(self) -> str:
        if self.last is None:
            return "Metrics(no step logged)"
        return f"Metrics({len(self)} rows, step {self.last['step']:,.0f})"

    def _repr_html_(self) -> str:
        rows = [
            ["" if row[name] is None else format_number(row[name]) for name in _SHOWN]
            for row in self.rows[-_SHOWN_ROWS:]
        ]
        return html_table(_SHOWN, rows, caption=repr(self))


def read_metrics(target: str, *, region: str | None, profile: str | None) -> Metrics:
    """Read the metrics of a run, a job, a local run or saved logs.

    Raises:
        UserError: the target does not exist, or AWS rejects a request.
    """
    sources, _ = find_sources([target], region=region, profile=profile, config=None)
    rows = [
        {"job": source.name, **row}
        for source in sources
        for row in _rows(parse_log(source.blocks()).steps)
    ]
    return Metrics(tuple(sorted(rows, key=lambda row: row["time"])))


def _rows(table: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    columns = [column.tolist() for column in table.values()]
    for values in zip(*columns, strict=True):
        row = dict(zip(table, values, strict=True))
        known = {name: None if value != value else value for name, value in row.items()}
        yield known | {"step": int(row["step"])}
