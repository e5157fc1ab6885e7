"""Collectives of the network model against those that the training loop starts on 128 ranks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from sm_train.cost.network import GpuNetwork, step_collectives
from sm_train.entrypoints.distributed.fsdp import ddp_options
from sm_train.entrypoints.job_interface.job_config import Modulation
from sm_train.entrypoints.models.components import downsampling, preset_caption_tokens, read_preset
from sm_train.entrypoints.models.pipeline import Text, predict
from sm_train.entrypoints.models.trained_network import Network
from sm_train.entrypoints.planning.measure import (
    gradient_buckets,
    network_inputs,
    resolution_step,
)
from sm_train.entrypoints.planning.memory import plan_preset
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore

from tests.support.deadline import DEADLINE
from tests.support.fake_gpu import FakeReport, FakeRun, run_on_fake_gpu

CLUSTER = GpuNetwork(nodes=16, per_node=8, between_nodes=30e9, inside_node=225e9)
RESOLUTION, PASSES = 128, 2
NAMES = {
    "allreduce": "all_reduce",
    "allgather_base": "all_gather",
    "reduce_scatter_base": "reduce_scatter",
}
SCALARS = {"_exchange_status", "log_steps", "gradient_norm"}
"""Functions that exchange numbers: the request to stop, a log interval's metrics, the norm."""

Traffic = dict[tuple[str, int], tuple[int, int]]
"""Collective and size of its group → calls and bytes in a step."""


def add_up(calls: Iterable[tuple[str, int, int, int]]) -> Traffic:
    traffic: Traffic = {}
    for name, ranks, count, size in calls:
        known, total = traffic.get((name, ranks), (0, 0))
        traffic[name, ranks] = known + count, total + count * size
    return traffic


def predicted(preset: str, sharding: str) -> Traffic:
    modulation: Modulation = "gathered" if sharding == "none" else "exchanged"
    plan = plan_preset(preset, RESOLUTION, precision="bf16", modulation=modulation)
    units, moved = plan.communication_units(sharding), plan.parameters - plan.exchanged_parameters
    calls = step_collectives(sharding, moved, CLUSTER, units=units, passes=PASSES)
    return add_up(
        (call.collective, CLUSTER.ranks(call.scope), call.count * call.passes, round(call.bytes))
        for call in calls
    )


def observed(report: FakeReport) -> Traffic:
    return add_up(
        (NAMES[collective.name], collective.ranks, collective.count, collective.bytes)
        for collective in report.collectives
        if collective.function not in SCALARS
    )


@pytest.mark.slow
@pytest.mark.parametrize("preset", ["sd2", "mmdit-8b"])
@pytest.mark.parametrize("sharding", ["none", "full_shard", "hybrid_shard"])
def test_collectives_of_a_step_are_those_of_the_network_model(preset: str, sharding: str) -> None:
    run = FakeRun(
        preset,
        RESOLUTION,
        1,
        PASSES,
        1,
        sharding,
        world_size=CLUSTER.gpus,
        text_encoders="replicated",
    )
    [report] = run_on_fake_gpu([run], timeout=4 * DEADLINE).reports
    actual, model = observed(report), predicted(preset, sharding)
    assert actual.keys() == model.keys()
    for key, (calls, size) in model.items():
        # FSDP2 pads the rows of each weight to a multiple of the ranks.
        assert actual[key][1] == pytest.approx(size, rel=0.01), key
        # On the fake GPU, DDP keeps its first bucket, which holds all gradients.
        assert actual[key][0] == (1 if sharding == "none" else calls), key


@pytest.mark.slow
@pytest.mark.parametrize("preset", ["tiny-mmdit", pytest.param("mmdit-2b", marks=pytest.mark.slow)])
def test_sharded_text_encoders_are_gathered_within_a_node_in_each_pass(preset: str) -> None:
    run = FakeRun(preset, 64, 1, PASSES, 1, world_size=CLUSTER.gpus)
    runs = [replace(run, text_encoders=placement) for placement in ("replicated", "sharded")]
    before, after = map(observed, run_on_fake_gpu(runs, timeout=4 * DEADLINE).reports)
    assert ("all_gather", CLUSTER.per_node) not in before
    _, gathered = after["all_gather", CLUSTER.per_node]
    planned = PASSES * plan_preset(preset, 64, precision="bf16").text_bytes
    assert gathered == pytest.approx(planned, rel=0.01 if preset == "mmdit-2b" else 0.2)


@pytest.fixture
def process_group() -> Iterator[None]:
    """A group of 128 ranks of which only rank 0 exists; its collectives return at once."""
    dist.init_process_group("fake", rank=0, world_size=CLUSTER.gpus, store=FakeStore())
    yield
    dist.destroy_process_group()


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["tiny-sdxl", pytest.param("dit-xl", marks=pytest.mark.slow, id="dit-xl")]
)
@pytest.mark.usefixtures("process_group")
def test_buckets_of_ddp_are_those_of_the_network_model(name: str) -> None:
    """DDP itself, with its options in training, divides the gradients of a real backward pass."""
    preset = read_preset(name)
    side = resolution_step(preset) // downsampling(preset["vae"])
    network = Network(preset["network"], None, side).module.to_empty(device="cpu")
    for tensor in (*network.parameters(), *network.buffers()):
        tensor.detach().zero_()
    model = DistributedDataParallel(Prediction(network), **ddp_options().to_kwargs())
    sizes: list[int] = []

    def all_reduce(gradients: Tensor) -> torch.futures.Future[Tensor]:
        sizes.append(gradients.nbytes)
        reduced: torch.futures.Future[Tensor] = torch.futures.Future()
        reduced.set_result(gradients)
        return reduced

    model.register_comm_hook(None, lambda _, bucket: all_reduce(bucket.buffer()))
    # With a static graph, DDP divides the gradients after the second pass.
    for _ in range(3):
        sizes.clear()
        with torch.autocast("cpu", torch.bfloat16):
            prediction = model(preset, side)
        prediction.float().sum().backward()
    # A bias and its weight may be ready in the other order than on the meta device.
    assert sizes == pytest.approx(gradient_buckets(preset), rel=0.01)
    [(calls, _)] = predicted(name, "none").values()
    assert len(sizes) == calls


class Prediction(nn.Module):
    """A network's prediction for one empty image and caption."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, preset: dict[str, Any], side: int) -> Tensor:
        image, text = network_inputs(preset["network"], side, preset_caption_tokens(preset))
        states = torch.zeros(text.states.shape)
        pooled = None if text.pooled is None else torch.zeros(text.pooled.shape)
        return predict(
            self.network,
            torch.zeros(image.shape),
            torch.zeros(1),
            Text(states, pooled),
            downsampling(preset["vae"]),
        )
