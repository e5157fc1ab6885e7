"""Parameters of the cost model that are assumed until they are measured, each with its source."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace

from sm_train.cost.failures import observed_rate
from sm_train.cost.quantity import Quantity

LLAMA_3_RATE = 419 / (16384 * 54 * 24)
"""419 unexpected interruptions in 54 days on 16,384 GPUs (The Llama 3 Herd of Models, 2024)."""

SPOT_RATE_PER_INSTANCE_HOUR = 0.20 / (30 * 24)
"""One instance in five reclaimed per month: where the Spot Instance advisor's band ">20%" begins
(assumed for training instances)."""


@dataclass(frozen=True)
class Assumptions:
    """Cost-model parameters that do not belong to a stage.

    ``sources`` maps a field to the source of its value, for values that are not the default.

    Raises:
        ValueError: a parameter is negative or not finite; the message names it.
    """

    start_up_seconds: float = 600.0
    """Billed seconds from the image download to the first step."""
    compile_seconds: float = 160.0
    """Compiling a network in its first steps, after each start: 29 to 162 s on an H200
    (benchmarks/gpu.py, 2026-11)."""
    restart_seconds: float = 900.0
    """Detecting a failure, replacing an instance and restarting: billed, without progress."""
    checkpoint_blocking_seconds: float | None = None
    """Seconds that each checkpoint pauses training; None derives them from the model's state."""
    checkpoint_bytes_per_second: float = 10e9
    """Each GPU's copy of its share of the state to host memory: 10 of PCIe 4.0's 32 GB/s
    (assumed)."""
    checkpoint_background_bytes_per_second: float = 0.5e9
    """Writing and uploading an instance's share in the background (assumed). A checkpoint that is
    not complete when the next one starts delays it."""
    upload_part_bytes: float = 8 * 2**20
    """Part of a multipart upload: s3transfer's default (assumed for SageMaker's uploads)."""
    evaluation_seconds: float = 0.0
    """Evaluation per stage; 0 unless it is stated."""
    checkpoint_every: float = 1000.0
    """Steps between checkpoints of a stage that states none: the run file's default."""
    failures_per_gpu_hour: float = LLAMA_3_RATE
    start_up_spread: float = 2.0
    """P90 ÷ median of the start-up time; the median ÷ P10 is the same."""
    failure_spread: float = 3.0
    """P90 ÷ median of the failure rate; the median ÷ P10 is the same."""
    bytes_per_image: float = 250_000.0
    """A stored image with its caption."""
    bytes_per_request: float = 8 * 2**20
    """A ranged GET of FastFile; its size is not published."""
    log_bytes_per_step: float = 50.0
    """Event and log lines, averaged over all steps."""
    sources: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in parameter_names():
            value = getattr(self, name)
            least = 1 if name in _AT_LEAST_ONE else 0
            if value is not None and not (least <= value < math.inf):
                raise ValueError(f"{name}: {value} must be a number of at least {least}")

    def assuming(self, **values: float) -> Assumptions:
        """Return a copy with other values, which are marked as given by the user."""
        sources = {**self.sources, **dict.fromkeys(values, "given")}
        return replace(self, **values, sources=sources)

    def quantity(self, name: str) -> Quantity:
        """Return the parameter ``name`` with its source."""
        return Quantity(getattr(self, name), name, source=self.source(name))

    def source(self, name: str) -> str:
        """Return the source of the parameter ``name``, as shown in parentheses."""
        default = "The Llama 3 Herd of Models, 2024" if name == "failures_per_gpu_hour" else None
        return self.sources.get(name, default or "assumed")


_AT_LEAST_ONE = (
    "checkpoint_every checkpoint_bytes_per_second checkpoint_background_bytes_per_second "
    "upload_part_bytes bytes_per_request start_up_spread failure_spread"
).split()


def parameter_names() -> tuple[str, ...]:
    """Return the names of the parameters that `--assume` accepts."""
    return tuple(
        assumption.name for assumption in fields(Assumptions) if assumption.name != "sources"
    )


@dataclass(frozen=True)
class Observed:
    """What a run's own jobs showed; None is not observed."""

    jobs: int
    gpu_hours: float
    failures: int
    start_up_seconds: float | None = None
    restart_seconds: float | None = None
    checkpoint_blocking_seconds: float | None = None
    compile_seconds: float | None = None


def learned(assumed: Assumptions, observed: Observed) -> Assumptions:
    """Return ``assumed`` updated with what was observed.

    The failure rate is updated by :func:`~sm_train.cost.failures.observed_rate`; parameters given
    by the user stay.
    """
    source = f"measured over {observed.jobs} job{'s' * (observed.jobs != 1)} of this run"
    figures: dict[str, float | None] = {
        "start_up_seconds": observed.start_up_seconds,
        "restart_seconds": observed.restart_seconds,
        "checkpoint_blocking_seconds": observed.checkpoint_blocking_seconds,
        "compile_seconds": observed.compile_seconds,
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
