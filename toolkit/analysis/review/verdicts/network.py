"""Judges the network transport, and the doctor's result before training."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
from sm_train.entrypoints.distributed.nccl_log import NcclLog, TransportProblem, transport_problem
from sm_train.toolkit.analysis.review.job_facts import JobFacts
from sm_train.toolkit.analysis.review.job_log import finite
from sm_train.toolkit.analysis.review.review_model import Level, Verdict
from sm_train.toolkit.analysis.review.verdicts.traffic import network_use
from sm_train.toolkit.records.job_logs import Event
from sm_train.toolkit.terminal.formatting import format_quantity

_DOCTOR_LEVELS: dict[str, Level] = {"ok": "good", "warn": "warning", "fail": "bad"}


def transport(facts: JobFacts) -> Verdict:
    """Judge which network NCCL used on each node, and the share of its channels with RDMA."""
    question = "Which network transport was used between nodes?"
    if not facts.multi_node and facts.log.last("start"):
        return Verdict("network", "good", question, "none: it ran on a single node")
    if facts.backend == "gloo":
        return Verdict("network", "good", question, "Gloo over sockets, as usual on CPUs")
    logs = {node: log for node, log in facts.log.nccl.items() if log.fabric is not None}
    traffic = tuple(_traffic(facts))
    if not logs:
        return Verdict(
            "network",
            "unknown",
            question,
            "the log has no NCCL messages about it",
            traffic,
            "set NCCL_DEBUG=INFO, the default unless cluster.environment changes it",
        )
    evidence = (
        *(f"{node or 'the log'}: {log}" for node, log in sorted(logs.items(), key=str)),
        *traffic,
    )
    instance = facts.instance_type
    problems = {
        node: problem
        for node, log in logs.items()
        if (
            problem := transport_problem(
                log,
                has_rdma=None if instance is None or instance.is_own else instance.supports_efa,
                adapters=None if instance is None else instance.efa_interfaces,
            )
        )
    }
    if problems:
        return _problem(problems, logs, evidence)
    unknown = [log for log in logs.values() if log.fabric != "sockets" and not log.channels]
    labels = ", ".join(sorted({str(log) for log in logs.values()}))
    verdict = Verdict("network", "unknown" if unknown else "good", question, labels, evidence)
    return verdict if unknown else _with_use(facts, verdict)


def _problem(
    problems: Mapping[str | None, TransportProblem],
    logs: Mapping[str | None, NcclLog],
    evidence: tuple[str, ...],
) -> Verdict:
    """Name the worst problem, and its nodes unless all have it."""
    worst = min(problems.values(), key=lambda problem: _SEVERITY.index(problem.code))
    nodes = sorted(str(node) for node, problem in problems.items() if problem.code == worst.code)
    where = "" if len(nodes) == len(logs) else f"{', '.join(nodes)}: "
    return Verdict(
        "network",
        "bad" if worst.code == "transport-sockets" else "warning",
        "Which network transport was used between nodes?",
        f"{where}{worst.sentence}",
        evidence,
        worst.fix,
    )


_SEVERITY = ("transport-sockets", "transport-no-rdma", "adapters-missing")


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
        known = np.concatenate([finite(rate) for rate in rates]) if rates else np.array([])
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
    return [
        *parts,
        *(str(warning.first[-1]["message"]) for warning in warnings if warning is not None),
    ]
