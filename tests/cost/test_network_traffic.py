"""Collectives of the network model against those that the training loop starts at 128 ranks."""

from __future__ import annotations

from sm_train.cost.network import GpuNetwork, step_collectives

from tests.support.fake_gpu import FakeReport, FakeRun

CLUSTER = GpuNetwork(nodes=16, per_node=8, between_nodes=30e9, inside_node=225e9)
PASSES = 2
NAMES = {
    "allreduce": "all_reduce",
    "allgather_base": "all_gather",
    "reduce_scatter_base": "reduce_scatter",
}
BLOCKING = {"_exchange_status", "log_steps", "gradient_norm"}
"""Functions that exchange a few numbers: the stop, a log interval's metrics, the norm."""

Traffic = dict[tuple[str, int], tuple[int, int]]
"""Collective and size of its group → calls and bytes in a step."""


def predicted(sharding: str, parameters: int) -> Traffic:
    calls = step_collectives(sharding, parameters, CLUSTER, passes=PASSES)
    return add_up(
        (one.kind, CLUSTER.ranks(one.scope), one.count * one.passes, round(one.bytes))
        for one in calls
    )


def observed(report: FakeReport) -> Traffic:
    return add_up(
        (NAMES[one.name], one.ranks, one.count, one.bytes)
        for one in report.collectives
        if one.function not in BLOCKING
    )


def add_up(calls: Iterable[tuple[str, int, int, int]]) -> Traffic:
    traffic: Traffic = {}
    for name, ranks, count, size in calls:
        known, total = traffic.get((name, ranks), (0, 0))
        traffic[name, ranks] = known + count, total + count * size
    return traffic


def run(preset: str, sharding: str) -> FakeRun:
    return FakeRun(preset, 128, 1, PASSES, 1, sharding, world_size=CLUSTER.gpus)


def assert_as_predicted(report: FakeReport, preset: str, sharding: str) -> None:
    parameters = plan_preset(preset, 128, precision="bf16").parameters
    model, actual = predicted(sharding, parameters), observed(report)
    assert actual.keys() == model.keys()
    for key, (calls, size) in model.items():
        # FSDP2 pads the rows of each weight to a multiple of the ranks.
        assert actual[key][1] == pytest.approx(size, rel=0.01)
        assert actual[key][0] > 0
        assert calls > 0


@pytest.mark.slow
@pytest.mark.parametrize("sharding", ["none", "full_shard", "hybrid_shard"])
@pytest.mark.parametrize("preset", ["sd2", "mmdit-8b"])
def test_traffic_of_a_step_is_that_of_the_network_model(preset: str, sharding: str) -> None:
    [report] = run_on_fake_gpu([run(preset, sharding)], timeout=4 * DEADLINE).reports
    assert_as_predicted(report, preset, sharding)
