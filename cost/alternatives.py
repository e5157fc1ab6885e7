"""Other clusters for the same run: cost, duration and Pareto-optimal choices."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from typing import Any

from sm_train.cost.assumptions import Assumptions
from sm_train.cost.estimate import Purchase, estimate, hourly_price, stage_cost, total_money
from sm_train.cost.instances import USABLE_MEMORY, InstanceType, instance_types
from sm_train.cost.prices import ON_DEMAND, SAVINGS_PLANS, Price, PriceTable
from sm_train.cost.speed import Speed
from sm_train.cost.speed_model import TextEncoderPlacement
from sm_train.cost.stage import CostStage
from sm_train.cost.throughput import Measurement, resolve_speed

MOST_INSTANCES = 64
_LARGEST_BATCH = 2**16
_GIB = 2**30

_ABOUT_EQUAL = Decimal("1.01")
"""Costs within a percent count as equal."""


@dataclass(frozen=True)
class MemoryNeed:
    """Bytes on one GPU with one sharding strategy and placement of text encoders.

    ``fixed`` is for any batch; it takes the world size and the GPUs per node, which sharding
    divides by. ``activations`` are those of a batch; they must not decrease with the number of
    images. ``communication_units`` are FSDP's units or DDP's buckets.
    """

    sharding: str
    text_encoders: TextEncoderPlacement
    communication_units: int
    fixed: Callable[[int, int], float]
    activations: Callable[[int], float]

    def largest_batch(self, memory_gib: float, world_size: int, per_node: int) -> int:
        """Return the largest micro-batch that fits on a GPU; 0 if not even one image fits."""
        free = memory_gib * _GIB * USABLE_MEMORY - self.fixed(world_size, per_node)
        return bisect_right(range(1, _LARGEST_BATCH + 1), free, key=self.activations)


@dataclass(frozen=True)
class Alternative:
    """One cluster for the whole run; None is unknown.

    ``fits`` states whether the batch of each stage fits a GPU. ``batches`` are the effective batch
    sizes of the stages: those of the run. ``own`` marks the run's own cluster, as the run file
    states it.
    """

    instance_type: str
    instances: int
    capacity: str
    kind: str
    seconds: float
    longest_stage: float
    cost: Decimal | None
    fits: bool | None
    batches: tuple[int | None, ...]
    bases: tuple[str, ...]
    stages: tuple[CostStage, ...]
    pareto: bool = False
    own: bool = False

    def as_dict(self) -> dict[str, Any]:
        return {
            "instance_type": self.instance_type,
            "instances": self.instances,
            "stage_instances": [stage.instances for stage in self.stages],
            "capacity": self.capacity,
            "purchase": self.kind,
            "wall_seconds": self.seconds,
            "cost_usd": None if self.cost is None else float(self.cost),
            "fits_memory": self.fits,
            "effective_batch_sizes": list(self.batches),
            "throughput_basis": list(self.bases),
            "sharding": [stage.sharding for stage in self.stages],
            "pareto": self.pareto,
            "own_cluster": self.own,
        }


@dataclass(frozen=True)
class Limits:
    """Limits on an alternative's expected duration and cost; None is no limit.

    ``stage_seconds`` limits each stage: ``cluster.max_runtime`` stops its job.
    """

    deadline_seconds: float | None = None
    budget_usd: Decimal | None = None
    stage_seconds: float | None = None

    def hold(self, alternative: Alternative) -> bool:
        """Return whether it is within the limits; an unknown cost is within no budget."""
        if self.deadline_seconds is not None and alternative.seconds > self.deadline_seconds:
            return False
        if self.stage_seconds is not None and alternative.longest_stage > self.stage_seconds:
            return False
        return self.budget_usd is None or (
            alternative.cost is not None and alternative.cost <= self.budget_usd
        )


@dataclass(frozen=True)
class SearchInputs:
    """The inputs of a search: the run's stages and what is known about them.

    ``memory`` holds for each planned stage the ways in which its state may be distributed,
    preferred ones first.
    """

    stages: tuple[CostStage, ...]
    memory: Mapping[str, Sequence[MemoryNeed]]
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
        (candidate for candidate in candidates if limits.hold(candidate)),
        key=lambda candidate: (candidate.cost is None, candidate.cost or 0, candidate.seconds),
    )
    chosen, fastest = [], float("inf")
    for alternative in kept:
        best = alternative.cost is not None and alternative.seconds < fastest
        fastest = alternative.seconds if best else fastest
        chosen.append(replace(alternative, pareto=best))
    return chosen


def best_of_each_type(chosen: Iterable[Alternative]) -> list[Alternative]:
    """Return the cheapest alternative of each instance type, bought on demand.

    ``chosen`` are sorted by cost (:func:`choose`). Among clusters of a type that cost within a
    percent of the cheapest, the fastest counts.
    """
    best: dict[str, Alternative] = {}
    for alternative in chosen:
        if alternative.capacity != ON_DEMAND or alternative.kind != ON_DEMAND:
            continue
        leader = best.setdefault(alternative.instance_type, alternative)
        if (
            alternative.seconds < leader.seconds
            and alternative.cost is not None
            and leader.cost is not None
            and alternative.cost <= leader.cost * _ABOUT_EQUAL
        ):
            best[alternative.instance_type] = alternative
    return sorted(
        best.values(),
        key=lambda alternative: (
            alternative.cost is None,
            alternative.cost or 0,
            alternative.seconds,
        ),
    )


def own_cluster(inputs: SearchInputs) -> Alternative:
    """Return the run's own clusters, stage by stage as the run file states them."""
    purchase = Purchase(inputs.region)
    priced = estimate(inputs.stages, purchase, assumed=inputs.assumed, prices=inputs.prices)
    seconds = [stage.seconds.billable or 0.0 for stage in priced.stages]
    first = inputs.stages[0]
    return Alternative(
        instance_type=first.instance_type,
        instances=first.instances,
        capacity=ON_DEMAND,
        kind=ON_DEMAND,
        seconds=sum(seconds),
        longest_stage=max(seconds),
        cost=priced.cost,
        fits=_all_fit(inputs),
        batches=tuple(stage.effective_batch_size for stage in inputs.stages),
        bases=tuple(_basis(stage.speed) for stage in inputs.stages),
        stages=inputs.stages,
        own=True,
    )


