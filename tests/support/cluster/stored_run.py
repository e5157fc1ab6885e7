"""Stores what the nodes of a run on a cluster store, with the events of a simulated job."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sm_train.entrypoints.clusters.node_record import RUN_FILE, NodeRecord, NodeState, segment_name
from sm_train.entrypoints.job_interface.checkpoint_layout import (
    MARKER,
    CheckpointMarker,
    step_folder_name,
)
from sm_train.entrypoints.storage.storage import LocalFolder, write_file
from sm_train.estimators.bundle.bundle import run_document
from sm_train.estimators.config.schema import RunConfig

from tests.support.job_log_lines import SimulatedJob

COMMANDS = {
    "status": "kubectl get trainjob/art",
    "resume": "kubectl apply -f art.yaml",
    "stop": "kubectl delete trainjob/art",
}


@dataclass
class StoredRun:
    """A run below ``folder``, the place of its stages' checkpoints."""

    folder: Path
    config: RunConfig

    def storage(self, stage: str) -> LocalFolder:
        return LocalFolder(self.folder / stage)

    def attempt(
        self,
        end: float,
        *,
        job: SimulatedJob | None = None,
        texts: dict[int, list[str]] | None = None,
        stage: str = "256px",
        states: tuple[NodeState, ...] = ("training", "training"),
        codes: tuple[int | None, ...] = (None, None),
        platform: str = "kubernetes",
        **fields: Any,
    ) -> list[NodeRecord]:
        """Store an attempt whose newest heartbeats are at ``end``, Unix seconds."""
        job = job or SimulatedJob(nodes=len(states), intervals=30)
        lines = shifted_lines(job, end)
        if any(codes) or None in codes:
            lines = [[text for text in node if '"kind": "end"' not in text] for node in lines]
        times = [event_time(text) for node in lines for text in node if is_event(text)]
        storage, records = self.storage(stage), []
        write_file(storage, RUN_FILE, json.dumps(run_document(self.config)).encode())
        for number, (state, code) in enumerate(zip(states, codes, strict=True)):
            record = NodeRecord(
                run=self.config.name,
                stage=stage,
                platform=platform,
                node=f"algo-{number + 1}",
                nodes=len(states),
                instance_type=self.config.cluster.instance_type,
                host=f"pod-{number}",
                machine=f"gpu-{number + 1:02}",
                started=min(times) - 60,
                seen=end,
                ran=end - min(times) + 60,
                state=state,
                exit_code=code,
                commands=COMMANDS,
                **fields,
            )
            self.store(record, end)
            lines[number] += (texts or {}).get(number, [])
            log = "".join(f"{text}\n" for text in lines[number]).encode()
            middle = log.rfind(b"\n", 0, len(log) // 2) + 1
            for segment, content in enumerate((log[:middle], log[middle:])):
                write_file(storage, segment_name(record.folder, segment), content)
            records.append(record)
        return records

    def store(self, record: NodeRecord, at: float) -> None:
        """Store a record as if the storage had received it at ``at``, Unix seconds."""
        storage = self.storage(record.stage)
        write_file(storage, record.file, record.to_json())
        storage.set_modified_ns(record.file, int(at * 1e9))

    def checkpoint(self, step: int, stage: str = "256px") -> None:
        """Store a complete checkpoint."""
        marker = CheckpointMarker(step, 16, "0" * 64, (), "kubernetes")
        name = f"{step_folder_name(step)}/{MARKER}"
        write_file(self.storage(stage), name, marker.to_json().encode())


def is_event(text: str) -> bool:
    return text.startswith("SMT {")


def event_time(text: str) -> float:
    return float(json.loads(text[4:])["time"])


def shifted_lines(job: SimulatedJob, end: float) -> list[list[str]]:
    """Return each node's lines, shifted in time so that the newest event is at ``end``."""
    nodes: list[list[str]] = [[f"node {number} starts"] for number in range(job.nodes)]
    events = [json.loads(text[4:]) for _, text in job.lines() if is_event(text)]
    shift = end - max(event["time"] for event in events)
    for event in events:
        shifted = {**event, "time": event["time"] + shift}
        nodes[event["node"]].append(f"SMT {json.dumps(shifted)}")
    return nodes
