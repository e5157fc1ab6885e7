"""Faults of a cluster, one finding each, with the node and the advice. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, Literal

from sm_train.cost.instances import InstanceType
from sm_train.entrypoints.distributed.backend import is_efa
from sm_train.entrypoints.distributed.nccl_log import NcclLog, transport_problem
from sm_train.entrypoints.distributed.rendezvous import SECURITY_GROUP_HINT
from sm_train.entrypoints.probes.measurements import ClusterMeasurements, NodeSpeeds
from sm_train.entrypoints.probes.node_facts import minority_values
from sm_train.entrypoints.probes.round_robin import Confidence, SlowLinks, find_slow_links

Level = Literal["warn", "fail"]

LATE_SECONDS = 10.0
MAX_CLOCK_SKEW_SECONDS = 1.0
"""Log lines of two nodes are ordered by their times; signed AWS requests tolerate minutes."""

OUTLIER_SHARE = {"nccl": 0.85, "gloo": 0.5}
"""Share of the median below which a device is an outlier, by backend; CPUs are shared."""

REPLACE = (
    "stop the job and submit it again: it gets other instances, unless a warm pool keeps these"
)


@dataclass(frozen=True)
class ClusterFinding:
    """One fault: ``nodes`` are the faulty ones, if known; ``advice`` is what to do.

    ``confidence`` is set where other programs on the nodes could have caused the same measurement.
    """

    code: str
    level: Level
    message: str
    advice: str
    nodes: tuple[int, ...] = ()
    confidence: Confidence | None = None

    @property
    def is_transport(self) -> bool:
        """Whether the finding is about the transport that NCCL uses between nodes."""
        return self.code.startswith("transport-")


def findings(
    cluster: ClusterMeasurements, instance: InstanceType | None
) -> Iterator[ClusterFinding]:
    """Yield all findings that need no prediction, the most severe kinds first."""
    yield from _missing_nodes(cluster)
    yield from _world_size(cluster, instance)
    yield from _gpus(cluster, instance)
    yield from _transport(cluster, instance)
    yield from _links(cluster)
    yield from _lost_nodes(cluster)
    yield from _unfinished(cluster)
    yield from _late_nodes(cluster)
    yield from _versions(cluster)
    yield from _outliers(cluster)
    yield from _clocks(cluster)


def _rank_range(ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    return f"ranks {ranks[0]}–{ranks[-1]}"


def _processes_per_node(cluster: ClusterMeasurements) -> int:
    return max(1, cluster.world_size // max(1, len(cluster.node_names)))


def _missing_nodes(cluster: ClusterMeasurements) -> Iterator[ClusterFinding]:
    by_node: dict[int, list[int]] = {}
    for rank in cluster.missing_ranks:
        by_node.setdefault(rank // _processes_per_node(cluster), []).append(rank)
    for node, ranks in by_node.items():
        late = set(ranks) & set(cluster.late_ranks)
        yield ClusterFinding(
            "node-late" if late else "node-missing",
            "fail",
            f"{cluster.name(node)} {'came too late' if late else 'never joined'}: "
            f"{_rank_range(ranks)} did not answer within {cluster.join_timeout:.0f} s",
            f"{SECURITY_GROUP_HINT} (a rule in each direction that names the group itself); if it "
            f"does, {REPLACE}",
            (node,),
        )


def _late_nodes(cluster: ClusterMeasurements) -> Iterator[ClusterFinding]:
    delays: dict[int, float] = {}
    for rank in cluster.ranks:
        delays[rank.node] = max(delays.get(rank.node, 0.0), rank.join_delay)
    for node, delay in delays.items():
        if delay > LATE_SECONDS:
            yield ClusterFinding(
                "node-late",
                "warn",
                f"{cluster.name(node)} came {delay:.0f} s after the first",
                f"its image or packages load slowly; if that happens again, {REPLACE}",
                (node,),
            )


def _world_size(
    cluster: ClusterMeasurements, instance: InstanceType | None
) -> Iterator[ClusterFinding]:
    node_count = len(cluster.node_names)
    other = [rank for rank in cluster.ranks if rank.world_size != cluster.world_size]
    if other:
        nodes = tuple(sorted({gpu.node for gpu in other}))
        yield ClusterFinding(
            "world-size",
            "fail",
            f"{', '.join(map(cluster.name, nodes))}: started for {other[0].world_size} processes, "
            f"rank 0 for {cluster.world_size}",
            "start all nodes with the same number of nodes and of processes per node",
            nodes,
        )
    missing = {rank // _processes_per_node(cluster) for rank in cluster.missing_ranks}
    known = {*cluster.nodes, *missing}
    idle = tuple(node for node in range(node_count) if node not in known)
    if idle:
        yield ClusterFinding(
            "world-size",
            "fail",
            f"{', '.join(map(cluster.name, idle))}: without a process of the "
            f"{cluster.world_size} that were started, but billed",
            "start as many nodes as the job has instances",
            idle,
        )
    if instance is None:
        return
    gpus = node_count * instance.accelerators
    if cluster.world_size != gpus:
        yield ClusterFinding(
            "world-size",
            "fail",
            f"{cluster.world_size} processes on {node_count} × {instance.name}, which "
            f"have {gpus} GPUs",
            "start one process per GPU",
        )


def _gpus(cluster: ClusterMeasurements, instance: InstanceType | None) -> Iterator[ClusterFinding]:
    counts = {rank.node: rank.gpus for rank in cluster.ranks}
    required = instance.accelerators if instance else max(counts.values(), default=0)
    for node, count in counts.items():
        if count < required:
            yield ClusterFinding(
                "gpus-missing",
                "fail",
                f"{cluster.name(node)} has {count} GPUs instead of {required}",
                REPLACE,
                (node,),
            )
    gpus = [gpu for _, speeds in _node_speeds(cluster) for gpu in speeds.gpus]
    kinds = [_gpu_kind(gpu) for gpu in gpus]
    usual = max(kinds, key=kinds.count, default="")
    for node, speeds in _node_speeds(cluster):
        for index, gpu in enumerate(speeds.gpus):
            for code, level, fault in _gpu_faults(
                gpu,
                usual_kind=usual,
                others_have_ecc=any(gpu["ecc"] for gpu in gpus),
                has_nvlink=bool(gpu["links"] or (instance and instance.nvlink_gbytes)),
            ):
                message = f"{cluster.name(node)}, GPU {index}: {fault}"
                yield ClusterFinding(code, level, message, REPLACE, (node,))


def _gpu_faults(
    gpu: Mapping[str, Any], *, usual_kind: str, others_have_ecc: bool, has_nvlink: bool
) -> Iterator[tuple[str, Level, str]]:
    """Yield ``(code, level, message)`` of each fault."""
    if _gpu_kind(gpu) != usual_kind:
        yield "gpu-differs", "warn", f"{_gpu_kind(gpu)}, the others {usual_kind}"
    if gpu["ecc_errors"]:
        yield "ecc-errors", "fail", f"{gpu['ecc_errors']} uncorrectable memory errors"
    if gpu["ecc"] is False and others_have_ecc:
        yield "ecc-off", "warn", "memory without error correction"
    if gpu["links_inactive"] and has_nvlink:
        yield "nvlink-down", "fail", f"{gpu['links_inactive']} NVLinks are down"
    if gpu["slowdown"]:
        message = f"slowed down by heat or power, at {gpu['temperature']} °C"
        yield "gpu-throttled", "warn", message


def _gpu_kind(gpu: Mapping[str, Any]) -> str:
    return f"{gpu['name']} with {gpu['memory_mib']} MiB at up to {gpu['clock_limit_mhz']} MHz"


def _node_speeds(cluster: ClusterMeasurements) -> Iterator[tuple[int, NodeSpeeds]]:
    """Yield each node with the speeds of its first rank, which also measured files and GPUs."""
    for rank in cluster.ranks:
        speeds = cluster.speeds.get(rank.rank)
        if speeds is not None and (speeds.gpus or speeds.disk or speeds.channel):
            yield rank.node, speeds


def _transport(
    cluster: ClusterMeasurements, instance: InstanceType | None
) -> Iterator[ClusterFinding]:
    """Judge each node's transport; a node's adapters are compared with the other nodes'."""
    if len(cluster.node_names) < 2:
        return
    logs = {node: NcclLog(**log) for node, log in cluster.nccl_logs.items()}
    adapters = max((log.adapters or 0 for log in logs.values()), default=0)
    for node, log in logs.items():
        devices = next((rank.rdma for rank in cluster.ranks if rank.node == node), None)
        problem = transport_problem(
            log,
            has_rdma=_has_rdma(devices, instance),
            adapters=adapters,
            devices=[device for device in devices or () if not is_efa(device)],
        )
        if problem is not None:
            # Only sockets on a node whose devices were found leave adapters unused for certain.
            level: Level = "fail" if log.fabric == "sockets" and devices else "warn"
            yield ClusterFinding(
                problem.code,
                level,
                f"{cluster.name(node)}: {problem.sentence}",
                problem.fix,
                (node,),
            )