def _all_fit(inputs: SearchInputs) -> bool | None:
    """Return whether each of the run's stages fits its own cluster; None if one is not planned."""
    largest = [_largest_batch(stage, inputs) for stage in inputs.stages]
    if None in largest:
        return None
    return all(
        most is not None and (stage.per_device_batch_size or 1) <= most
        for stage, most in zip(inputs.stages, largest, strict=True)
    )


def _largest_batch(stage: CostStage, inputs: SearchInputs) -> int | None:
    """Return the most images per pass of a stage as it is; None if its memory is not planned."""
    layout = (stage.sharding, stage.text_encoders)
    needs = inputs.memory.get(stage.name, ())
    need = next((need for need in needs if (need.sharding, need.text_encoders) == layout), None)
    memory = stage.instance.accelerator_memory_gib
    if need is None or memory is None:
        return None
    return need.largest_batch(memory, stage.world_size, stage.instance.accelerators)


@dataclass(frozen=True)
class BatchSplit:
    """A stage with its batch split otherwise: images per GPU and pass × passes per step.

    ``speedup`` is the speed model's, relative to the run file's split; ``difference`` is of the
    stage's cost.
    """

    stage: str
    images: int
    passes: int
    speedup: float
    difference: Decimal | None
    fits: bool
    is_own: bool

    def as_dict(self) -> dict[str, Any]:
        return {
            "stage": self.stage,
            "per_device_batch_size": self.images,
            "gradient_accumulation_steps": self.passes,
            "speedup": self.speedup,
            "difference_usd": None if self.difference is None else float(self.difference),
            "fits_memory": self.fits,
            "own": self.is_own,
        }


def batch_splits(inputs: SearchInputs) -> list[BatchSplit]:
    """Return the effect of batch size per GPU and accumulation at the same effective batch.

    The splits are the run file's, half and twice its batch per GPU. Stages whose speed the model
    cannot predict are skipped.
    """
    return [split for stage in inputs.stages for split in _splits(stage, inputs)]


