"""Collectives of a step: their bytes and their time."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sm_train.cost.network import (
    BUCKET_BYTES,
    GpuNetwork,
    communication,
    gpu_network,
    step_collectives,
)

MILLION = 10**6
STRATEGIES = ("none", "shard_grad_op", "full_shard", "hybrid_shard")


def sent(sharding: str, network: GpuNetwork, **options: int | bool) -> dict[tuple[str, str], float]:
    """Return the bytes of a step's full vectors by collective and scope."""
    total: dict[tuple[str, str], float] = {}
    for call in step_collectives(sharding, 100 * MILLION, network, **options):  # type: ignore[arg-type]
        key = (call.collective, call.scope)
        total[key] = total.get(key, 0.0) + call.bytes * call.count * call.passes
    return total


TWO_NODES = GpuNetwork(2, 8, 30e9, 225e9)


def test_bytes_of_each_strategy() -> None:
    assert sent("none", TWO_NODES, passes=4) == {("all_reduce", "world"): 400e6}
    assert sent("shard_grad_op", TWO_NODES, passes=4) == {
        ("all_gather", "world"): 200e6,
        ("reduce_scatter", "world"): 400e6,
    }
    # Gathered in each forward and each backward pass of four.
    assert sent("full_shard", TWO_NODES, passes=4) == {
        ("all_gather", "world"): 8 * 200e6,
        ("reduce_scatter", "world"): 400e6,
    }
    assert sent("full_shard", TWO_NODES, passes=4, unsharded_gradients=False) == {
        ("all_gather", "world"): 8 * 200e6,
        ("reduce_scatter", "world"): 4 * 400e6,
    }
    assert sent("hybrid_shard", TWO_NODES, bf16=False) == {
        ("all_gather", "node"): 2 * 400e6,
        ("reduce_scatter", "node"): 400e6,
        ("all_reduce", "between nodes"): 50e6,
    }
    # Gradients reduced in bf16.
    assert sent("none", TWO_NODES, reduce_bf16=True) == {("all_reduce", "world"): 200e6}
    assert sent("hybrid_shard", TWO_NODES, reduce_bf16=True) == {
        ("all_gather", "node"): 2 * 200e6,
        ("reduce_scatter", "node"): 200e6,
        ("all_reduce", "between nodes"): 25e6,
    }
    assert not sent("full_shard", GpuNetwork(1, 1, 1e9, 1e9))


def test_network_of_an_instance_type() -> None:
    p4d = gpu_network(4, 8, 400, 300)
    # nccl issue 527: 30 of 50 GB/s on four p4d.24xlarge, 231 of 300 GB/s inside one.
    assert p4d.bus_bandwidth("world") == pytest.approx(30e9)
    assert p4d.bus_bandwidth("node") == pytest.approx(225e9)
    assert p4d.bus_bandwidth("between nodes") == pytest.approx(30e9 / 8)
    assert gpu_network(1, 8, 400, 300).bus_bandwidth("world") == pytest.approx(225e9)


@given(st.sampled_from(STRATEGIES), st.integers(1, 64), st.floats(0.0, 5.0), st.floats(1.0, 3200.0))
def test_exposed_time_is_part_of_the_total_and_a_slower_network_never_faster(
    sharding: str, nodes: int, pass_seconds: float, gbps: float
) -> None:
    fast, slow = (gpu_network(nodes, 8, rate, 300) for rate in (gbps, gbps / 2))
    calls = step_collectives(sharding, 10 * BUCKET_BYTES, fast)
    on_fast, other = (communication(calls, network, pass_seconds) for network in (fast, slow))
    assert 0 <= on_fast.exposed <= on_fast.seconds * (1 + 1e-9)
    assert on_fast.exposed <= other.exposed * (1 + 1e-9)
