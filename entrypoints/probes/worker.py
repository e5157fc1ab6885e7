"""The doctor's process next to one training process: measures, and judges in rank 0.

It is a separate process that runs before training creates its process group: backend smddp forbids
a second group next to its own, a hanging collective can only be ended with its process, and NCCL's
log and memory stay apart from training's.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from sm_train.entrypoints.base.atomic_write import write_atomic
from sm_train.entrypoints.base.digests import message_key
from sm_train.entrypoints.base.sagemaker_paths import ResourceConfig, SageMakerPaths
from sm_train.entrypoints.base.signals import exit_with_launcher
from sm_train.entrypoints.distributed.backend import decide, rdma_devices
from sm_train.entrypoints.distributed.messages import (
    Messages,
    MissingNodeError,
    job_key,
    use_job_key,
)
from sm_train.entrypoints.distributed.nccl_log import NcclLog, merge_nccl_logs, parse_nccl_log
from sm_train.entrypoints.distributed.rendezvous import (
    SECURITY_GROUP_HINT,
    RendezvousAddress,
    connect_store,
    serve_store,
)
from sm_train.entrypoints.job_interface.events import EventLog
from sm_train.entrypoints.job_interface.job_config import JobConfig, read_job_config
from sm_train.entrypoints.probes import node_benchmarks, node_facts
from sm_train.entrypoints.probes.barrier import StoreBarrier
from sm_train.entrypoints.probes.cluster_benchmark import PASSES, RESERVE_SECONDS, ClusterBenchmark
from sm_train.entrypoints.probes.doctor_report import conclude, report_transport
from sm_train.entrypoints.probes.findings import ClusterFinding
from sm_train.entrypoints.probes.gpu_inventory import read_gpus
from sm_train.entrypoints.probes.measurements import (
    ClusterMeasurements,
    GroupMeasurement,
    NodeSpeeds,
    PairResult,
    RankFacts,
    sweeps_from_store,
)

JOIN_SHARE = 1 / 3
"""Share of the timeout within which all ranks must join."""

PORT = 7789
"""Port of the store if the launcher names none (smddprun)."""

FAREWELL_SECONDS = 5.0
"""How long rank 0 keeps the store open for ranks that have not read the verdict."""

LOG_SECONDS = 2.0
"""How long rank 0 waits for NCCL's logs of the other ranks before it reports the transport."""

MEMORY_SHARE = 0.03
"""Share of the free memory for one buffer: two are needed, and eight ranks may share a node's."""

MAX_BYTES = 2**30


@dataclass(frozen=True)
class RankInfo:
    """This process's position in the cluster, from the launcher's environment."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    node: int

    @classmethod
    def read(cls, resources: ResourceConfig) -> RankInfo:
        """Read it from the environment; a cluster emulated on one host has consecutive nodes."""

        def number(name: str, default: int) -> int:
            return int(os.environ.get(name, default))

        rank, local_world_size = number("RANK", 0), number("LOCAL_WORLD_SIZE", 1)
        node = resources.node_rank if len(resources.hosts) > 1 else rank // local_world_size
        return cls(rank, number("WORLD_SIZE", 1), number("LOCAL_RANK", 0), local_world_size, node)


def main(arguments: list[str] | None = None) -> None:
    """Examine the cluster, write the verdict to ``--verdict`` and exit without cleaning up."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--stage", required=True)
    parser.add_argument("--document", type=Path, required=True)
    parser.add_argument("--verdict", type=Path, required=True)
    options = parser.parse_args(arguments)
    exit_with_launcher()
    use_job_key(message_key(options.document))
    config = read_job_config(options.document, options.stage)
    paths = SageMakerPaths.from_environment()
    process = _Process(config, paths, options.verdict.parent / "nccl.log")
    try:
        verdict = process.run()
        write_atomic(options.verdict, json.dumps(verdict).encode())
    except Exception:
        traceback.print_exc()
    # Process groups are not destroyed, and a thread may hang in one.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