def _has_rdma(devices: Sequence[str] | None, instance: InstanceType | None) -> bool | None:
    """Return whether the node has EFA: a device that was found, or its instance type, says so."""
    if any(map(is_efa, devices or ())):
        return True
    return None if instance is None or instance.is_own else instance.supports_efa


def slow_links(cluster: ClusterMeasurements) -> SlowLinks | None:
    """Return slow nodes and links; leaves out pairs of lost nodes."""
    lost = {rank.node for rank in cluster.ranks if rank.rank in cluster.lost_ranks}
    return find_slow_links(
        [
            {pair: value for pair, value in bandwidth_pass.items() if not lost & set(pair)}
            for bandwidth_pass in cluster.bandwidth_passes()
        ]
    )


def _links(cluster: ClusterMeasurements) -> Iterator[ClusterFinding]:
    links = slow_links(cluster)
    if links is None:
        return
    bandwidths = cluster.node_bandwidths()
    typical = f"{links.typical / 1e9:.3g} GB/s is typical here" if links.typical else "no pair does"
    for node in links.nodes:
        name = cluster.name(node)
        values = [value for pair, value in bandwidths.items() if node in pair]
        unreachable = max(values) <= 0
        yield ClusterFinding(
            "node-unreachable" if unreachable else "node-slow",
            "fail" if unreachable else "warn",
            f"{name}: no other node exchanges data with it"
            if unreachable
            else f"{name}: {median(values) / 1e9:.3g} GB/s with the others; {typical} "
            f"(confidence: {links.confidence[node,]})",
            f"exclude {name}: {REPLACE}",
            (node,),
            links.confidence[node,],
        )
    for pair in links.links:
        names = " and ".join(map(cluster.name, pair))
        cut = bandwidths[pair] <= 0
        yield ClusterFinding(
            "link-cut" if cut else "link-slow",
            "fail" if cut else "warn",
            f"{names} do not reach each other; {typical}"
            if cut
            else f"{names}: {bandwidths[pair] / 1e9:.3g} GB/s between them; {typical} "
            f"(confidence: {links.confidence[pair]})",
            f"exclude either: {REPLACE}",
            pair,
            links.confidence[pair],
        )
    if links.unconfirmed:
        names = "; ".join(" and ".join(map(cluster.name, pair)) for pair in links.unconfirmed)
        yield ClusterFinding(
            "pairs-unconfirmed",
            "warn",
            f"bandwidth was low once and could not be measured again between {names}",
            "run `sm-train doctor` on an idle cluster, or raise doctor.timeout",
        )


