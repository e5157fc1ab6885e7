"""What is wrong with a cluster, one finding for each fault, naming the node and the mend. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any, Literal

from sm_train.entrypoints.common.job_config import ExpectedPerformance
from sm_train.entrypoints.doctor.measurements import ClusterMeasurements, NodeSpeeds
from sm_train.entrypoints.doctor.node_facts import different
from sm_train.entrypoints.doctor.round_robin import SLOW_SHARE, SlowLinks, find_slow_links

Level = Literal["warn", "fail"]

LATE_SECONDS = 10.0
SKEW_SECONDS = 1.0
"""Lines of two nodes are told apart by their times; signed requests bear minutes."""

OUTLIER = {"nccl": 0.85, "gloo": 0.5}
"""Share of the median below which a device stands out; CPUs are shared with others."""

REPLACE = "stop the job and submit it again: other machines come, unless a warm pool keeps these"


@dataclass(frozen=True)
class ClusterFinding:
    """``nodes`` are those to blame, if any; ``advice`` is what to do."""

    code: str
    level: Level
    message: str
    advice: str
    nodes: tuple[int, ...] = ()


def findings(
    evidence: ClusterMeasurements, expected: ExpectedPerformance | None
) -> Iterator[ClusterFinding]:
    """All that needs no prediction, the gravest kinds first."""
    yield from _absent(evidence)
    yield from _sizes(evidence, expected)
    yield from _gpus(evidence, expected)
    yield from _transport(evidence, expected)
    yield from _links(evidence)
    yield from _gone(evidence)
    yield from _unfinished(evidence)
    yield from _late(evidence)
    yield from _versions(evidence)
    yield from _outliers(evidence)
    yield from _clocks(evidence)


def _ranks(ranks: list[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    return f"ranks {ranks[0]}–{ranks[-1]}"


def _absent(evidence: ClusterMeasurements) -> Iterator[ClusterFinding]:
    lanes = max(1, evidence.world_size // max(1, len(evidence.hosts)))
    by_node: dict[int, list[int]] = {}
    for rank in evidence.absent:
        by_node.setdefault(rank // lanes, []).append(rank)
    for node, ranks in by_node.items():
        late = sorted(set(ranks) & set(evidence.too_late))
        what = "came too late" if late else "never joined"
        yield ClusterFinding(
            "node-late" if late else "node-absent",
            "fail",
            f"{evidence.name(node)} {what}: {_ranks(ranks)} did not answer within "
            f"{evidence.join_seconds:.0f} s",
            "the security group must let its members reach each other on all ports, in and out (a "
            "rule each way that names the group itself); if it does, " + REPLACE,
            (node,),
        )


def _late(evidence: ClusterMeasurements) -> Iterator[ClusterFinding]:
    by_node: dict[int, float] = {}
    for one in evidence.members:
        by_node[one.node] = max(by_node.get(one.node, 0.0), one.waited)
    for node, waited in by_node.items():
        if waited > LATE_SECONDS:
            yield ClusterFinding(
                "node-late",
                "warn",
                f"{evidence.name(node)} came {waited:.0f} s after the first",
                "its image or packages load slowly; if that happens again, " + REPLACE,
                (node,),
            )


def _sizes(
    evidence: ClusterMeasurements, expected: ExpectedPerformance | None
) -> Iterator[ClusterFinding]:
    told = {one.world_size for one in evidence.members}
    if len(told) > 1:
        odd = [one for one in evidence.members if one.world_size != evidence.world_size]
        nodes = tuple(sorted({one.node for one in odd}))
        yield ClusterFinding(
            "world-size",
            "fail",
            f"{', '.join(map(evidence.name, nodes))}: started for {odd[0].world_size} processes, "
            f"rank 0 for {evidence.world_size}",
            "start all nodes with the same number of nodes and of processes on each",
            nodes,
        )
    lanes = max(1, evidence.world_size // max(1, len(evidence.hosts)))
    known = {*evidence.nodes, *(rank // lanes for rank in evidence.absent)}
    idle = tuple(node for node in range(len(evidence.hosts)) if node not in known)
    if idle:
        yield ClusterFinding(
            "world-size",
            "fail",
            f"{', '.join(map(evidence.name, idle))}: without a process of the "
            f"{evidence.world_size} that were started, and billed",
            "start as many nodes as the job has hosts",
            idle,
        )
    if expected is None:
        return
    wanted = len(evidence.hosts) * expected.accelerators
    if evidence.world_size != wanted:
        yield ClusterFinding(
            "world-size",
            "fail",
            f"{evidence.world_size} processes on {len(evidence.hosts)} × {expected.instance_type}, "
            f"which have {wanted} GPUs",
            "start one process for each GPU",
        )


def _gpus(
    evidence: ClusterMeasurements, expected: ExpectedPerformance | None
) -> Iterator[ClusterFinding]:
    counts = {one.node: one.gpus for one in evidence.members}
    usual = max(counts.values(), default=0)
    wanted = expected.accelerators if expected else usual
    for node, count in counts.items():
        if count < wanted:
            yield ClusterFinding(
                "gpus-missing",
                "fail",
                f"{evidence.name(node)} has {count} GPUs instead of {wanted}",
                REPLACE,
                (node,),
            )
    corrected = any(gpu["ecc"] for _, speeds in _of_nodes(evidence) for gpu in speeds.gpus)
    kinds = [_kind(gpu) for _, speeds in _of_nodes(evidence) for gpu in speeds.gpus]
    for node, speeds in _of_nodes(evidence):
        for number, gpu in enumerate(speeds.gpus):
            where = f"{evidence.name(node)}, GPU {number}"
            if _kind(gpu) != max(kinds, key=kinds.count):
                message = f"{where}: {_kind(gpu)}, the others {max(kinds, key=kinds.count)}"
                yield ClusterFinding("gpu-differs", "warn", message, REPLACE, (node,))
            if gpu["ecc_errors"]:
                message = f"{where}: {gpu['ecc_errors']} uncorrectable memory errors"
                yield ClusterFinding("ecc-errors", "fail", message, REPLACE, (node,))
            if gpu["ecc"] is False and corrected:
                message = f"{where}: memory without error correction"
                yield ClusterFinding("ecc-off", "warn", message, REPLACE, (node,))
            if gpu["links_inactive"] and (gpu["links"] or (expected and expected.nvlink_gbytes)):
                message = f"{where}: {gpu['links_inactive']} NVLinks are down"
                yield ClusterFinding("nvlink-down", "fail", message, REPLACE, (node,))
            if gpu["slowdown"]:
                message = f"{where}: slowed down by heat or power, at {gpu['temperature']} °C"
                yield ClusterFinding("gpu-throttled", "warn", message, REPLACE, (node,))


def _kind(gpu: Mapping[str, Any]) -> str:
    return f"{gpu['name']} with {gpu['memory_mib']} MiB at up to {gpu['clock_limit_mhz']} MHz"


def _of_nodes(evidence: ClusterMeasurements) -> Iterator[tuple[int, NodeSpeeds]]:
    """What each node's first process told of the node."""
    for one in evidence.members:
        speeds = evidence.speeds.get(one.rank)
        if speeds is not None and (speeds.gpus or speeds.disk or speeds.channel):
            yield one.node, speeds


