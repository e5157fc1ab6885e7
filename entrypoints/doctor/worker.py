"""The doctor's process beside one training process: measures, and in the first rank judges.

It is a process of its own, before training joins its process group: backend smddp forbids a second
group beside its own, a collective that hangs can be ended only with its process, and NCCL's log
and its memory stay apart from training's.
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
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from sm_train.entrypoints.common.atomic_write import write_atomic
from sm_train.entrypoints.common.events import EventLog
from sm_train.entrypoints.common.job_config import JobConfig, read_job_config
from sm_train.entrypoints.common.parent_death import exit_with_launcher
from sm_train.entrypoints.common.sagemaker_paths import ResourceConfig, SageMakerPaths
from sm_train.entrypoints.distributed.backend import decide
from sm_train.entrypoints.doctor import node_benchmarks, node_facts
from sm_train.entrypoints.doctor.barrier import (
    POLL_SECONDS,
    MissingRankError,
    StoreBarrier,
    open_store,
)
from sm_train.entrypoints.doctor.cluster_benchmark import RESERVE_SECONDS, ClusterBenchmark
from sm_train.entrypoints.doctor.gpu_inventory import read_gpus
from sm_train.entrypoints.doctor.measurements import (
    ClusterMeasurements,
    GroupMeasurement,
    NodeSpeeds,
    PairResult,
    RankFacts,
    timed_from,
)
from sm_train.entrypoints.doctor.nccl_log import parse_nccl_log
from sm_train.entrypoints.doctor.report import conclude

JOIN_SHARE = 1 / 3
"""Of the limit: how long a process may come after the first one."""

PORT = 7789
"""Where the launcher names none to be next to, as smddprun."""

FAREWELL_SECONDS = 5.0
MEMORY_SHARE = 0.03
"""Of what is free, for one buffer: two are needed, and eight processes may share a host's."""

MOST_BYTES = 2**30


@dataclass(frozen=True)
class RankInfo:
    """Where a process sits, from what launchers set."""

    rank: int
    world_size: int
    lane: int
    lanes: int
    node: int

    @classmethod
    def read(cls, hosts: ResourceConfig) -> RankInfo:
        def number(name: str, default: int) -> int:
            return int(os.environ.get(name, default))

        rank, lanes = number("RANK", 0), number("LOCAL_WORLD_SIZE", 1)
        node = hosts.node_rank if len(hosts.hosts) > 1 else rank // lanes
        return cls(rank, number("WORLD_SIZE", 1), number("LOCAL_RANK", 0), lanes, node)