def _lost_nodes(cluster: ClusterMeasurements) -> Iterator[ClusterFinding]:
    for rank in cluster.ranks:
        if rank.rank in cluster.lost_ranks:
            yield ClusterFinding(
                "node-lost",
                "fail",
                f"{cluster.name(rank.node)} was lost before {cluster.lost_ranks[rank.rank]}: rank "
                f"{rank.rank} ended or hangs",
                f"see the node's own log; if it shows no cause, {REPLACE}",
                (rank.node,),
            )


def _unfinished(cluster: ClusterMeasurements) -> Iterator[ClusterFinding]:
    for part, error in cluster.errors.items():
        yield ClusterFinding(
            "part-failed", "fail", f"{part} did not finish: {error}", "see the other findings"
        )
    if cluster.timed_out:
        yield ClusterFinding(
            "timed-out",
            "fail",
            f"not everything was measured within {cluster.seconds:.0f} s",
            "see the other findings, or raise doctor.timeout",
        )


def _versions(cluster: ClusterMeasurements) -> Iterator[ClusterFinding]:
    by_node = {rank.node: rank.versions for rank in cluster.ranks}
    for name, minority in minority_values(by_node).items():
        usual = next(values[name] for node, values in by_node.items() if node not in minority)
        for node, value in minority.items():
            yield ClusterFinding(
                "versions-differ",
                "warn",
                f"{cluster.name(node)}: {name} {value or 'is missing'}, the others {usual}",
                "use the same image on all nodes",
                (node,),
            )


