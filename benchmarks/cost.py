"""Time of searching every instance type and 64 counts for a run with three stages, and an estimate.

No other tool prices training runs, so the limit is what a user waits for: 1 s. Prints medians of
rounds on this machine.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from sm_train.cost.alternatives import MOST_INSTANCES, SearchInputs, alternatives
from sm_train.cost.assumptions import Assumptions
from sm_train.cost.estimate import Purchase, estimate
from sm_train.cost.instances import instance_types
from sm_train.cost.prices import shipped_prices
from sm_train.toolkit.memory.sharding_choice import with_sharding
from sm_train.toolkit.planning.run_price import memory_needs, stages_to_price, stated_measurements
from sm_train.toolkit.run_file.run_file import load

ROUNDS = 5
LIMIT_SECONDS = 1.0
PRESET = Path(__file__).parent.parent / "toolkit" / "presets" / "bria-2.0.yaml"


def seconds(work: Callable[[], object]) -> float:
    """Return the median time of ``work``."""
    times = []
    for _ in range(ROUNDS):
        started = time.perf_counter()
        work()
        times.append(time.perf_counter() - started)
    return statistics.median(times)


def main() -> None:
    """Price the published run on enough cluster sizes for 10,000 alternatives."""
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run.yaml"
        run.write_bytes(PRESET.read_bytes())
        config = with_sharding(load(run))
    stages = tuple(stages_to_price(config))
    search = SearchInputs(
        stages=stages,
        memory=memory_needs(config, stages),
        measurements=tuple(stated_measurements(stages[:1])),
        region="us-east-1",
        assumed=Assumptions(),
        prices=shipped_prices(),
    )
    tried = MOST_INSTANCES * sum(kind.trains for kind in instance_types())
    search_time = seconds(lambda: alternatives(search))
    print(f"{ROUNDS} rounds, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")
    print(
        f"{tried:,} clusters, 3 stages each, {len(alternatives(search))} of them within memory and "
        f"at the same batch: {search_time:.2f} s, {search_time / LIMIT_SECONDS:.2f} × the limit"
    )
    estimate_time = seconds(lambda: estimate(stages, Purchase("us-east-1")))
    print(f"one estimate with its range (2,000 draws): {1000 * estimate_time:.0f} ms")


if __name__ == "__main__":
    main()
