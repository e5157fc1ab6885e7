"""Compare two estimates: what changed, and its effect on the cost."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

_SHOWN = (
    "instance_type instances effective_batch_size resolution max_steps steps_per_second "
    "billable_seconds price_per_instance_hour_usd"
).split()

Document = Mapping[str, Any]


def compare(before: Document, after: Document) -> dict[str, Any]:
    """Return the difference of two ``cost --json`` documents; stages are matched by name.

    A stage that exists in only one document has None as the other cost and counts as 0 in the
    difference. A difference with an unknown cost is unknown.
    """
    old = {stage["name"]: stage for stage in before["stages"]}
    new = {stage["name"]: stage for stage in after["stages"]}
    names = list(dict.fromkeys((*old, *new)))
    return {
        "stages": [_stage(name, old.get(name), new.get(name)) for name in names],
        "total": {
            "before_usd": before["total"]["cost_usd"],
            "after_usd": after["total"]["cost_usd"],
            "difference_usd": _difference(before["total"]["cost_usd"], after["total"]["cost_usd"]),
            "before_seconds": before["total"]["wall_seconds"],
            "after_seconds": after["total"]["wall_seconds"],
            "difference_seconds": _difference(
                before["total"]["wall_seconds"], after["total"]["wall_seconds"]
            ),
        },
    }


def _stage(name: str, before: Document | None, after: Document | None) -> dict[str, Any]:
    old, new = (None if stage is None else stage["cost_usd"] for stage in (before, after))
    return {
        "name": name,
        "change": "removed" if after is None else "added" if before is None else "kept",
        "before_usd": old,
        "after_usd": new,
        "difference_usd": _difference(0 if before is None else old, 0 if after is None else new),
        "fields": list(_fields(before, after)) if before and after else [],
        "breakdown_difference_usd": _parts(before, after),
    }


def _fields(before: Document, after: Document) -> Iterator[dict[str, Any]]:
    for field in _SHOWN:
        if before[field] != after[field]:
            yield {"field": field, "before": before[field], "after": after[field]}


def _parts(before: Document | None, after: Document | None) -> dict[str, float | None]:
    old = before["breakdown_usd"] if before else {}
    new = after["breakdown_usd"] if after else {}
    return {
        name: _difference(old.get(name, 0), new.get(name, 0))
        for name in dict.fromkeys((*old, *new))
    }


def _difference(before: float | None, after: float | None) -> float | None:
    return None if before is None or after is None else after - before
