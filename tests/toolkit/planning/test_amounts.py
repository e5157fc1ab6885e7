"""The dollars and seconds of some runs, to the last digit: no constant behind them may change
unnoticed.

``amounts.json`` next to this file holds what the product computes. After a change that is meant to
change an amount, UPDATE_AMOUNTS=1 writes it again: look at the difference.
"""

from __future__ import annotations

import json
import os
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from sm_train.cost.estimate import Estimate
from sm_train.cost.throughput import Measurement, StageMeasurement
from sm_train.toolkit.planning.run_price import estimate_run

from tests.support.run_documents import config, stage

FILE = Path(__file__).with_name("amounts.json")


def run(cluster: dict[str, Any] | None = None, model: str = "sd2", **stage_changes: Any) -> Any:
    changes = {"steps_per_second": None, "max_steps": 100_000} | stage_changes
    training = changes.pop("training", {"compile": False})
    return config(
        stages=[stage(**changes)],
        cluster={"instance_type": "ml.p5.48xlarge"} | (cluster or {}),
        model={"preset": model},
        training=training,
    )


def measured(*points: tuple[int, float], **changes: Any) -> list[StageMeasurement]:
    """Return speeds of a batch of 2,048 on numbers of GPUs."""
    return [
        StageMeasurement(
            "256px",
            Measurement(
                "a job",
                speed,
                gpus,
                **{
                    "effective_batch_size": 2048,
                    "resolution": 256,
                    "instance_type": "ml.p5.48xlarge",
                }
                | changes,
            ),
        )
        for gpus, speed in points
    ]


RUNS: dict[str, tuple[Any, list[StageMeasurement] | None]] = {
    "stated speed": (run(steps_per_second=1.8), None),
    "spot": (run({"capacity": "spot"}, steps_per_second=1.8), None),
    "predicted on one node": (run(instances=1), None),
    "predicted on four nodes": (run(), None),
    "predicted on A100": (run({"instance_type": "ml.p4de.24xlarge"}), None),
    "predicted, compiled": (run(training={"compile": True}), None),
    "tiny, compiled": (run(model="tiny-sd2", training={"compile": True}, resolution=64), None),
    "predicted over PCI Express": (run({"instance_type": "ml.g6e.48xlarge"}, instances=2), None),
    "predicted on a GPU without a point": (
        run({"instance_type": "ml.g5.48xlarge"}, per_device_batch_size=1),
        None,
    ),
    **{
        f"network-bound, {sharding}": (
            run(
                {"instance_type": "ml.g5.48xlarge"},
                model="mmdit-2b",
                instances=16,
                sharding=sharding,
                per_device_batch_size=1,
                gradient_accumulation_steps=1,
            ),
            None,
        )
        for sharding in ("none", "full_shard", "hybrid_shard", "shard_grad_op")
    },
    "full shard": (run(model="mmdit-2b", sharding="full_shard", per_device_batch_size=4), None),
    "hybrid shard": (run(model="mmdit-2b", sharding="hybrid_shard", per_device_batch_size=4), None),
    "shard grad op": (
        run(model="mmdit-2b", sharding="shard_grad_op", per_device_batch_size=4),
        None,
    ),
    "checkpointed": (run(activation_checkpointing=True), None),
    "selective": (run(model="mmdit-2b", activation_checkpointing="selective"), None),
    "fp8": (run(model="mmdit-2b", training={"compile": True, "precision": "fp8"}), None),
    "measured at this size": (run(), measured((32, 1.8))),
    "measured at another size": (run(), measured((8, 0.5))),
    "measured with the same work of each GPU": (
        run(),
        measured(
            (8, 7.5),
            effective_batch_size=128,
            per_device_batch_size=8,
            gradient_accumulation_steps=2,
        ),
    ),
    "measured at two sizes with the same work": (
        run(instances=8),
        [
            *measured(
                (8, 7.5),
                effective_batch_size=128,
                per_device_batch_size=8,
                gradient_accumulation_steps=2,
            ),
            *measured(
                (16, 7.4),
                effective_batch_size=256,
                per_device_batch_size=8,
                gradient_accumulation_steps=2,
            ),
        ],
    ),
    "measured at two sizes": (run(instances=8), measured((8, 0.5), (16, 0.95))),
    "measured at three sizes": (run(instances=8), measured((8, 0.5), (16, 0.95), (32, 1.7))),
    "measured on another GPU": (
        run(),
        measured((32, 1.0), instance_type="ml.p4de.24xlarge"),
    ),
    "measured at another resolution": (run(), measured((32, 1.0), resolution=512)),
    "measured with a range": (run(), measured((32, 1.8), low=1.7, high=1.85)),
}


def amounts(estimate: Estimate) -> dict[str, Any]:
    """Return everything that a person decides by: dollars and seconds, and their derivations."""

    def number(value: object) -> object:
        return float(value) if isinstance(value, Decimal) else value

    found: dict[str, Any] = {
        "cost": number(estimate.cost),
        "low": number(estimate.low),
        "high": number(estimate.high),
        "at most": number(estimate.at_most),
    }
    for priced in estimate.stages:
        found |= {name: number(quantity.number) for name, quantity in priced.terms.items()}
        if priced.stage.speed is not None:
            speed = priced.stage.speed
            found |= {"its": speed.steps_per_second, "its low": speed.low, "its high": speed.high}
    return found


def test_amounts_are_those_that_were_looked_at() -> None:
    found = {
        name: amounts(estimate_run(run, "us-east-1", measured=speeds))
        for name, (run, speeds) in RUNS.items()
    }
    if os.environ.get("UPDATE_AMOUNTS"):
        FILE.write_text(json.dumps(found, indent=1) + "\n")
    expected = json.loads(FILE.read_text())
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        assert found[name].keys() == values.keys(), name
        for key, value in values.items():
            same = value if value is None else pytest.approx(value, rel=1e-9)
            assert found[name][key] == same, (name, key)