class _Process:
    """One rank's doctor process; NCCL writes its log to ``nccl_log``."""

    def __init__(self, config: JobConfig, paths: SageMakerPaths, nccl_log: Path) -> None:
        resources = ResourceConfig.read(paths)
        self._config, self._paths, self._resources = config, paths, resources
        self._started = time.monotonic()
        self._deadline = self._started + config.doctor.timeout
        self._join_timeout = JOIN_SHARE * config.doctor.timeout
        self._info = RankInfo.read(resources)
        self._events = EventLog(node=self._info.node, rank=self._info.rank)
        choice = decide(
            nodes=len(resources.hosts), backend="nccl", instance_type=resources.instance_type
        )
        self._backend = choice.backend
        self._nccl_log = nccl_log
        self._reported: list[ClusterFinding] = []
        os.environ |= {
            "NCCL_DEBUG": "INFO",
            "NCCL_DEBUG_SUBSYS": "INIT,NET",
            "NCCL_DEBUG_FILE": str(nccl_log),
            # A hanging collective raises in its caller; otherwise a thread would abort the process.
            "TORCH_NCCL_BLOCKING_WAIT": "1",
            "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
        }
        if interface := _network_interface(paths):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
        gpu = choice.backend != "gloo" and torch.cuda.is_available()
        self._device = torch.device("cuda", self._info.local_rank) if gpu else torch.device("cpu")
        if gpu:
            torch.cuda.set_device(self._device)

    def run(self) -> dict[str, Any]:
        """Run the benchmark; returns the verdict, which is the same on all ranks."""
        self._gpus = read_gpus() if self._device.type == "cuda" else ()
        try:
            self._address = self._find_store()
            # One connection per thread: a request that blocks would block the other thread's.
            benchmark_barrier, verdict_barrier = self._connect(), self._connect()
        except (MissingNodeError, RuntimeError) as error:
            return self._store_unreachable(str(error).splitlines()[0])
        finished = threading.Event()
        threading.Thread(
            target=self._run_benchmark, args=(benchmark_barrier, finished), daemon=True
        ).start()
        if self._info.rank != 0:
            return self._read_verdict(verdict_barrier)
        in_time = finished.wait(max(0.0, self._deadline - RESERVE_SECONDS - time.monotonic()))
        return self._judge(verdict_barrier, timed_out=not in_time)

    # ------------------------------------------------------------------ the store

    def _find_store(self) -> RendezvousAddress:
        """Return the store's address; rank 0 serves it at a port that all ranks can know."""
        host = os.environ.get("MASTER_ADDR", self._resources.hosts[0])
        port = int(os.environ.get("MASTER_PORT", PORT - 1))
        is_server = self._info.rank == 0
        if self._info.world_size == 1:
            return RendezvousAddress("127.0.0.1", self._serve(0))
        if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
            if is_server:
                self._serve(port + 1)
            return RendezvousAddress(host, port + 1)
        # torchrun's own store publishes the free port of the doctor's. It is not used for more,
        # because training's rendezvous happens there.
        store = connect_store(RendezvousAddress(host, port), timeout=self._join_timeout)
        launcher_store = StoreBarrier(Messages(store, job_key()), 1, 1)
        key = f"doctor-port/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
        if is_server:
            launcher_store.put(key, self._serve(0))
        return RendezvousAddress(host, launcher_store.wait(key, self._join_timeout))

    def _serve(self, port: int) -> int:
        """Serve the store until this process ends; returns its port."""
        self._served, served_port = serve_store(port, timeout=self._join_timeout)
        return served_port

    def _connect(self) -> StoreBarrier:
        # torch connects twice before it gives up, each time for the whole timeout.
        store = connect_store(self._address, timeout=self._join_timeout / 2)
        return StoreBarrier(Messages(store, job_key()), self._info.rank, self._info.world_size)

    def _store_unreachable(self, error: str) -> dict[str, Any]:
        """Log that rank 0's store cannot be reached; returns the verdict of this rank alone."""
        message = (
            f"{self._resources.current_host} did not reach {self._resources.hosts[0]} for the "
            f"doctor's rendezvous within {self._join_timeout:.0f} s: {error}; {SECURITY_GROUP_HINT}"
        )
        if self._info.local_rank == 0:
            self._events.warn("rendezvous-failed", message)
        return {"level": "fail", "sentence": message}

    # ------------------------------------------------------------------ measuring

    def _run_benchmark(self, barrier: StoreBarrier, finished: threading.Event) -> None:
        try:
            self._run_parts(barrier)
        except MissingNodeError as error:
            barrier.put(f"error/barrier/{self._info.rank}", str(error))
        except Exception as error:
            line = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
            with contextlib.suppress(RuntimeError):  # the store itself may be gone
                barrier.put(f"error/process/{self._info.rank}", line)
        finally:
            finished.set()

    def _run_parts(self, barrier: StoreBarrier) -> None:
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)  # each thread has its own current device
        benchmark = ClusterBenchmark(
            barrier,
            self._rank_facts(),
            self._device,
            timeout=self._config.doctor.timeout,
            deadline=self._deadline,
        )
        benchmark.join(self._join_timeout, self._max_bytes())
        benchmark.measure_node(self._speeds)
        benchmark.sweep_all()
        if self._nccl_log.exists():
            log = parse_nccl_log(self._nccl_log.read_text(errors="replace").splitlines())
            barrier.put(f"log/{self._info.node}/{self._info.rank}", asdict(log))
            if self._info.rank == 0:
                self._report_transport(barrier)
        benchmark.run_pairwise()
        benchmark.finish()

    def _report_transport(self, barrier: StoreBarrier) -> None:
        """Report a bad transport now: measuring the pairs of nodes takes most of the time."""
        logs = [f"log/{rank.node}/{rank.rank}" for rank in _joined_ranks(barrier)]
        barrier.messages.arrivals(logs, LOG_SECONDS)
        so_far = self._collect(barrier, timed_out=False)
        self._reported = report_transport(self._config, so_far, self._events)

    def _rank_facts(self) -> RankFacts:
        info, versions = self._info, node_facts.versions()
        driver = self._gpus[0].driver if self._gpus else None
        return RankFacts(
            rank=info.rank,
            node=info.node,
            local_rank=info.local_rank,
            world_size=info.world_size,
            gpus=torch.cuda.device_count() if self._device.type == "cuda" else 0,
            instance_id=node_facts.instance_id(),
            versions=versions | {"driver": driver},
            rdma=tuple(rdma_devices()),
        )

    def _max_bytes(self) -> int:
        if self._device.type == "cuda":
            free = torch.cuda.mem_get_info(self._device)[0]
        else:
            free = node_facts.free_memory()
        return int(min(MAX_BYTES, MEMORY_SHARE * free))

    def _speeds(self, first_on_node: bool) -> NodeSpeeds:
        speeds = NodeSpeeds(
            matmul_tflops=node_benchmarks.matmul_tflops(self._device),
            host_to_device=node_benchmarks.host_to_device_bytes_per_second(self._device),
        )
        if not first_on_node:
            return speeds
        shards = sorted(self._paths.channel("train").rglob("*.tar"))
        data, stage = self._config.data, self._config.stage
        return replace(
            speeds,
            disk=node_benchmarks.disk_bytes_per_second(Path(tempfile.gettempdir())),
            channel=node_benchmarks.read_bytes_per_second(shards),
            decoded_images=self._node_decode_rate(
                node_benchmarks.decoded_per_second(
                    shards, data.image_key, stage.resolution, data.color
                )
            ),
            gpus=tuple(asdict(gpu) for gpu in self._gpus),
        )

    def _node_decode_rate(self, per_worker: float | None) -> float | None:
        """Return the node's images per second if each decode worker, at most one per core, decodes
        ``per_worker``.
        """
        if per_worker is None:
            return None
        workers = max(1, self._config.training.decode_workers) * self._info.local_world_size
        return per_worker * min(workers, node_facts.cores())

    # ------------------------------------------------------------------ the verdict

    def _judge(self, barrier: StoreBarrier, *, timed_out: bool) -> dict[str, Any]:
        cluster = self._collect(barrier, timed_out=timed_out)
        verdict = conclude(
            self._config, cluster, self._paths, self._events, reported=self._reported
        )
        barrier.put("verdict", verdict)
        readers = {rank.rank for rank in cluster.ranks} - {0} - cluster.lost_ranks.keys()
        barrier.messages.arrivals([f"verdict-read/{rank}" for rank in readers], FAREWELL_SECONDS)
        return verdict

    def _read_verdict(self, barrier: StoreBarrier) -> dict[str, Any]:
        remaining = self._deadline + FAREWELL_SECONDS - time.monotonic()
        try:
            verdict: dict[str, Any] = barrier.wait("verdict", remaining)
            barrier.put(f"verdict-read/{self._info.rank}", 1)
        except (MissingNodeError, RuntimeError) as error:
            return {"level": "fail", "sentence": f"no verdict: {str(error).splitlines()[0]}"}
        return verdict

    def _collect(self, barrier: StoreBarrier, *, timed_out: bool) -> ClusterMeasurements:
        """Read everything that reached the store."""
        ranks = _joined_ranks(barrier)
        missing = sorted(set(range(barrier.size)) - {rank.rank for rank in ranks})
        speeds = {rank.rank: barrier.get(f"speeds/{rank.rank}") for rank in ranks}
        lost = {rank.rank: barrier.get(f"lost/{rank.rank}") for rank in ranks}
        nodes = sorted({rank.node for rank in ranks})
        local_ranks = sorted({rank.local_rank for rank in ranks})
        world = barrier.get("world/sweeps/all")
        return ClusterMeasurements(
            node_names=self._node_names(nodes),
            instance_type=self._resources.instance_type,
            world_size=barrier.size,
            backend=self._backend,
            join_timeout=self._join_timeout,
            ranks=ranks,
            missing_ranks=tuple(missing),
            late_ranks=tuple(rank for rank in missing if barrier.get(f"facts/{rank}")),
            lost_ranks={rank: part for rank, part in lost.items() if part},
            speeds={
                rank: NodeSpeeds(**rank_speeds)
                for rank, rank_speeds in speeds.items()
                if rank_speeds
            },
            world=sweeps_from_store(world) if world else None,
            intra_node=_group_measurements(barrier, "intra", nodes),
            inter_node=_group_measurements(barrier, "inter", local_ranks),
            pairs=_pair_results(barrier, nodes, local_ranks),
            nccl_logs=_nccl_logs(barrier, ranks),
            errors=_errors(barrier, ranks),
            timed_out=timed_out,
            seconds=round(time.monotonic() - self._started, 1),
        )

    def _node_names(self, nodes: Sequence[int]) -> tuple[str, ...]:
        """Return the platform's names; emulated nodes share one host and get numbered names."""
        if len(self._resources.hosts) > 1 or len(nodes) < 2:
            return self._resources.hosts
        return tuple(f"node-{node + 1}" for node in range(nodes[-1] + 1))


