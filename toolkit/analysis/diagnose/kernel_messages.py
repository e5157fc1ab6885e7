"""Decides whether a message of the kernel, the GPU driver or systemd is about the job.

Node logs and journals hold messages about every program of the machine. A message names its
process: it counts for the job if the name is one of Python or a launcher, or if the log mentions
the process id elsewhere. A machine-wide event, such as a GPU that falls off the bus, has no owner.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from sm_train.toolkit.analysis.diagnose.matches import Match

# Xid errors of one process. Others are of the GPU, whatever process was there.
_OF_A_PROCESS = ("xid-13", "xid-31", "xid-channel", "xid-ecc-contained", "xid-other")
_OUT_OF_MEMORY = "host-out-of-memory"

_OWNERS = (
    # "Out of memory: Killed process 140339 (python3) total-vm:…", older: "…, UID 1000, (python3)"
    re.compile(r"\bKill(?:ed)? process (?P<pid>\d+)(?:, UID \d+,)? \((?P<name>[^)]+)\)"),
    # "oom-kill:constraint=CONSTRAINT_MEMCG,…,task=python3,pid=140339,uid=0"
    re.compile(r"\boom-kill:constraint=.*\btask=(?P<name>[^,]+),pid=(?P<pid>\d+)"),
    # "mysqld[812]: segfault at 0 ip …", "traps: node[77] trap invalid opcode ip:…"
    re.compile(r"(?P<name>[^\s\[]+)\[(?P<pid>\d+)\]: segfault at "),
    re.compile(r"\btraps: (?P<name>[^\s\[]+)\[(?P<pid>\d+)\] "),
    # "INFO: task kworker/3:1:97 blocked for more than 120 seconds."
    re.compile(r"\bINFO: task (?P<name>\S+):(?P<pid>\d+) blocked for "),
)
_XID_OWNER = re.compile(r"NVRM: Xid \([^)]*\): \d+, pid=(?P<pid>\d+), name=(?P<name>[^,\s]+)")
# "mysqld invoked oom-killer: gfp_mask=…": the victim may be another process
_INVOKER = re.compile(r"^(?P<name>\S+) invoked oom-killer")
# "mysql.service: Main process exited, …, status=9/KILL", "…: Failed with result 'oom-kill'."
_UNIT = re.compile(r"^(?P<name>[\w@.:\\-]+\.(?:service|scope|slice|mount)): ")
_JOB_NAME = re.compile(
    r"python|^(?:pt_|torch|accelerate|deepspeed|mpi|orte|prte|srun|slurm|ray\b|raylet|sm-train|nccl"
    r"|cuda|nv_queue|composer|nemo|bash$|sh$|train)",
    re.IGNORECASE,
)
_JOB_UNIT = re.compile(
    r"python|torch|train|slurm|docker|containerd|cri-|kube|ray|session|user@", re.IGNORECASE
)


@dataclass(frozen=True)
class Owner:
    """The process that a message is about; ``pid`` is None for an invoker or a systemd unit."""

    name: str
    pid: int | None = None

    @property
    def is_known(self) -> bool:
        """Whether the name alone shows that it is the job's."""
        pattern = _JOB_UNIT if "." in self.name and _UNIT.match(f"{self.name}: ") else _JOB_NAME
        return pattern.search(self.name) is not None


def owner_of(match: Match) -> Owner | None:
    """Return the process that a message is about; None if it names none, or needs no owner."""
    if match.code.startswith("xid-"):
        found = _XID_OWNER.search(match.text) if match.code in _OF_A_PROCESS else None
    else:
        found = next((owner for pattern in _OWNERS if (owner := pattern.search(match.text))), None)
        if found is None and (unit := _UNIT.match(match.text) or _INVOKER.match(match.text)):
            return Owner(unit["name"])
    return None if found is None else Owner(found["name"], int(found["pid"]))


def of_other_programs(
    matches: Sequence[Match], read_lines: Callable[[], Iterable[bytes]]
) -> list[Match]:
    """Return the messages that are about programs other than the job's.

    ``read_lines`` reads the whole log again, as blocks of whole lines; it is called only if a
    message is about a process with an unknown name.
    """
    owners = {index: owner for index, match in enumerate(matches) if (owner := owner_of(match))}
    unknown = {owner.pid for owner in owners.values() if owner.pid and not owner.is_known}
    mentioned = _mentioned(unknown, read_lines) if unknown else set()

    def is_the_jobs(owner: Owner) -> bool:
        return owner.is_known or owner.pid in mentioned

    victims = [
        is_the_jobs(owner)
        for index, owner in owners.items()
        if owner.pid is not None and matches[index].code == _OUT_OF_MEMORY
    ]
    others = []
    for index, match in enumerate(matches):
        owner = owners.get(index)
        if match.code == _OUT_OF_MEMORY and victims and (owner is None or owner.pid is None):
            # A stack of the kernel or the process that needed memory: the victims decide.
            if not any(victims) and (owner is not None or "oom_kill" in match.text):
                others.append(match)
        elif owner is not None and not is_the_jobs(owner):
            others.append(match)
    return others


def _mentioned(pids: set[int], read_lines: Callable[[], Iterable[bytes]]) -> set[int]:
    """Return the process ids that a line other than the kernel's mentions."""
    pattern = re.compile(rb"\b(?:%s)\b" % b"|".join(str(pid).encode() for pid in pids))
    kernel = re.compile(
        rb"Kill(?:ed)? process|oom-kill|oom_reaper|segfault at|traps: |Xid|blocked for"
        rb"|\[ *\d+\] +\d"  # the kernel's table of processes
    )
    return {
        int(found[0])
        for block in read_lines()
        for line in block.split(b"\n")
        if (found := pattern.search(line)) and not kernel.search(line)
    }
