"""How long the sums take: 10,000 alternatives of a run of three stages, and one estimate.

There is no peer that prices training runs; the limit is the one that a person waits: 1 s.
Prints medians of rounds on this machine.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from sm_train.cost.alternatives import SearchInputs, alternatives
from sm_train.cost.assumptions import Assumptions
from sm_train.cost.estimate import Purchase, estimate
from sm_train.cost.prices import shipped_prices
from sm_train.estimators.config.load import load_run
from sm_train.toolkit.costing.stages import memory_needs, stages_to_price, stated_measurements

ROUNDS = 5
WANTED = 10_000
LIMIT_SECONDS = 1.0
PRESET = Path(__file__).parent.parent / "toolkit" / "presets" / "bria-2.0.yaml"


def seconds(work: Callable[[], object]) -> float:
    """Median of the rounds."""
    taken = []
    for _ in range(ROUNDS):
        started = time.perf_counter()
        work()
        taken.append(time.perf_counter() - started)
    return statistics.median(taken)


def main() -> None:
    """Price the published run on so many cluster sizes that 10,000 clusters can run it."""
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run.yaml"
        run.write_bytes(PRESET.read_bytes())
        config = load_run(run)
    stages = tuple(stages_to_price(config))
    question = SearchInputs(
        stages=stages,
        memory=memory_needs(config, stages),
        measurements=tuple(stated_measurements(stages[:1])),
        region="us-east-1",
        assumed=Assumptions(),
        prices=shipped_prices(),
    )
    once = len(alternatives(question))
    # A cluster is considered as often as its number of instances is asked for.
    counts = [*range(1, 65)] * -(-WANTED // once)
    found = len(alternatives(question, counts))
    taken = seconds(lambda: alternatives(question, counts)) * WANTED / found
    print(f"{ROUNDS} rounds, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")
    print(
        f"{WANTED:,} alternatives, 3 stages each: {taken:.2f} s, "
        f"{taken / LIMIT_SECONDS:.2f} × the limit"
    )
    one = seconds(lambda: estimate(stages, Purchase("us-east-1")))
    print(f"one estimate with its range (2,000 draws): {1000 * one:.0f} ms")


if __name__ == "__main__":
    main()
