"""Judges the network transport, and the doctor's result before training."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from sm_train.toolkit.jobs.events import Event
from sm_train.toolkit.review.job_facts import JobFacts
from sm_train.toolkit.review.job_log import finite
from sm_train.toolkit.review.model import Level, Verdict
from sm_train.toolkit.review.verdicts.traffic import network_use
from sm_train.toolkit.terminal.formatting import format_quantity

_TRANSPORT_LABELS = {
    "efa-rdma": "EFA with GPUDirect RDMA",
    "efa": "EFA without GPUDirect RDMA",
    "infiniband": "InfiniBand",
    "sockets": "sockets",
}
_DOCTOR_LEVELS: dict[str, Level] = {"ok": "good", "warn": "warning", "fail": "bad"}

_FIX = (
    "use an image with aws-ofi-nccl (`sm-train image`) and a security group that allows all "
    "traffic between its members, and do not set NCCL_NET"
)


def transport(facts: JobFacts) -> Verdict:
    """Judge whether NCCL used EFA or sockets, by its log messages."""
    question = "Which network transport was used between nodes?"
    if not facts.multi_node and facts.log.last("start"):
        return Verdict("network", "good", question, "none: it ran on a single node")
    if facts.backend == "gloo":
        return Verdict("network", "good", question, "Gloo over sockets, as usual on CPUs")
    transports = {
        node: log.transport for node, log in facts.log.nccl.items() if log.transport is not None
    }
    traffic = tuple(_traffic(facts))
    if not transports:
        return Verdict(
            "network",
            "unknown",
            question,
            "the log has no NCCL messages about it",
            traffic,
            "set NCCL_DEBUG=INFO, the default unless cluster.environment changes it",
        )
    slow = sorted(str(node) for node, one in transports.items() if one == "sockets")
    evidence = (
        *(
            f"{node or 'the log'}: {_TRANSPORT_LABELS[one]}"
            for node, one in sorted(transports.items(), key=str)
        ),
        *traffic,
    )
    has_efa = facts.instance_type is None or facts.instance_type.supports_efa
    if slow and has_efa:
        where = "" if len(slow) == len(transports) else f" on {', '.join(slow)}"
        return Verdict(
            "network",
            "bad",
            question,
            f"sockets{where}: EFA is not used",
            evidence,
            _FIX,
        )
    if "efa" in transports.values():
        return Verdict(
            "network",
            "warning",
            question,
            "EFA without GPUDirect RDMA (no GDRDMA)",
            evidence,
            _FIX,
        )
    labels = ", ".join(sorted({_TRANSPORT_LABELS[one] for one in transports.values()}))
    return _with_use(facts, Verdict("network", "good", question, labels, evidence))


def _with_use(facts: JobFacts, verdict: Verdict) -> Verdict:
    """Compare the traffic over EFA, or else over other interfaces, with what the model needs."""
    has_efa = facts.instance_type is not None and facts.instance_type.supports_efa
    kind = "efa" if has_efa else "network"
    use = network_use(facts, f"{kind}_receive_bytes_per_second")
    if use is None:
        return verdict
    evidence = (*verdict.evidence, str(use))
    if use.level == "good":
        return replace(verdict, evidence=evidence)
    return replace(
        verdict,
        level=use.level,
        sentence=f"{verdict.sentence}, but {use.problem}",
        evidence=evidence,
        fix="`sm-train doctor` measures each link; stop and resume to get other instances, in one "
        "placement group, and check that NCCL's environment variables are those of the image",
    )


def _traffic(facts: JobFacts) -> list[str]:
    """Describe the mean receive rate of a node, and dropped packets."""
    traffic = []
    for label, name in (
        ("EFA", "efa_receive_bytes_per_second"),
        ("other interfaces", "network_receive_bytes_per_second"),
    ):
        rates = [table[name] for table in facts.log.nodes.values()]
        known = np.concatenate([finite(one) for one in rates]) if rates else np.array([])
        if len(known):
            traffic.append(f"{label}: {float(known.mean()) / 1e9:.3g} GB/s received per node")
    drops = sum(float(np.nansum(table["efa_drops"])) for table in facts.log.nodes.values())
    if drops:
        traffic.append(f"EFA dropped {drops:,.0f} packets")
    return traffic


def doctor(facts: JobFacts) -> Verdict | None:
    """Return the doctor's verdict on the cluster; None if it did not run."""
    result = facts.log.last("doctor")
    if result is None:
        return None
    slowdown = result["slowdown"]
    return Verdict(
        "doctor",
        _DOCTOR_LEVELS.get(str(result["level"]), "unknown"),
        "What did the doctor find before training?",
        str(result["sentence"]),
        tuple(_doctor_evidence(facts, result)),
        None
        if result["level"] == "ok"
        else "the log and the result next to the checkpoints suggest a fix for each finding"
        + (f"; the run was predicted to be {slowdown:.1f} × slower" if slowdown else ""),
    )


def _doctor_evidence(facts: JobFacts, result: Event) -> list[str]:
    """Describe the measurements of each part, and each finding with its fix."""
    parts = [
        f"{name}: {format_quantity(measured, unit)}"
        + (f" of {format_quantity(expected, unit)} expected" if expected else "")
        for name, (measured, expected, unit) in (result.get("parts") or {}).items()
        if measured is not None
    ]
    warnings = (facts.log.warnings.get(f"doctor-{code}") for code in result["findings"] or ())
    return [*parts, *(str(one.first[-1]["message"]) for one in warnings if one is not None)]