def main(arguments: list[str] | None = None) -> None:
    """Examine and leave the verdict in ``--verdict``; the process ends without any farewell."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--stage", required=True)
    parser.add_argument("--document", type=Path, required=True)
    parser.add_argument("--verdict", type=Path, required=True)
    options = parser.parse_args(arguments)
    exit_with_launcher()
    settings = read_job_config(options.document, options.stage)
    directories = SageMakerPaths.from_environment()
    process = _Process(settings, directories, options.verdict.parent / "nccl.log")
    try:
        verdict = process.run()
        write_atomic(options.verdict, json.dumps(verdict).encode())
    except Exception:
        traceback.print_exc()
    # Groups are not destroyed, and a thread may hang in one.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


class _Process:
    """One of the doctor's processes; NCCL writes its log to ``log``."""

    def __init__(self, settings: JobConfig, directories: SageMakerPaths, log: Path) -> None:
        hosts = ResourceConfig.read(directories)
        self._settings, self._directories, self._hosts = settings, directories, hosts
        self._started = time.monotonic()
        self._deadline = self._started + settings.doctor.timeout
        self._seat = RankInfo.read(hosts)
        self._events = EventLog(node=self._seat.node, rank=self._seat.rank)
        choice = decide(nodes=len(hosts.hosts), backend="nccl", instance_type=hosts.instance_type)
        self._backend = choice.backend
        for name, value in choice.environment.items():
            os.environ.setdefault(name, value)
        self._log = log
        os.environ |= {
            "NCCL_DEBUG": "INFO",
            "NCCL_DEBUG_SUBSYS": "INIT,NET",
            "NCCL_DEBUG_FILE": str(self._log),
            # A collective that hangs raises here, instead of aborting the process from a thread.
            "TORCH_NCCL_BLOCKING_WAIT": "1",
            "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
        }
        if interface := _interface(directories):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
        gpu = choice.backend != "gloo" and torch.cuda.is_available()
        self._device = torch.device("cuda", self._seat.lane) if gpu else torch.device("cpu")
        if gpu:
            torch.cuda.set_device(self._device)

    def run(self) -> dict[str, Any]:
        """The verdict, as all ranks hear it."""
        self._gpus = read_gpus() if self._device.type == "cuda" else ()
        try:
            self._host, self._port = self._find_store()
            meeting, own = self._meet(), self._meet()
        except (MissingRankError, RuntimeError) as error:
            return self._alone(str(error).splitlines()[0])
        examined = threading.Event()
        threading.Thread(target=self._examine, args=(meeting, examined), daemon=True).start()
        if self._seat.rank != 0:
            return self._hear(own)
        in_time = examined.wait(max(0.0, self._deadline - RESERVE_SECONDS - time.monotonic()))
        return self._judge(own, cut_short=not in_time)

    # ------------------------------------------------------------------ the store

    def _find_store(self) -> tuple[str, int]:
        """Host and port; the first process keeps the store, at a port that all can know."""
        self._patience = JOIN_SHARE * self._settings.doctor.timeout
        host = os.environ.get("MASTER_ADDR", self._hosts.hosts[0])
        port = int(os.environ.get("MASTER_PORT", PORT - 1))
        first = self._seat.rank == 0
        if self._seat.world_size == 1:
            self._kept = open_store("127.0.0.1", 0, first=True, patience=self._patience)
            return "127.0.0.1", self._kept.port
        if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
            if first:
                self._kept = open_store(host, port + 1, first=True, patience=self._patience)
            return host, port + 1
        # The launcher's own store says at which free port ours is; it must not be used itself,
        # since training meets there.
        known = StoreBarrier(open_store(host, port, first=False, patience=self._patience), 1, 1)
        key = f"doctor-port/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
        if first:
            self._kept = open_store(host, 0, first=True, patience=self._patience)
            known.put(key, self._kept.port)
        return host, known.wait(key, self._patience)

    def _meet(self) -> StoreBarrier:
        """A connection of its own: one that waits would make others wait."""
        # Torch tries twice.
        store = open_store(self._host, self._port, first=False, patience=self._patience / 2)
        return StoreBarrier(store, self._seat.rank, self._seat.world_size)

    def _alone(self, why: str) -> dict[str, Any]:
        """The store cannot be reached: all there is to say."""
        host = self._hosts.hosts[0]
        message = (
            f"{self._hosts.current_host} did not reach {host}, where the processes meet, within "
            f"{self._patience:.0f} s: {why}; the security group must let its members reach each "
            "other on all ports, in and out"
        )
        if self._seat.lane == 0:
            self._events.warn("doctor-store", message)
        return {"level": "fail", "sentence": message}

    # ------------------------------------------------------------------ measuring

    def _examine(self, meeting: StoreBarrier, examined: threading.Event) -> None:
        try:
            self._go_through_parts(meeting)
        except MissingRankError as error:
            meeting.put(f"failed/meeting/{self._seat.rank}", str(error))
        except Exception as error:
            line = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
            with contextlib.suppress(RuntimeError):  # it may be the store that is gone
                meeting.put(f"failed/process/{self._seat.rank}", line)
        finally:
            examined.set()

    def _go_through_parts(self, meeting: StoreBarrier) -> None:
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)  # each thread has one of its own
        examination = ClusterBenchmark(
            meeting,
            self._member(),
            self._device,
            limit=self._settings.doctor.timeout,
            deadline=self._deadline,
        )
        examination.join(self._patience, self._most_bytes())
        examination.measure_node(self._speeds)
        examination.sweep_all()
        if self._log.exists():
            log = parse_nccl_log(self._log.read_text(errors="replace").splitlines())
            meeting.put(f"log/{self._seat.node}/{self._seat.rank}", asdict(log))
        examination.play_tournament()
        examination.finish()

    def _member(self) -> RankFacts:
        seat, versions = self._seat, node_facts.versions()
        driver = self._gpus[0].driver if self._gpus else None
        return RankFacts(
            rank=seat.rank,
            node=seat.node,
            lane=seat.lane,
            world_size=seat.world_size,
            gpus=torch.cuda.device_count() if self._device.type == "cuda" else 0,
            instance_id=node_facts.instance_id(),
            versions=versions | {"driver": driver},
        )

    def _most_bytes(self) -> int:
        if self._device.type == "cuda":
            free = torch.cuda.mem_get_info(self._device)[0]
        else:
            free = node_facts.free_memory()
        return int(min(MOST_BYTES, MEMORY_SHARE * free))

    def _speeds(self, first: bool) -> NodeSpeeds:
        speeds = NodeSpeeds(
            matmul_tflops=node_benchmarks.matmul_tflops(self._device),
            host_to_device=node_benchmarks.host_to_device_bytes_per_second(self._device),
        )
        if not first:
            return speeds
        shards = sorted(self._directories.channel("train").rglob("*.tar"))
        data, stage = self._settings.data, self._settings.stage
        return replace(
            speeds,
            disk=node_benchmarks.disk_bytes_per_second(Path(tempfile.gettempdir())),
            channel=node_benchmarks.read_bytes_per_second(shards),
            decoded_images=self._loaded(
                node_benchmarks.decoded_per_second(shards, data.image_key, stage.resolution)
            ),
            gpus=tuple(asdict(one) for one in self._gpus),
        )

    def _loaded(self, each: float | None) -> float | None:
        """Images a second of the node, if each loader process, one a core at most, does so many."""
        workers = max(1, self._settings.training.decode_workers) * self._seat.lanes
        return None if each is None else each * min(workers, node_facts.cores())

    # ------------------------------------------------------------------ the verdict

    def _judge(self, meeting: StoreBarrier, *, cut_short: bool) -> dict[str, Any]:
        evidence = self._collect(meeting, cut_short=cut_short)
        verdict = conclude(self._settings, evidence, self._directories, self._events)
        meeting.put("verdict", verdict)
        deadline = time.monotonic() + FAREWELL_SECONDS
        waiting = {one.rank for one in evidence.members} - {0} - evidence.gone.keys()
        while waiting and time.monotonic() < deadline:
            waiting = {rank for rank in waiting if meeting.get(f"heard/{rank}") is None}
            time.sleep(POLL_SECONDS)
        return verdict

    def _hear(self, meeting: StoreBarrier) -> dict[str, Any]:
        left = self._deadline + FAREWELL_SECONDS - time.monotonic()
        try:
            verdict: dict[str, Any] = meeting.wait("verdict", left)
            meeting.put(f"heard/{self._seat.rank}", 1)
        except (MissingRankError, RuntimeError) as error:
            return {"level": "fail", "sentence": f"no verdict: {str(error).splitlines()[0]}"}
        return verdict

    def _collect(self, meeting: StoreBarrier, *, cut_short: bool) -> ClusterMeasurements:
        """Everything that reached the store."""
        ranks = range(meeting.size)
        facts = {rank: meeting.get(f"facts/{rank}") for rank in ranks}
        roll = meeting.get("join/roll") or [[], 0.0, []]
        waited = dict(map(tuple, roll[2]))
        members = [
            RankFacts(**{key: value for key, value in one.items() if key != "most_bytes"})
            for rank, one in facts.items()
            if one is not None and rank in waited
        ]
        members = [replace(one, waited=waited[one.rank]) for one in members]
        speeds = {one.rank: meeting.get(f"speeds/{one.rank}") for one in members}
        nodes = sorted({one.node for one in members})
        lanes = sorted({one.lane for one in members})
        world = meeting.get("world/timed/all")
        return ClusterMeasurements(
            hosts=self._hosts.hosts if len(self._hosts.hosts) > 1 else _named(nodes, self._hosts),
            instance_type=self._hosts.instance_type,
            world_size=meeting.size,
            backend=self._backend,
            join_seconds=self._patience,
            members=tuple(members),
            absent=tuple(rank for rank in ranks if rank not in waited),
            too_late=tuple(rank for rank in ranks if facts[rank] and rank not in waited),
            gone={one.rank: part for one in members if (part := meeting.get(f"gone/{one.rank}"))},
            speeds={rank: NodeSpeeds(**one) for rank, one in speeds.items() if one},
            world=timed_from(world) if world else None,
            intra=_all_timed(meeting, "intra", nodes),
            inter=_all_timed(meeting, "inter", lanes),
            pairs=_pairs(meeting, nodes, lanes),
            logs=_logs(meeting, members),
            failures=_failures(meeting, members),
            cut_short=cut_short,
            seconds=round(time.monotonic() - self._started, 1),
        )


