"""The estimated cost of a run as a value: for the command ``cost`` and for ``Run.cost()``."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from sm_train.cost.estimate import Estimate
from sm_train.cost.speed import FIRM
from sm_train.toolkit.planning.estimate_inputs import EstimateInputs
from sm_train.toolkit.terminal.formatting import (
    format_days,
    format_duration,
    format_number,
    format_total_usd,
    format_usd,
    format_usd_range,
)

if TYPE_CHECKING:
    import pandas as pd
    from sm_train.toolkit.planning.run_price import StageLimit


@dataclass(frozen=True)
class StageCost:
    """The estimated cost of one stage. Unknown values are None.

    ``total``, ``low`` and ``high`` are dollars: the estimate, its P10 and its P90. ``seconds`` is
    the billed time of the cluster. ``is_measured`` is whether ``steps_per_second`` is stated in
    the run file or was measured on this very stage.
    """

    name: str
    resolution: int | None
    instance_type: str
    instances: int
    effective_batch_size: int | None
    max_steps: int
    steps_per_second: float | None
    is_measured: bool
    seconds: float | None
    total: float | None
    low: float | None
    high: float | None


@dataclass(frozen=True, repr=False)
class Cost:
    """The estimated cost of a run or of one stage, in dollars.

    ``estimate`` is the cost model's result, and ``document`` the document of ``cost --json``, with
    the assumptions, their sources, and the sensitivity to each. ``limits`` are what limits each
    stage; None is unknown.
    """

    estimate: Estimate = field(compare=False)
    document: dict[str, Any]
    limits: tuple[StageLimit | None, ...] = field(default=(), compare=False)

    @property
    def total(self) -> float | None:
        """The estimate in dollars; None if a price or a speed is unknown."""
        return self._total("cost_usd")

    @property
    def low(self) -> float | None:
        """P10 in dollars: one outcome in ten is cheaper."""
        return self._total("cost_low_usd")

    @property
    def high(self) -> float | None:
        """P90 in dollars: one outcome in ten is more expensive."""
        return self._total("cost_high_usd")

    @property
    def at_least(self) -> float:
        """Dollars of the stages and parts whose price is known."""
        value: float = self.document["total"]["cost_at_least_usd"]
        return value

    @property
    def seconds(self) -> float | None:
        """The time from the first stage's start to the last one's end, without pauses between."""
        return self._total("wall_seconds")

    @property
    def stages(self) -> tuple[StageCost, ...]:
        """The stages in order."""
        return tuple(
            StageCost(
                name=stage["name"],
                resolution=stage["resolution"],
                instance_type=stage["instance_type"],
                instances=stage["instances"],
                effective_batch_size=stage["effective_batch_size"],
                max_steps=stage["max_steps"],
                steps_per_second=stage["steps_per_second"],
                is_measured=stage["throughput_basis"] in FIRM,
                seconds=stage["billable_seconds"],
                total=stage["cost_usd"],
                low=stage["cost_low_usd"],
                high=stage["cost_high_usd"],
            )
            for stage in self.document["stages"]
        )

    @property
    def warnings(self) -> tuple[str, ...]:
        """Sentences about old or assumed prices and stages shorter than an epoch."""
        return tuple(self.document["warnings"])

    def to_frame(self) -> pd.DataFrame:
        """Return a data frame with one row for each stage and the fields of :class:`StageCost`.

        Raises:
            Error: pandas is not installed (the extra ``notebook``).
        """
        from sm_train.toolkit.report_html.notebook import data_frame

        return data_frame([asdict(stage) for stage in self.stages])

    def _total(self, key: str) -> float | None:
        value: float | None = self.document["total"][key]
        return value

    def __repr__(self) -> str:
        total = self.document["total"]
        spread = format_usd_range(total)
        return f"Cost({format_total_usd(total)}{f', P10 to P90 {spread}' if spread else ''})"

    def _repr_html_(self) -> str:
        from sm_train.toolkit.report_html.notebook import html_table

        total = self.document["total"]
        rows = [
            [
                stage["name"],
                f"{stage['instances']} × {stage['instance_type']}",
                ("" if stage["throughput_basis"] in FIRM else "~")
                + format_number(stage["steps_per_second"]),
                _format_time(stage["billable_seconds"]),
                format_usd(stage["cost_usd"]),
                format_usd_range(stage),
            ]
            for stage in self.document["stages"]
        ]
        rows.append(
            [
                "total",
                "",
                "",
                _format_time(total["wall_seconds"]),
                format_total_usd(total),
                format_usd_range(total),
            ]
        )
        estimated = any(not stage.is_measured for stage in self.stages)
        notes = ["~ estimated: not measured on this stage"] if estimated else []
        columns = ("stage", "cluster", "it/s", "time", "cost", "P10 to P90")
        return html_table(columns, rows, notes=[*notes, *self.warnings])


def _format_time(seconds: float | None) -> str:
    return format_days(None) if seconds is None else format_duration(seconds)


def price(inputs: EstimateInputs) -> Cost:
    """Estimate the cost of ``inputs``.

    Raises:
        ValueError: a figure is implausible.
    """
    estimate = inputs.estimate()
    limits = inputs.limits(estimate)
    return Cost(estimate, inputs.document(estimate, limits), limits)