def _transport(
    evidence: ClusterMeasurements, expected: ExpectedPerformance | None
) -> Iterator[ClusterFinding]:
    if len(evidence.hosts) < 2 or expected is None or not expected.efa:
        return
    for node, log in evidence.logs.items():
        if log["transport"] == "sockets":
            yield ClusterFinding(
                "transport-sockets",
                "fail",
                f"{evidence.name(node)}: NCCL uses sockets, the EFA adapters lie idle",
                "use an image with libfabric and aws-ofi-nccl, and leave FI_PROVIDER and NCCL_NET "
                "unset in cluster.environment",
                (node,),
            )
        elif log["transport"] == "efa" and log["channels"]:
            yield ClusterFinding(
                "transport-no-rdma",
                "warn",
                f"{evidence.name(node)}: EFA without GPUDirect RDMA, through the host's memory",
                "use a newer EFA installer in the image",
                (node,),
            )


def accusation(evidence: ClusterMeasurements) -> SlowLinks | None:
    """Whom the pairs accuse; those of a node that left say nothing of links."""
    gone = {one.node for one in evidence.members if one.rank in evidence.gone}
    values = {
        pair: value for pair, value in evidence.node_bandwidths().items() if not gone & set(pair)
    }
    return find_slow_links(values, share=SLOW_SHARE)


def _links(evidence: ClusterMeasurements) -> Iterator[ClusterFinding]:
    accused = accusation(evidence)
    if accused is None:
        return
    values = evidence.node_bandwidths()
    usual = f"{accused.typical / 1e9:.3g} GB/s are usual here" if accused.typical else "none does"
    for node in accused.nodes:
        own = [value for pair, value in values.items() if node in pair]
        silent = max(own) <= 0
        yield ClusterFinding(
            "node-unreachable" if silent else "node-slow",
            "fail" if silent else "warn",
            f"{evidence.name(node)}: no other node exchanges data with it"
            if silent
            else f"{evidence.name(node)}: {median(own) / 1e9:.3g} GB/s with the others; {usual}",
            f"exclude {evidence.name(node)}: {REPLACE}",
            (node,),
        )
    for pair in accused.links:
        both = " and ".join(map(evidence.name, pair))
        cut = values[pair] <= 0
        yield ClusterFinding(
            "link-cut" if cut else "link-slow",
            "fail" if cut else "warn",
            f"{both} do not reach each other; {usual}"
            if cut
            else f"{both}: {values[pair] / 1e9:.3g} GB/s between them; {usual}",
            f"exclude either: {REPLACE}",
            pair,
        )


