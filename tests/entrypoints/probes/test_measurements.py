"""The doctor's measurements, simulated, and its parsers of other programs' output."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from sm_train.cost.network import COLLECTIVES, bus_factor
from sm_train.entrypoints.distributed.messages import Messages, MissingNodeError
from sm_train.entrypoints.distributed.nccl_log import (
    merge_nccl_logs,
    parse_nccl_log,
    transport_problem,
)
from sm_train.entrypoints.job_interface.job_config import ColorPolicy
from sm_train.entrypoints.probes import node_benchmarks
from sm_train.entrypoints.probes.barrier import StoreBarrier
from sm_train.entrypoints.probes.bus_bandwidth import SIZES, Collective, sweep, sweeps
from sm_train.entrypoints.probes.cluster_benchmark import (
    INTER_NODE_SHARE,
    INTRA_NODE_SHARE,
    PAIR_REPEATS,
    RESERVE_SECONDS,
    RETEST_REPEATS,
    ROUND_SECONDS,
    WORLD_SHARE,
    measure_pair,
)
from sm_train.entrypoints.probes.gpu_inventory import parse_gpus, with_links
from sm_train.entrypoints.probes.node_facts import installed_by_efa, minority_values
from sm_train.entrypoints.probes.process_group import BenchmarkGroup
from sm_train.entrypoints.probes.round_robin import RETESTS, schedule

from tests.support.cluster.training_jobs import sample, write_shard

LIMIT = 120.0


class Simulated(BenchmarkGroup):
    """A group on a fabric with ``rate`` bytes per second, with a simulated clock."""

    def __init__(self, size: int, rate: float, latency: float) -> None:
        self.size, self.group_rank = size, 0
        self.rate, self.latency, self.clock, self.calls = rate, latency, 0.0, 0

    def measure(self, collective: Collective, size: int, repeats: int) -> float:
        seconds = self.latency + size * bus_factor(collective, self.size) / self.rate
        self.clock += repeats * seconds + self.latency
        self.calls += repeats
        return seconds

    def exchange(self, value: float) -> list[float]:
        self.clock += self.latency
        return [value] * self.size


# ------------------------------------------------------------------ time


@pytest.mark.parametrize("rate", [1e5, 12.5e6, 6e9, 50e9, 400e9])
def test_16_nodes_of_8_take_less_than_120_seconds(rate: float) -> None:
    """Simulate every part on one clock, with two seconds for NCCL to create a group."""
    latency, group_creation = 5e-5, 2.0
    clock = 30.0  # Python, join, matrix products, files: bounded by their own limits
    for ranks, share in ((128, WORLD_SHARE), (8, INTRA_NODE_SHARE), (16, INTER_NODE_SHARE)):
        group = Simulated(ranks, rate, latency)
        points = list(sweeps(group.measure, budget=share * LIMIT, max_bytes=2**30))
        assert {collective for collective, _ in points} == set(COLLECTIVES)
        assert group.clock <= 1.05 * share * LIMIT
        clock += group_creation + group.clock
    rounds = schedule(16)
    assert len(rounds) == 15
    measured = 0
    # A retest of one slow node takes three rounds.
    for repeats, count in ((PAIR_REPEATS, len(rounds)), *((RETEST_REPEATS, 3),) * RETESTS):
        for remaining in range(count, 0, -1):
            budget = min(ROUND_SECONDS, (LIMIT - RESERVE_SECONDS - clock) / remaining)
            if budget > 0:
                pair = Simulated(2, rate / 8, latency)
                measure_pair(pair, (0, 1), 0, budget, 2**30, repeats)
                clock += group_creation + pair.clock
                measured += 1
    assert clock < LIMIT
    assert measured >= len(rounds) or rate < 1e6
    # At least three retests; all of them on a fast network.
    assert measured >= len(rounds) + 9 or rate < 1e9
    assert measured == len(rounds) + 3 * RETESTS or rate < 1e10


def test_a_late_process_does_not_make_a_short_transfer_count() -> None:
    """A transfer that fits into buffers is fast; a hiccup must not end the search with it."""

    class Buffered(Simulated):
        def measure(self, collective: Collective, size: int, repeats: int) -> float:
            network = max(0, size - 2**15) / self.rate  # the first 32 KiB only fill a buffer
            hiccup = 0.05 if self.calls == 2 else 0.0
            self.calls += repeats
            return self.latency + network + hiccup

    group = Buffered(2, 10e6, 1e-4)
    result = measure_pair(group, (0, 1), 0, ROUND_SECONDS, 2**30, PAIR_REPEATS)
    # busbw of an all-gather of two is half of the algorithm bandwidth.
    assert result.bandwidth == pytest.approx(10e6 / 2, rel=0.1)


def test_sweep_reaches_1_gib_on_a_fast_network_and_stops_early_on_a_slow_one() -> None:
    fast, slow = Simulated(16, 40e9, 3e-5), Simulated(16, 1e6, 3e-5)
    complete = list(sweep("all_reduce", fast.measure, budget=4, max_bytes=2**30))
    partial = list(sweep("all_reduce", slow.measure, budget=4, max_bytes=2**30))
    assert [result.bytes for result in complete] == list(SIZES)
    assert (SIZES[0], SIZES[-1]) == (2**10, 2**30)
    assert 2 <= len(partial) < len(complete)
    limited = list(sweep("all_gather", fast.measure, budget=4, max_bytes=2**20))
    assert limited[-1].bytes <= 2**20


# ------------------------------------------------------------------ barriers


def test_missing_rank_is_left_out_and_late_rank_gets_an_error() -> None:
    messages = Messages(dist.HashStore(), b"the job's key")
    results: dict[int, Any] = {}

    def meet(rank: int) -> None:
        results[rank] = StoreBarrier(messages, rank, 4).meet(
            "a", 0.3, lambda: 7.0, result_timeout=5.0
        )

    threads = [threading.Thread(target=meet, args=(rank,)) for rank in (0, 1, 3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {result.ranks for result in results.values()} == {(0, 1, 3)}
    assert {result.budget for result in results.values()} == {7.0}
    with pytest.raises(MissingNodeError, match="came too late"):
        StoreBarrier(messages, 2, 4).meet("a", 0.3, lambda: 7.0, result_timeout=5.0)
    with pytest.raises(MissingNodeError, match="rank 0 did not set a/result"):
        StoreBarrier(Messages(dist.HashStore(), b""), 2, 4).meet(
            "a", 0.3, lambda: 7.0, result_timeout=0.1
        )


# ------------------------------------------------------------------ one node


def test_node_benchmarks_return_none_if_there_is_nothing_to_measure(tmp_path: Path) -> None:
    cpu = torch.device("cpu")
    assert node_benchmarks.matmul_tflops(cpu) > 0
    assert node_benchmarks.host_to_device_bytes_per_second(cpu) is None
    assert (node_benchmarks.disk_bytes_per_second(tmp_path) or 0) > 1e6
    assert list(tmp_path.iterdir()) == []
    assert node_benchmarks.disk_bytes_per_second(tmp_path / "missing") is None
    small, large = tmp_path / "small", tmp_path / "large"
    small.write_bytes(bytes(1000))
    large.write_bytes(bytes(node_benchmarks.MIN_READ_BYTES))
    assert node_benchmarks.read_bytes_per_second([small]) is None
    assert (node_benchmarks.read_bytes_per_second([small, large, tmp_path / "missing"]) or 0) > 1e6


def test_decode_rate_counts_only_images_that_training_would_decode(tmp_path: Path) -> None:
    samples = {f"{number:03d}": sample(number) for number in range(8)}
    write_shard(tmp_path / "images.tar", samples)
    latents = {key: members | {"moments.npy": b"x"} for key, members in samples.items()}
    write_shard(tmp_path / "latents.tar", latents)
    (tmp_path / "damaged.tar").write_bytes(b"no tar")
    assert (
        node_benchmarks.decoded_per_second([tmp_path / "images.tar"], "jpg;png", 8, ColorPolicy())
        or 0
    ) > 0
    assert (
        node_benchmarks.decoded_per_second([tmp_path / "latents.tar"], "jpg;png", 8, ColorPolicy())
        is None
    )
    assert (
        node_benchmarks.decoded_per_second([tmp_path / "damaged.tar"], "png", 8, ColorPolicy())
        is None
    )
    assert node_benchmarks.decoded_per_second([], "png", 8, ColorPolicy()) is None


# ------------------------------------------------------------------ parsers

EFA_LOG = """\
ip-10-0-1-5:101:140 [0] NCCL INFO NET/OFI Initializing aws-ofi-nccl 1.13.2-aws
ip-10-0-1-5:101:140 [0] NCCL INFO NET/OFI Using Libfabric version 1.22
ip-10-0-1-5:101:140 [0] NCCL INFO NET/OFI Selected Provider is efa (found 4 nics)
ip-10-0-1-5:101:140 [0] NCCL INFO Using network Libfabric
NCCL version 2.23.4+cuda12.4
ip-10-0-1-5:101:151 [0] NCCL INFO Channel 00/0 : 8[0] -> 0[0] [receive] via NET/Libfabric/0/GDRDMA
ip-10-0-1-5:101:151 [0] NCCL INFO Channel 01/0 : 0[0] -> 8[0] [send] via NET/Libfabric/0/GDRDMA
ip-10-0-1-5:101:151 [0] NCCL INFO Channel 01/0 : 0[0] -> 1[1] via P2P/CUMEM/read
"""
OLD_LOG = """\
host:9922:9980 [1] NCCL INFO NET/OFI Selected provider is efa
host:9922:9980 [1] NCCL INFO Channel 01 : 9[101d0] -> 0[101c0] [receive] via NET/AWS Libfabric/0
"""
SOCKETS_LOG = """\
host:1:2 [0] NCCL INFO NET/OFI Selected Provider is tcp;ofi_rxm
host:1:2 [0] NCCL INFO NET/Socket : Using [0]eth0:172.31.16.255<0>
host:1:2 [0] NCCL INFO Using network Socket
host:1:2 [0] NCCL INFO Channel 00/0 : 1[0] -> 0[0] [receive] via NET/Socket/0
"""


def test_transport_is_parsed_from_the_nccl_log() -> None:
    efa = parse_nccl_log(EFA_LOG.splitlines())
    assert (efa.fabric, efa.channels, efa.rdma_channels, efa.adapters) == ("efa", 2, 2, 4)
    assert (efa.nccl, efa.plugin, efa.libfabric) == ("2.23.4", "1.13.2-aws", "1.22")
    assert parse_nccl_log(OLD_LOG.splitlines()).fabric == "efa"
    assert parse_nccl_log(SOCKETS_LOG.splitlines()).fabric == "sockets"
    over_tcp = OLD_LOG.replace("provider is efa", "Provider is tcp;ofi_rxm")
    assert parse_nccl_log(over_tcp.splitlines()).fabric == "sockets"
    assert parse_nccl_log(["host NCCL INFO Channel 00 : 0 -> 1 via NET/IB/3/GDRDMA"]).fabric == (
        "infiniband"
    )
    old_plugin = parse_nccl_log(["[0] NCCL INFO NET/OFI Using aws-ofi-nccl 1.5.0aws"])
    assert (old_plugin.fabric, old_plugin.plugin) == (None, "1.5.0aws")


def infiniband_log(rdma: int, channels: int, *reasons: str) -> list[str]:
    """Return the lines of one process, ``rdma`` of whose channels use GPUDirect RDMA."""
    adapters = " ".join(f"[{index}]mlx5_{index}:1/IB" for index in range(8))
    return [
        f"host:73:73 [0] NCCL INFO NET/IB : Using {adapters} [RO]; OOB eth0:10.0.1.5<0>",
        "host:73:73 [0] NCCL INFO Using network IB",
        *(f"host:73:95 [0] NCCL INFO {reason}" for reason in reasons),
        *(
            f"host:73:95 [0] NCCL INFO Channel {index:02}/0 : 8[0] -> 0[0] [receive] via "
            f"NET/IB/0{'/GDRDMA' if index < rdma else ''}"
            for index in range(channels)
        ),
    ]


NO_MODULE = "NET/IB : GPU Direct RDMA Disabled for HCA 0 'mlx5_0' (no module)"
TOO_FAR = "GPU Direct RDMA Disabled for GPU 0 / HCA 3 (distance 8 > 5)"


@pytest.mark.parametrize(
    ("lines", "has_rdma", "adapters", "code", "phrases"),
    [
        (infiniband_log(16, 16), None, None, None, ()),
        (
            infiniband_log(0, 16, NO_MODULE),
            None,
            None,
            "transport-no-rdma",
            ("GPUDirect RDMA on 0 of 16 channels", "(no module)", "load nvidia_peermem"),
        ),
        (
            infiniband_log(15, 16, TOO_FAR),
            False,
            None,
            "transport-no-rdma",
            ("on 15 of 16 channels", "distance 8 > 5", "NCCL_NET_GDR_LEVEL"),
        ),
        # The channels are missing from the log, and NCCL says why there will be no RDMA.
        (infiniband_log(0, 0, NO_MODULE), None, None, "transport-no-rdma", ("disabled",)),
        (infiniband_log(0, 0), None, None, None, ()),
        (infiniband_log(4, 4), None, 8, None, ()),
        (infiniband_log(4, 4), None, 9, "adapters-missing", ("8 of 9 InfiniBand adapters",)),
        (EFA_LOG.splitlines(), True, 4, None, ()),
        (EFA_LOG.splitlines(), True, 32, "adapters-missing", ("4 of 32 EFA adapters",)),
        (
            EFA_LOG.replace("/GDRDMA", "", 1).splitlines(),
            True,
            4,
            "transport-no-rdma",
            ("EFA, GPUDirect RDMA on 1 of 2 channels", "EFA installer"),
        ),
        (SOCKETS_LOG.splitlines(), True, None, "transport-sockets", ("EFA is not used",)),
        (SOCKETS_LOG.splitlines(), None, None, "transport-sockets", ("InfiniBand",)),
        (SOCKETS_LOG.splitlines(), False, None, None, ()),
        (
            ["NCCL INFO NET/IB : No device found.", "NCCL INFO Using network Socket"],
            None,
            None,
            "transport-sockets",
            ("found no RDMA adapter", "give the containers its devices"),
        ),
        (
            [
                "NCCL INFO NCCL_IB_DISABLE set by environment to 1.",
                "NCCL INFO Using network Socket",
            ],
            False,
            None,
            "transport-sockets",
            ("because of NCCL_IB_DISABLE=1", "remove NCCL_IB_DISABLE"),
        ),
        (
            [*infiniband_log(0, 0)[:1], "NCCL INFO Channel 00 : 0 -> 8 [send] via NET/Socket/0"],
            False,
            None,
            "transport-sockets",
            ("although NCCL found 8 InfiniBand adapters",),
        ),
    ],
)
def test_transport_is_judged_on_every_fabric(
    lines: list[str],
    has_rdma: bool | None,
    adapters: int | None,
    code: str | None,
    phrases: tuple[str, ...],
) -> None:
    problem = transport_problem(parse_nccl_log(lines), has_rdma=has_rdma, adapters=adapters)
    assert (problem.code if problem else None) == code
    text = f"{problem.sentence} {problem.fix}" if problem else ""
    assert [phrase for phrase in phrases if phrase not in text] == []


def test_logs_of_a_nodes_processes_count_together() -> None:
    near, other = (parse_nccl_log(infiniband_log(rdma, 8, TOO_FAR)) for rdma in (8, 1))
    both = merge_nccl_logs([near, other])
    assert (both.fabric, both.channels, both.rdma_channels) == ("infiniband", 16, 9)
    assert both.rdma_off == ("Disabled for GPU 0 / HCA 3 (distance 8 > 5)",)
    slow = merge_nccl_logs([near, parse_nccl_log(SOCKETS_LOG.splitlines())])
    assert slow.fabric == "sockets"


@given(st.text(), st.integers(0, len(EFA_LOG)))
def test_damaged_nccl_log_never_raises(noise: str, cut: int) -> None:
    parse_nccl_log((EFA_LOG[:cut] + noise).splitlines())


SMI = """\
NVIDIA A100-SXM4-80GB, 81920, 1155, 1410, Enabled, 0, 33, 550.163.01, Not Active
NVIDIA A100-SXM4-80GB, 81920, 345, 1410, Enabled, 3, 88, 550.163.01, Active
NVIDIA A10G, 23028, [N/A], 1710, [N/A], [N/A], 40, 550.163.01, Not Active
"""
LINKS = """\
GPU 0: NVIDIA A100-SXM4-80GB (UUID: GPU-1)
\t Link 0: 25 GB/s
\t Link 1: 25 GB/s
GPU 1: NVIDIA A100-SXM4-80GB (UUID: GPU-2)
\t Link 0: 25 GB/s
\t Link 1: <inactive>
GPU 2: NVIDIA A10G (UUID: GPU-3)
"""


def test_inventory_is_parsed_from_nvidia_smi() -> None:
    good, bad, small = with_links(parse_gpus(SMI), LINKS)
    assert (good.memory_mib, good.clock_mhz, good.clock_limit_mhz) == (81920, 1155, 1410)
    assert (good.ecc, good.ecc_errors, good.slowdown, good.links) == (True, 0, False, 2)
    assert (bad.ecc_errors, bad.slowdown, bad.temperature) == (3, True, 88)
    assert (bad.links, bad.links_inactive) == (1, 1)
    assert (small.ecc, small.ecc_errors, small.clock_mhz, small.links) == (None, None, None, 0)
    assert good.driver == "550.163.01"


@given(st.text(), st.text())
def test_no_output_of_nvidia_smi_raises(query: str, links: str) -> None:
    with_links(parse_gpus(query), links)


def test_versions_are_parsed_from_the_efa_installers_list() -> None:
    debian = "libfabric-aws-bin_1.22.0amzn4.0_amd64 libfabric1-aws_1.22.0amzn4.0_amd64 "
    debian += "libnccl-ofi-ngc_1.14.0-1_amd64"
    fedora = "libfabric-aws-1.17.0-1.el8.x86_64 openmpi40-aws-4.1.5-1.x86_64"
    assert installed_by_efa(debian) == {"libfabric": "1.22.0", "plugin": "1.14.0"}
    assert installed_by_efa(fedora) == {"libfabric": "1.17.0"}
    assert installed_by_efa("") == {}


@settings(max_examples=50)
@given(st.dictionaries(st.integers(0, 9), st.sampled_from(["a", "b"]), min_size=1))
def test_minority_is_at_most_half_of_the_nodes(values: dict[int, str]) -> None:
    minorities = minority_values({node: {"torch": value} for node, value in values.items()})
    minority = [node for nodes in minorities.values() for node in nodes]
    assert 2 * len(minority) <= len(values)
    assert bool(minorities) == (len(set(values.values())) > 1)


def test_group_of_one_measures_without_a_network() -> None:
    store = torch.distributed.HashStore()
    group = BenchmarkGroup(store, "alone", [4], 4, torch.device("cpu"), 5.0)
    for collective in ("all_reduce", "all_gather", "reduce_scatter"):
        assert group.measure(collective, 2**12, 2) >= 0
    assert group.exchange(2.5) == [2.5]
    assert json.dumps(group.max_over_ranks(1.5)) == "1.5"
