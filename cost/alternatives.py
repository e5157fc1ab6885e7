"""Other clusters for the same run: cost, duration and Pareto-optimal choices."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from typing import Any

from sm_train.cost.assumptions import Assumptions
from sm_train.cost.estimate import Purchase, estimate, hourly_price, stage_cost, total_money
from sm_train.cost.instances import InstanceType, instance_types
from sm_train.cost.prices import ON_DEMAND, SAVINGS_PLANS, Price, PriceTable
from sm_train.cost.speed import Speed
from sm_train.cost.stage import CostStage
from sm_train.cost.throughput import Measurement, resolve_speed

MOST_INSTANCES = 64
_LARGEST_BATCH = 2**16
USABLE_MEMORY = 0.9
"""Share of a GPU's memory that a plan may use; the rest is for the CUDA context, NCCL buffers and
fragmentation (assumed)."""

_GIB = 2**30


@dataclass(frozen=True)
class MemoryNeed:
    """Bytes on one GPU: ``fixed`` for any batch, and ``activations`` of a batch.

    ``fixed`` takes the world size and the GPUs per node, which sharding divides by.
    ``activations`` must not decrease with the number of images.
    """

    fixed: Callable[[int, int], float]
    activations: Callable[[int], float]

    def largest_batch(self, memory_gib: float, world_size: int, per_node: int) -> int:
        """Return the largest micro-batch that fits on a GPU; 0 if not even one image fits."""
        free = memory_gib * _GIB * USABLE_MEMORY - self.fixed(world_size, per_node)
        return bisect_right(range(1, _LARGEST_BATCH + 1), free, key=self.activations)


@dataclass(frozen=True)
class Alternative:
    """One cluster for the whole run; None is unknown.

    ``fits`` states whether one image fits on a GPU. ``batches`` are the effective batch sizes of
    the stages, which differ slightly from the run's if the GPUs do not divide them.
    """

    instance_type: str
    instances: int
    capacity: str
    kind: str
    seconds: float
    cost: Decimal | None
    fits: bool | None
    batches: tuple[int | None, ...]
    bases: tuple[str, ...]
    stages: tuple[CostStage, ...]
    pareto: bool = False

    def as_dict(self) -> dict[str, Any]:
        return {
            "instance_type": self.instance_type,
            "instances": self.instances,
            "capacity": self.capacity,
            "purchase": self.kind,
            "wall_seconds": self.seconds,
            "cost_usd": None if self.cost is None else float(self.cost),
            "fits_memory": self.fits,
            "effective_batch_sizes": list(self.batches),
            "throughput_basis": list(self.bases),
            "pareto": self.pareto,
        }


@dataclass(frozen=True)
class Limits:
    """Limits on an alternative's expected duration and cost; None is no limit."""

    deadline_seconds: float | None = None
    budget_usd: Decimal | None = None

    def hold(self, one: Alternative) -> bool:
        """Return whether ``one`` is within the limits; an unknown cost is within no budget."""
        if self.deadline_seconds is not None and one.seconds > self.deadline_seconds:
            return False
        return self.budget_usd is None or (one.cost is not None and one.cost <= self.budget_usd)


@dataclass(frozen=True)
class SearchInputs:
    """The inputs of a search: the run's stages and what is known about them."""

    stages: tuple[CostStage, ...]
    memory: Mapping[str, MemoryNeed]
    measurements: tuple[Measurement, ...]
    region: str
    assumed: Assumptions
    prices: PriceTable


def alternatives(inputs: SearchInputs, counts: Sequence[int] = ()) -> list[Alternative]:
    """Return every GPU instance type × instance count × purchase option that can run all stages.

    One cluster runs every stage. Types without a measured or predicted speed are skipped, and so
    are types on which a stage's model does not fit.
    """
    candidates: list[Alternative] = []
    for candidate in instance_types():
        if not candidate.trains:
            continue
        options = list(_purchase_options(candidate, inputs))
        for instances in counts or range(1, MOST_INSTANCES + 1):
            candidates += _on_cluster(candidate, instances, options, inputs)
    return candidates