def _outliers(cluster: ClusterMeasurements) -> Iterator[ClusterFinding]:
    kinds: tuple[tuple[str, str, Callable[[NodeSpeeds], float | None], float], ...] = (
        ("gpu-slow", "TFLOP/s in matrix products", lambda speeds: speeds.matmul_tflops, 1.0),
        ("copies-slow", "GB/s from host to device", lambda speeds: speeds.host_to_device, 1e9),
        ("disk-slow", "GB/s from disk", lambda speeds: speeds.disk, 1e9),
        ("channel-slow", "GB/s from the train channel", lambda speeds: speeds.channel, 1e9),
    )
    for code, unit, get, scale in kinds:
        if code == "gpu-slow" and cluster.backend != "nccl":
            # A CPU's speed depends on what else runs on the machine.
            continue
        by_rank = {
            rank: value / scale
            for rank, speeds in cluster.speeds.items()
            if (value := get(speeds)) is not None
        }
        yield from _outliers_of(cluster, code, unit, by_rank)


def _outliers_of(
    cluster: ClusterMeasurements, code: str, unit: str, by_rank: Mapping[int, float]
) -> Iterator[ClusterFinding]:
    if len(by_rank) < 3:
        return
    ranks = {facts.rank: facts for facts in cluster.ranks}
    usual = median(by_rank.values())
    for rank, value in by_rank.items():
        if value < outlier_share(cluster) * usual:
            name = cluster.name(ranks[rank].node)
            yield ClusterFinding(
                code,
                "warn",
                f"{name}, local rank {ranks[rank].local_rank}: {value:.3g} {unit}, the others "
                f"{usual:.3g}",
                f"exclude {name}: {REPLACE}",
                (ranks[rank].node,),
            )


def outlier_share(cluster: ClusterMeasurements) -> float:
    """Return the share of the median below which a device of this cluster is an outlier."""
    return OUTLIER_SHARE.get(cluster.backend, OUTLIER_SHARE["nccl"])


def clock_offsets(cluster: ClusterMeasurements) -> dict[int, tuple[float, float]]:
    """Return node → (seconds ahead of the first node, uncertainty in seconds)."""
    first = cluster.nodes[0] if cluster.nodes else 0
    offsets: dict[int, tuple[float, float]] = {}
    for pair in cluster.pairs:
        if pair.nodes[0] != first or pair.clock_offset is None or pair.clock_uncertainty is None:
            continue
        best = offsets.get(pair.nodes[1])
        if best is None or pair.clock_uncertainty < best[1]:
            offsets[pair.nodes[1]] = (pair.clock_offset, pair.clock_uncertainty)
    return offsets


def _clocks(cluster: ClusterMeasurements) -> Iterator[ClusterFinding]:
    offsets = clock_offsets(cluster)
    if not offsets:
        return
    usual = median([0.0, *(offset for offset, _ in offsets.values())])
    for node, (offset, uncertainty) in {cluster.nodes[0]: (0.0, 0.0), **offsets}.items():
        ahead = offset - usual
        if abs(ahead) - uncertainty > MAX_CLOCK_SKEW_SECONDS:
            yield ClusterFinding(
                "clock-skew",
                "warn",
                f"{cluster.name(node)}: its clock is {abs(ahead):.1f} s "
                f"{'ahead' if ahead > 0 else 'behind'}",
                f"times of its log lines cannot be compared; {REPLACE}",
                (node,),
            )