def _splits(stage: CostStage, inputs: SearchInputs) -> Iterator[BatchSplit]:
    images, passes = stage.per_device_batch_size, stage.gradient_accumulation_steps
    before, most = stage.predicted_images_per_second, _largest_batch(stage, inputs)
    if images is None or before is None or most is None or stage.speed is None:
        return
    price = hourly_price(stage.instance_type, Purchase(inputs.region), inputs.prices)
    own = stage_cost(stage, price, Purchase(inputs.region), inputs.assumed)[1]
    for size in (images * 2, images, images // 2):
        if not size or (images * passes) % size:
            continue
        split = replace(
            stage,
            per_device_batch_size=size,
            gradient_accumulation_steps=images * passes // size,
            speed=None,
        )
        speedup = (split.predicted_images_per_second or before) / before
        try:
            moved = split.at(stage.speed.scaled(speedup))
        except ValueError:  # above the hardware's peak
            continue
        cost = stage_cost(moved, price, Purchase(inputs.region), inputs.assumed)[1]
        difference = None if cost is None or own is None else cost - own
        yield BatchSplit(
            stage.name,
            size,
            images * passes // size,
            speedup,
            difference,
            size <= most,
            is_own=size == images,
        )


def with_range(
    alternative: Alternative, inputs: SearchInputs
) -> tuple[Decimal | None, Decimal | None]:
    """Return P10 and P90 of an alternative's dollars."""
    purchase = Purchase(inputs.region, alternative.capacity, alternative.kind)
    priced = estimate(alternative.stages, purchase, assumed=inputs.assumed, prices=inputs.prices)
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
            longest_stage=max((seconds or 0.0 for seconds, _ in priced), default=0.0),
            cost=total_money([cost for _, cost in priced]),
            fits=fits,
            batches=batches,
            bases=bases,
            stages=tuple(known),
        )


def _on_instances(
    stage: CostStage, candidate: InstanceType, instances: int, inputs: SearchInputs
) -> CostStage | None:
    """Return ``stage`` on another cluster at the same batch size; None if it cannot run there."""
    world = instances * candidate.accelerators
    wanted = stage.effective_batch_size
    if wanted is None or wanted % world:
        return None
    moved = replace(stage, instance_type=candidate.name, instances=instances, speed=None)
    layouts = list(_layouts(moved, inputs.memory.get(stage.name), wanted // world))
    if not layouts:
        return None
    fastest = layouts[0]
    if len(layouts) > 1:
        fastest = max(layouts, key=lambda layout: layout.predicted_images_per_second or 0.0)
    return fastest.at(resolve_speed(fastest, inputs.measurements, rescale_batch=True))


def _layouts(
    stage: CostStage, needs: Sequence[MemoryNeed] | None, each: int
) -> Iterator[CostStage]:
    """Yield the ways in which ``stage`` fits its cluster with ``each`` images per GPU and step.

    They end with the first one that needs no smaller micro-batch than the run's.
    """
    most = min(each, stage.per_device_batch_size or each)
    if not needs:
        yield _split(stage, each, most)
        return
    memory, per_node = stage.instance.accelerator_memory_gib, stage.instance.accelerators
    if memory is None:
        return
    for need in needs:
        largest = need.largest_batch(memory, stage.world_size, per_node)
        if largest:
            placed = replace(
                stage,
                sharding=need.sharding,
                text_encoders=need.text_encoders,
                communication_units=need.communication_units,
            )
            yield _split(placed, each, min(most, largest))
        if largest >= most:
            return


def _split(stage: CostStage, each: int, most: int) -> CostStage:
    """Return the stage with ``each`` images per GPU and step, at most ``most`` of them at once."""
    micro = next(size for size in range(most, 0, -1) if each % size == 0)
    return replace(stage, per_device_batch_size=micro, gradient_accumulation_steps=each // micro)


def _basis(speed: Speed | None) -> str:
    return speed.basis if speed else "unknown"