def choose(candidates: Iterable[Alternative], limits: Limits) -> list[Alternative]:
    """Return the alternatives within ``limits``, cheapest first, with Pareto-optimal ones marked.

    An alternative is Pareto-optimal if no other is both cheaper (or as cheap) and faster.
    """
    kept = sorted(
        (one for one in candidates if limits.hold(one)),
        key=lambda one: (one.cost is None, one.cost or 0, one.seconds),
    )
    chosen, fastest = [], float("inf")
    for one in kept:
        best = one.cost is not None and one.seconds < fastest
        fastest = one.seconds if best else fastest
        chosen.append(replace(one, pareto=best))
    return chosen


def with_range(one: Alternative, inputs: SearchInputs) -> tuple[Decimal | None, Decimal | None]:
    """Return P10 and P90 of an alternative's dollars."""
    purchase = Purchase(inputs.region, one.capacity, one.kind)
    priced = estimate(one.stages, purchase, assumed=inputs.assumed, prices=inputs.prices)
    return priced.low, priced.high


def _purchase_options(
    candidate: InstanceType, inputs: SearchInputs
) -> Iterator[tuple[Purchase, Price]]:
    """Return a type's purchase options: on-demand, spot and Savings Plans of known price."""
    for capacity, kind in (
        ("on-demand", ON_DEMAND),
        ("spot", ON_DEMAND),
        *(("on-demand", kind) for kind in SAVINGS_PLANS),
    ):
        purchase = Purchase(inputs.region, capacity, kind)
        price = hourly_price(candidate.name, purchase, inputs.prices)
        if (capacity, kind) == ("on-demand", ON_DEMAND) or price.usd_per_instance_hour is not None:
            yield purchase, price


def _on_cluster(
    candidate: InstanceType,
    instances: int,
    options: Sequence[tuple[Purchase, Price]],
    inputs: SearchInputs,
) -> Iterator[Alternative]:
    stages = [_on_instances(stage, candidate, instances, inputs) for stage in inputs.stages]
    known = [stage for stage in stages if stage is not None and stage.speed is not None]
    if len(known) < len(stages):
        return
    fits = all(stage.name in inputs.memory for stage in known) or None
    batches = tuple(stage.effective_batch_size for stage in known)
    bases = tuple(_basis(stage.speed) for stage in known)
    for purchase, price in options:
        priced = [stage_cost(stage, price, purchase, inputs.assumed) for stage in known]
        yield Alternative(
            instance_type=candidate.name,
            instances=instances,
            capacity=purchase.capacity,
            kind=purchase.kind,
            seconds=sum(seconds or 0.0 for seconds, _ in priced),
            cost=total_money([cost for _, cost in priced]),
            fits=fits,
            batches=batches,
            bases=bases,
            stages=tuple(known),
        )


def _on_instances(
    stage: CostStage, candidate: InstanceType, instances: int, inputs: SearchInputs
) -> CostStage | None:
    """Return ``stage`` on another cluster at about the same batch size; None if it cannot run."""
    world = instances * candidate.accelerators
    wanted = stage.effective_batch_size
    if wanted is None or world > wanted:
        return None
    each = max(1, round(wanted / world))
    most = stage.per_device_batch_size or each
    need = inputs.memory.get(stage.name)
    if need is not None:
        if candidate.accelerator_memory_gib is None:
            return None
        most = need.largest_batch(candidate.accelerator_memory_gib, world, candidate.accelerators)
        if not most:
            return None
    micro = next(size for size in range(min(each, most), 0, -1) if each % size == 0)
    relocated = replace(
        stage,
        instance_type=candidate.name,
        instances=instances,
        per_device_batch_size=micro,
        gradient_accumulation_steps=each // micro,
        speed=None,
    )
    return relocated.at(resolve_speed(relocated, inputs.measurements, rescale_batch=True))


def _basis(speed: Speed | None) -> str:
    return speed.basis if speed else "unknown"
