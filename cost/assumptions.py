"""What is taken for granted where nothing was measured, each with its source."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace

from sm_train.cost.failures import observed_rate

LLAMA_3_RATE = 419 / (16384 * 54 * 24)
"""419 unexpected interruptions in 54 days on 16,384 GPUs (The Llama 3 Herd of Models, 2024)."""

SPOT_RATE_PER_INSTANCE_HOUR = 0.20 / (30 * 24)
"""One instance in five reclaimed in a month: the Spot Instance advisor's band ">20%" begins there
(assumed for training instances)."""


@dataclass(frozen=True)
class Assumptions:
    """Figures of the model that no stage carries.

    ``sources`` maps a field to where its value is from, for those that are no default.

    Raises:
        ValueError: a figure is negative or not finite; the message names it.
    """

    start_up_seconds: float = 600.0
    """Billed from the image's download to the first step."""
    restart_seconds: float = 900.0
    """Noticing a failure, replacing a machine, starting again: billed, without progress."""
    checkpoint_blocking_seconds: float | None = None
    """Training stands still for each checkpoint; None takes its bytes at the next figure."""
    checkpoint_bytes_per_second: float = 0.51e9
    """Accelerate's save_state to a local disk wrote 2.6 GB in 5.1 s (measured, 2026-11)."""
    evaluation_seconds: float = 0.0
    """Evaluation in each stage; none unless it is stated."""
    checkpoint_every: float = 1000.0
    """Iterations between checkpoints of a stage that states none: the run file's default."""
    failures_per_gpu_hour: float = LLAMA_3_RATE
    start_up_spread: float = 2.0
    """P90 of the start-up against its median; P10 is as far below."""
    failure_spread: float = 3.0
    """P90 of the failure rate against its median; P10 is as far below."""
    bytes_per_image: float = 250_000.0
    """A stored image with its caption, as FastFile streams it."""
    bytes_per_request: float = 8 * 2**20
    """FastFile's ranged GET; its size is not published."""
    log_bytes_per_step: float = 50.0
    """Event and log lines, spread over all steps."""
    sources: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in figure_names():
            value = getattr(self, name)
            least = 1 if name in _AT_LEAST_ONE else 0
            if value is not None and not (least <= value < math.inf):
                raise ValueError(f"{name}: {value} must be a number of at least {least}")

    def assuming(self, **values: float) -> Assumptions:
        """The same with other figures, which are marked as given."""
        sources = {**self.sources, **dict.fromkeys(values, "given")}
        return replace(self, **values, sources=sources)

    def source(self, name: str) -> str:
        """Where the figure called ``name`` is from, in brackets' words."""
        default = "The Llama 3 Herd of Models, 2024" if name == "failures_per_gpu_hour" else None
        return self.sources.get(name, default or "assumed")


_AT_LEAST_ONE = (
    "checkpoint_every checkpoint_bytes_per_second bytes_per_request start_up_spread failure_spread"
).split()


def figure_names() -> tuple[str, ...]:
    """The figures that can be given."""
    return tuple(one.name for one in fields(Assumptions) if one.name != "sources")


@dataclass(frozen=True)
class Observed:
    """What a run's own jobs showed; None was not observed."""

    jobs: int
    gpu_hours: float
    failures: int
    start_up_seconds: float | None = None
    restart_seconds: float | None = None
    checkpoint_blocking_seconds: float | None = None


def learned(assumed: Assumptions, observed: Observed) -> Assumptions:
    """``assumed`` with what was observed in its place.

    Failures move the rate by :func:`~sm_train.cost.failures.observed_rate`; what was given stays.
    """
    source = f"measured over {observed.jobs} job{'s' * (observed.jobs != 1)} of this run"
    figures: dict[str, float | None] = {
        "start_up_seconds": observed.start_up_seconds,
        "restart_seconds": observed.restart_seconds,
        "checkpoint_blocking_seconds": observed.checkpoint_blocking_seconds,
    }
    if observed.gpu_hours:
        figures["failures_per_gpu_hour"] = observed_rate(
            observed.failures, observed.gpu_hours, LLAMA_3_RATE
        )
    known = {
        name: value
        for name, value in figures.items()
        if value is not None and assumed.sources.get(name) != "given"
    }
    sources = {**assumed.sources, **dict.fromkeys(known, source)}
    return replace(assumed, **known, sources=sources)
