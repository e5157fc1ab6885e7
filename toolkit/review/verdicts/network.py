"""Which way did the network take, and what did the examination before training say?"""

from __future__ import annotations

import numpy as np
from sm_train.toolkit.jobs.events import Event
from sm_train.toolkit.review.job_facts import JobFacts
from sm_train.toolkit.review.job_log import finite
from sm_train.toolkit.review.model import Level, Verdict

_WORDS = {
    "efa-rdma": "EFA with GPUDirect RDMA",
    "efa": "EFA without GPUDirect RDMA",
    "infiniband": "InfiniBand",
    "sockets": "sockets",
}
_DOCTOR: dict[str, Level] = {"ok": "good", "warn": "warning", "fail": "bad"}

_MEND = (
    "an image with aws-ofi-nccl (`sm-train image`), a security group that lets its members reach "
    "each other both ways, and no NCCL_NET of one's own"
)


def transport(facts: JobFacts) -> Verdict:
    """EFA or sockets, by what NCCL wrote."""
    question = "Which way did gradients travel between machines?"
    if not facts.multi_node and facts.log.last("start"):
        return Verdict("network", "good", question, "none: it ran on one machine")
    if facts.backend == "gloo":
        return Verdict("network", "good", question, "Gloo over sockets, as CPUs do")
    found = {
        node: said.transport for node, said in facts.log.nccl.items() if said.transport is not None
    }
    traffic = tuple(_traffic(facts))
    if not found:
        return Verdict(
            "network",
            "unknown",
            question,
            "NCCL's lines do not say",
            traffic,
            "NCCL_DEBUG=INFO, which jobs have unless cluster.environment changes it",
        )
    slow = sorted(str(node) for node, one in found.items() if one == "sockets")
    evidence = (
        *(f"{node or 'the log'}: {_WORDS[one]}" for node, one in sorted(found.items(), key=str)),
        *traffic,
    )
    fast = facts.machine is None or facts.machine.supports_efa
    if slow and fast:
        where = "" if len(slow) == len(found) else f" on {', '.join(slow)}"
        return Verdict(
            "network",
            "bad",
            question,
            f"sockets{where}: the fast network is not used",
            evidence,
            _MEND,
        )
    if "efa" in found.values():
        return Verdict(
            "network",
            "warning",
            question,
            "EFA, but not straight from the GPUs' memory (no GDRDMA)",
            evidence,
            _MEND,
        )
    ways = ", ".join(sorted({_WORDS[one] for one in found.values()}))
    return Verdict("network", "good", question, ways, evidence)


def _traffic(facts: JobFacts) -> list[str]:
    """What came in on each machine, on average."""
    found = []
    for label, name in (
        ("EFA", "efa_receive_bytes_per_second"),
        ("other interfaces", "network_receive_bytes_per_second"),
    ):
        rates = [table[name] for table in facts.log.nodes.values()]
        known = np.concatenate([finite(one) for one in rates]) if rates else np.array([])
        if len(known):
            found.append(f"{label}: {float(known.mean()) / 1e9:.3g} GB/s received by a machine")
    drops = sum(float(np.nansum(table["efa_drops"])) for table in facts.log.nodes.values())
    if drops:
        found.append(f"EFA dropped {drops:,.0f} packets")
    return found


def doctor(facts: JobFacts) -> Verdict | None:
    """The doctor's verdict on the cluster; None where it was not asked."""
    said = facts.log.last("doctor")
    if said is None:
        return None
    slowdown = said["slowdown"]
    return Verdict(
        "doctor",
        _DOCTOR.get(str(said["level"]), "unknown"),
        "What did the examination before training find?",
        str(said["sentence"]),
        tuple(_examined(facts, said)),
        None
        if said["level"] == "ok"
        else "each finding has its mend in the log, and in the result beside the checkpoints"
        + (f"; the run was predicted {slowdown:.1f} × slower" if slowdown else ""),
    )


def _examined(facts: JobFacts, said: Event) -> list[str]:
    """The parts' figures, and each finding with its mend."""
    from sm_train.toolkit.doctor.view import amount

    parts = [
        f"{name}: {amount(measured, unit)}"
        + (f" of {amount(expected, unit)} expected" if expected else "")
        for name, (measured, expected, unit) in (said.get("parts") or {}).items()
        if measured is not None
    ]
    found = (facts.log.warnings.get(f"doctor-{code}") for code in said["findings"])
    return [*parts, *(str(one.first[-1]["message"]) for one in found if one is not None)]