def _named(nodes: list[int], hosts: ResourceConfig) -> tuple[str, ...]:
    """Names where the platform names one host alone."""
    if len(nodes) < 2:
        return hosts.hosts
    return tuple(f"node-{node + 1}" for node in range(nodes[-1] + 1))


def _interface(directories: SageMakerPaths) -> str | None:
    """The network interface that the platform names."""
    path = directories.input_config / "resourceconfig.json"
    if not path.exists():
        return None
    name: str | None = json.loads(path.read_text()).get("network_interface_name")
    return name


def _all_timed(meeting: StoreBarrier, part: str, names: list[int]) -> dict[int, GroupMeasurement]:
    found = {name: meeting.get(f"{part}/timed/{name}") for name in names}
    return {name: timed_from(one) for name, one in found.items() if one}


def _pairs(meeting: StoreBarrier, nodes: list[int], lanes: list[int]) -> tuple[PairResult, ...]:
    """The better of two meetings: chance only slows."""
    found = []
    for place, a in enumerate(nodes):
        for b in nodes[place + 1 :]:
            for lane in lanes:
                both = [meeting.get(f"{part}/{a}-{b}/{lane}") for part in ("pairs", "again")]
                known = [one for one in both if one]
                if known:
                    best = max(known, key=lambda one: float(one["bandwidth"]))
                    found.append(PairResult(**best | {"nodes": (a, b)}))
    return tuple(found)


def _logs(meeting: StoreBarrier, members: list[RankFacts]) -> dict[int, dict[str, Any]]:
    """One log of each node: that of its first process which has any."""
    found: dict[int, dict[str, Any]] = {}
    for one in members:
        if one.node not in found and (log := meeting.get(f"log/{one.node}/{one.rank}")):
            found[one.node] = log
    return found


def _failures(meeting: StoreBarrier, members: list[RankFacts]) -> dict[str, str]:
    found = {}
    for part in ("world", "intra", "inter", "meeting", "process"):
        for one in members:
            said = meeting.get(f"failed/{part}/{one.rank}")
            if said and part not in found:
                found[part] = f"rank {one.rank}: {said}"
    return found


if __name__ == "__main__":
    main()