def _gone(evidence: ClusterMeasurements) -> Iterator[ClusterFinding]:
    for one in evidence.members:
        if one.rank in evidence.gone:
            yield ClusterFinding(
                "node-gone",
                "fail",
                f"{evidence.name(one.node)} was gone before {evidence.gone[one.rank]}: rank "
                f"{one.rank} ended or hangs",
                f"see its own lines; if they say nothing, {REPLACE}",
                (one.node,),
            )


def _unfinished(evidence: ClusterMeasurements) -> Iterator[ClusterFinding]:
    for part, said in evidence.failures.items():
        yield ClusterFinding(
            "part-failed", "fail", f"{part} did not end: {said}", "see what else was found"
        )
    if evidence.cut_short:
        yield ClusterFinding(
            "cut-short",
            "fail",
            f"not all was measured within {evidence.seconds:.0f} s",
            "see what else was found; doctor.timeout gives more time",
        )


def _versions(evidence: ClusterMeasurements) -> Iterator[ClusterFinding]:
    by_node = {one.node: one.versions for one in evidence.members}
    for name, odd in different(by_node).items():
        usual = next(one[name] for node, one in by_node.items() if node not in odd)
        for node, value in odd.items():
            yield ClusterFinding(
                "versions-differ",
                "warn",
                f"{evidence.name(node)}: {name} {value or 'is not there'}, the others {usual}",
                "give all nodes the same image",
                (node,),
            )


def _outliers(evidence: ClusterMeasurements) -> Iterator[ClusterFinding]:
    kinds: tuple[tuple[str, str, Callable[[NodeSpeeds], float | None], float], ...] = (
        ("gpu-slow", "TFLOP/s in matrix products", lambda one: one.matmul_tflops, 1.0),
        ("copies-slow", "GB/s from host to device", lambda one: one.host_to_device, 1e9),
        ("disk-slow", "GB/s from disk", lambda one: one.disk, 1e9),
        ("channel-slow", "GB/s from the train channel", lambda one: one.channel, 1e9),
    )
    least = OUTLIER.get(evidence.backend, OUTLIER["nccl"])
    places = {one.rank: (one.node, one.lane) for one in evidence.members}
    for code, unit, get, scale in kinds:
        known = {
            rank: value for rank, one in evidence.speeds.items() if (value := get(one)) is not None
        }
        yield from _below(evidence, code, unit, known, places, least, scale)


def _below(
    evidence: ClusterMeasurements,
    code: str,
    unit: str,
    known: Mapping[int, float],
    places: Mapping[int, tuple[int, int]],
    least: float,
    scale: float,
) -> Iterator[ClusterFinding]:
    if len(known) < 3:
        return
    usual = median(known.values())
    for rank, value in known.items():
        if value < least * usual:
            node, lane = places[rank]
            yield ClusterFinding(
                code,
                "warn",
                f"{evidence.name(node)}, process {lane}: {value / scale:.3g} {unit}, the others "
                f"{usual / scale:.3g}",
                f"exclude {evidence.name(node)}: {REPLACE}",
                (node,),
            )


def clock_offsets(evidence: ClusterMeasurements) -> dict[int, tuple[float, float]]:
    """Node → seconds ahead of the first node, and how uncertain that is."""
    first = evidence.nodes[0] if evidence.nodes else 0
    found: dict[int, tuple[float, float]] = {}
    for pair in evidence.pairs:
        if pair.nodes[0] != first or pair.offset is None or pair.uncertainty is None:
            continue
        before = found.get(pair.nodes[1])
        if before is None or pair.uncertainty < before[1]:
            found[pair.nodes[1]] = (pair.offset, pair.uncertainty)
    return found


def _clocks(evidence: ClusterMeasurements) -> Iterator[ClusterFinding]:
    offsets = clock_offsets(evidence)
    if not offsets:
        return
    usual = median([0.0, *(offset for offset, _ in offsets.values())])
    for node, (offset, uncertainty) in {evidence.nodes[0]: (0.0, 0.0), **offsets}.items():
        ahead = offset - usual
        if abs(ahead) - uncertainty > SKEW_SECONDS:
            yield ClusterFinding(
                "clock-skew",
                "warn",
                f"{evidence.name(node)}: its clock is {abs(ahead):.1f} s "
                f"{'ahead' if ahead > 0 else 'behind'}",
                "times of its log lines do not compare; " + REPLACE,
                (node,),
            )
