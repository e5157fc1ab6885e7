"""What a canary proved about the platform, as facts with figures, for an issue or an archive.

Accounts, buckets, network and instance IDs and the run's name are replaced: the report is public.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from typing import Any, Literal, TypedDict

from sm_train.cost.instances import instance_type
from sm_train.entrypoints.storage.bucket_settings import bucket_key
from sm_train.estimators.config.naming import short_name, staging_bucket
from sm_train.toolkit.aws.bucket_policy import may_be_same_key
from sm_train.toolkit.probes.doctor.canary import CanaryJob, CanaryResult, first_event
from sm_train.toolkit.probes.doctor.canary_run import Canary
from sm_train.toolkit.records.job_logs import Event
from sm_train.toolkit.terminal.formatting import format_duration, format_quantity, format_usd

State = Literal["confirmed", "failed", "not observed"]
FactCode = Literal[
    "image-start",
    "rendezvous",
    "data",
    "transport",
    "checkpoint-sync",
    "checkpoint-encryption",
    "sigterm",
    "restore",
    "completion",
    "model-output",
]
PlatformName = Literal["sagemaker", "local"]

_SOCKETS, _NO_RDMA = "transport-sockets", "transport-no-rdma"

_REDACTIONS = (
    (re.compile(r"s3://[a-z0-9.-]+"), "s3://<bucket>"),
    (re.compile(r"\b\d{12}\b"), "<account>"),
    (re.compile(r"\b(i|sg|subnet|vpc|eni)-[0-9a-f]{6,17}\b"), r"\1-<id>"),
    (re.compile(r"arn:aws[a-z-]*:[^\s\"']+"), "<arn>"),
    (re.compile(r"\b\d{1,3}(\.\d{1,3}){3}\b"), "<ip>"),
    (re.compile(r"(/home|/Users|/root)/?[^\s:\"']*"), "<path>"),
)


@dataclass(frozen=True)
class Fact:
    """One statement about the platform: whether the canary confirmed it, with the figures."""

    code: FactCode
    statement: str
    state: State
    figures: str


class CanaryDocument(TypedDict):
    """The document of ``doctor --canary --json``."""

    canary: str
    platform: PlatformName
    sm_train: str
    region: str
    instance_type: str
    instances: int
    image: str
    route: str
    backend: str | None
    facts: list[dict[str, Any]]
    jobs: list[dict[str, Any]]
    cost_usd: float | None


def canary_document(
    canary: Canary, result: CanaryResult, platform: PlatformName, nodes: int
) -> CanaryDocument:
    """Return the report, without anything that identifies the account or the run."""
    jobs = [job for job in (result.first, result.second) if job is not None]
    start = first_event(result.first.events, "start")
    document: CanaryDocument = {
        "canary": canary.config.name,
        "platform": platform,
        "sm_train": version("sm-train"),
        "region": canary.region,
        "instance_type": canary.config.cluster.instance_type,
        "instances": nodes,
        "image": canary.launch.image,
        "route": canary.launch.route,
        "backend": None if start is None else start["backend"],
        "facts": [asdict(fact) for fact in facts(canary, result, platform, nodes)],
        "jobs": [
            _job_document(job, result.before_stop if job is result.first else None) for job in jobs
        ],
        "cost_usd": _cost_usd(canary, jobs, nodes),
    }
    redacted: CanaryDocument = _redact(document, canary.run)
    return redacted


def is_confirmed(document: CanaryDocument) -> bool:
    """Return whether no fact failed and none stayed unobserved."""
    return all(fact["state"] == "confirmed" for fact in document["facts"])


def to_markdown(document: CanaryDocument) -> str:
    """Return the report as Markdown."""
    where = f"{document['instances']} × {document['instance_type']} in {document['region']}"
    if document["platform"] == "local":
        where = f"{document['instances']} emulated nodes on one machine: proves nothing about AWS"
    lines = [
        f"# Canary {document['canary']}",
        "",
        f"{where}; route {document['route']}, backend {document['backend'] or 'unknown'}; "
        f"sm-train {document['sm_train']}.",
        "",
        f"Image: `{document['image']}`",
        "",
        "| fact | | figures |",
        "|---|---|---|",
        *(
            f"| {fact['statement']} | **{fact['state']}** | {fact['figures']} |"
            for fact in document["facts"]
        ),
        "",
        "| job | status | billed | phases |",
        "|---|---|---|---|",
    ]
    for job in document["jobs"]:
        billed = job["billable_seconds"]
        phases = ", ".join(f"{name} {format_duration(took)}" for name, took in job["phases"])
        duration = "" if billed is None else format_duration(billed)
        lines.append(f"| {job['name']} | {job['status']} {job['reason']} | {duration} | {phases} |")
    lines += _reported_table(document)
    if document["cost_usd"] is not None:
        lines += ["", f"Cost: {format_usd(document['cost_usd'])}."]
    return "\n".join(lines) + "\n"


def _reported_table(document: CanaryDocument) -> list[str]:
    """Return what the platform states of a live and an ended job: which fields, and when."""
    first = document["jobs"][0]
    live, ended = first["reported_while_live"], first["reported"]
    names = [*ended, *(name for name in live if name not in ended)]
    if not names:
        return []
    rows = (f"| {name} | {live.get(name, '–')} | {ended.get(name, '–')} |" for name in names)
    header = "| the platform reports | of the live job | of the ended job |"
    return ["", header, "|---|---|---|", *rows]


def facts(
    canary: Canary, result: CanaryResult, platform: PlatformName, nodes: int
) -> Iterator[Fact]:
    """Yield what the canary proved, in the order in which a job meets it."""
    first, second = result.first, result.second
    start = first_event(first.events, "start")
    yield _image_start(first, start)
    yield _nodes(start, nodes)
    yield _data(first)
    yield _transport(canary, first, platform)
    yield _checkpoint_sync(result)
    if platform == "sagemaker":
        yield _checkpoint_encryption(canary, first)
    yield _sigterm(result)
    yield _restore(first, second)
    yield _completion(second)
    yield _model_output(second)


def _image_start(job: CanaryJob, start: Event | None) -> Fact:
    statement = "The image starts our launcher, which starts training"
    if start is None:
        return Fact("image-start", statement, "failed", job.reason or "no event was logged")
    figures = []
    if job.created is not None:
        figures.append(f"{start['time'] - job.created:.0f} s from creation to training")
    figures.append(f"start by {start['backend']}: {start['backend_reason']}")
    return Fact("image-start", statement, "confirmed", "; ".join(figures))


def _nodes(start: Event | None, nodes: int) -> Fact:
    statement = "All nodes find each other"
    if start is None:
        return Fact("rendezvous", statement, "not observed", "")
    state: State = "confirmed" if start["nodes"] == nodes else "failed"
    figures = f"{start['nodes']} of {nodes} nodes, {start['world_size']} ranks"
    return Fact("rendezvous", statement, state, figures)


def _data(job: CanaryJob) -> Fact:
    statement = "Each node reads its share of the shards from the data channel"
    epoch, step = first_event(job.events, "epoch"), first_event(job.events, "step")
    if epoch is None or step is None:
        return Fact("data", statement, "not observed", "")
    figures = f"{epoch['samples']:,} samples in {epoch['batches']:,} batches"
    if channel := _parts(job).get("shard reads"):
        figures += f"; shard reads {format_quantity(channel[0], channel[2])}"
    if epoch["unseen"]:
        return Fact("data", statement, "failed", f"{figures}; no node sees {epoch['unseen']:,}")
    figures += f"; waiting for data {step['data_wait_share']:.0%} of the time"
    return Fact("data", statement, "confirmed", figures)


def _transport(canary: Canary, job: CanaryJob, platform: PlatformName) -> Fact:
    statement = "The nodes use the fastest network that they have"
    doctor = first_event(job.events, "doctor")
    if doctor is None or doctor["network_bytes_per_second"] is None:
        return Fact("transport", statement, "not observed", doctor["sentence"] if doctor else "")
    measured = format_quantity(doctor["network_bytes_per_second"], "B/s")
    figures = f"all-reduce {measured}; {doctor['sentence']}"
    efa = instance_type(canary.config.cluster.instance_type).supports_efa
    if _NO_RDMA in doctor["findings"]:
        return Fact("transport", statement, "failed", f"without GPUDirect RDMA; {figures}")
    if _SOCKETS in doctor["findings"]:
        if platform == "sagemaker" and efa:
            return Fact("transport", statement, "failed", f"TCP in place of EFA; {figures}")
        unknown = f"TCP, and whether the nodes have RDMA adapters is not known; {figures}"
        return Fact("transport", statement, "not observed", unknown)
    return Fact("transport", statement, "confirmed", figures)


def _checkpoint_sync(result: CanaryResult) -> Fact:
    statement = "A checkpoint that the job writes is uploaded while it trains, and is complete"
    before = result.before_stop
    if before is None:
        reason = "; ".join(": ".join(skipped) for skipped in result.first.stored.skipped)
        return Fact("checkpoint-sync", statement, "failed", reason or "none was stored")
    figures = f"step {before.stored.step}"
    written = [
        event["time"]
        for event in before.events
        if event["kind"] == "checkpoint" and event["step"] == before.stored.step
    ]
    if written and result.stopped is not None:
        figures += f", at most {result.stopped - written[0]:.0f} s after it was written"
    return Fact("checkpoint-sync", statement, "confirmed", figures)


def _checkpoint_encryption(canary: Canary, job: CanaryJob) -> Fact:
    statement = "The bucket accepts checkpoints and encrypts them with the run's key"
    algorithm, key = job.encryption
    if algorithm is None:
        return Fact("checkpoint-encryption", statement, "not observed", "")
    bucket = staging_bucket(canary.config, canary.region)
    expected = bucket_key(canary.config.bucket_keys, bucket)
    figures = algorithm if key is None else f"{algorithm} with {key}"
    if expected is None:
        return Fact("checkpoint-encryption", statement, "confirmed", f"{figures}; no key is named")
    state: State = "confirmed" if may_be_same_key(expected, key) else "failed"
    return Fact("checkpoint-encryption", statement, state, f"{figures}; the run names {expected}")


def _sigterm(result: CanaryResult) -> Fact:
    statement = "A stop reaches the training, which saves a checkpoint within 120 s"
    if result.before_stop is None or result.stopped is None:
        return Fact("sigterm", statement, "not observed", "")
    end, stored = first_event(result.first.events, "end"), result.first.stored.step
    if end is None or end["reason"] != "sigterm":
        return Fact("sigterm", statement, "failed", "training did not log that it was stopped")
    if stored != end["step"]:
        figures = f"training ended at step {end['step']}, the newest checkpoint is {stored}"
        return Fact("sigterm", statement, "failed", figures)
    seconds = max(0.0, end["time"] - result.stopped)
    return Fact("sigterm", statement, "confirmed", f"step {stored}, {seconds:.0f} s after the stop")


def _restore(first: CanaryJob, second: CanaryJob | None) -> Fact:
    statement = "The next job gets the checkpoint on every node and resumes from it"
    if second is None:
        return Fact("restore", statement, "not observed", "")
    start = first_event(second.events, "start")
    if start is None:
        return Fact("restore", statement, "failed", second.reason)
    state: State = "confirmed" if start["resumed_from_step"] == first.stored.step else "failed"
    figures = f"stored step {first.stored.step}, resumed from {start['resumed_from_step']}"
    return Fact("restore", statement, state, figures)


def _completion(second: CanaryJob | None) -> Fact:
    statement = "A job that reaches its last step completes"
    if second is None:
        return Fact("completion", statement, "not observed", "")
    end = first_event(second.events, "end")
    if second.status != "Completed" or end is None or end["reason"] != "done":
        return Fact("completion", statement, "failed", f"{second.status} {second.reason}".strip())
    return Fact("completion", statement, "confirmed", f"step {end['step']}")


def _model_output(second: CanaryJob | None) -> Fact:
    statement = "The model is stored as files, not as an archive"
    if second is None or second.model_files is None or second.status != "Completed":
        return Fact("model-output", statement, "not observed", "")
    state: State = "confirmed" if second.model_files and not second.model_archives else "failed"
    figures = f"{second.model_files} files, {second.model_archives} archives"
    return Fact("model-output", statement, state, figures)


def _parts(job: CanaryJob) -> dict[str, list[Any]]:
    doctor = first_event(job.events, "doctor")
    parts: dict[str, list[Any]] = doctor.get("parts", {}) if doctor is not None else {}
    return parts


def _job_document(job: CanaryJob, live: CanaryJob | None) -> dict[str, Any]:
    return {
        "name": job.name,
        "status": job.status,
        "reason": job.reason,
        "billable_seconds": job.billable_seconds,
        "phases": job.phases,
        "reported": dict(job.reported),
        "reported_while_live": {} if live is None else dict(live.reported),
        "warnings": [event["message"] for event in job.events if event["kind"] == "warning"],
    }


def _cost_usd(canary: Canary, jobs: Sequence[CanaryJob], nodes: int) -> float | None:
    if canary.price.usd is None or any(job.billable_seconds is None for job in jobs):
        return None
    per_second = canary.price.usd / canary.price.seconds
    return per_second * sum(job.billable_seconds or 0.0 for job in jobs)


def _redact(value: Any, run: str) -> Any:
    if isinstance(value, dict):
        return {key: _redact(item, run) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_redact(item, run) for item in value]
    if not isinstance(value, str):
        return value
    for pattern, replacement in _REDACTIONS:
        value = pattern.sub(replacement, value)
    names = "|".join(map(re.escape, (run, short_name(run))))
    return re.sub(rf"\b({names})\b", "<run>", value)