def _joined_ranks(barrier: StoreBarrier) -> tuple[RankFacts, ...]:
    """Return the ranks that joined in time."""
    _, _, joined = barrier.get("join/result") or [[], 0.0, []]
    delays = dict(map(tuple, joined))
    facts = {rank: barrier.get(f"facts/{rank}") for rank in range(barrier.size) if rank in delays}
    return tuple(
        RankFacts(
            **{key: value for key, value in rank_facts.items() if key != "max_bytes"}
            | {"join_delay": delays[rank]}
        )
        for rank, rank_facts in facts.items()
        if rank_facts is not None
    )


def _network_interface(paths: SageMakerPaths) -> str | None:
    """Return the network interface that the platform names."""
    path = paths.resources
    if not path.exists():
        return None
    name: str | None = json.loads(path.read_text()).get("network_interface_name")
    return name


def _group_measurements(
    barrier: StoreBarrier, part: str, groups: Sequence[int]
) -> dict[int, GroupMeasurement]:
    stored = {group: barrier.get(f"{part}/sweeps/{group}") for group in groups}
    return {group: sweeps_from_store(document) for group, document in stored.items() if document}


def _pair_results(
    barrier: StoreBarrier, nodes: Sequence[int], local_ranks: Sequence[int]
) -> tuple[PairResult, ...]:
    """Return each pair's best result, with the bandwidths of all passes."""
    results = []
    for index, a in enumerate(nodes):
        for b in nodes[index + 1 :]:
            for local_rank in local_ranks:
                stored = [barrier.get(f"{name}/{a}-{b}/{local_rank}") for name in PASSES]
                known = [result for result in stored if result]
                if not known:
                    continue
                best = max(known, key=lambda result: float(result["bandwidth"]))
                passes = tuple(result and float(result["bandwidth"]) for result in stored)
                results.append(PairResult(**best | {"nodes": (a, b), "passes": passes}))
    return tuple(results)


def _nccl_logs(barrier: StoreBarrier, ranks: Sequence[RankFacts]) -> dict[int, dict[str, Any]]:
    """Return what the ranks of each node report together."""
    logs: dict[int, list[NcclLog]] = {}
    for rank in ranks:
        if log := barrier.get(f"log/{rank.node}/{rank.rank}"):
            logs.setdefault(rank.node, []).append(NcclLog(**log))
    return {node: asdict(merge_nccl_logs(of_node)) for node, of_node in logs.items()}


def _errors(barrier: StoreBarrier, ranks: Sequence[RankFacts]) -> dict[str, str]:
    """Return part → the error of the first rank that reports one."""
    errors: dict[str, str] = {}
    for part in ("world", "intra", "inter", "barrier", "process"):
        for rank in ranks:
            error = barrier.get(f"error/{part}/{rank.rank}")
            if error and part not in errors:
                errors[part] = f"rank {rank.rank}: {error}"
    return errors


if __name__ == "__main__":
    main()
