"""Logs of jobs on Kubernetes and Slurm, with the prefixes of `kubectl logs` and `srun --label`."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import Cli
from tests.support.job_log_lines import SimulatedJob, line

PODS = ("demo-256px-node-0-0-x7k2p", "demo-256px-node-0-1-9qwrt")
HOSTS = ("ip-10-1-8", "ip-10-1-9")
PREFIXES: dict[str, tuple[Callable[[int], str], tuple[str, str]]] = {
    "kubectl": (lambda node: f"[pod/{PODS[node]}/node] ", PODS),
    "srun": (lambda node: f"{node}: ", HOSTS),
}

TRACEBACK = """\
Traceback (most recent call last):
  File "/opt/ml/input/data/code/sm_train/entrypoints/train.py", line 120, in _train
    loss.backward()
torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."""


def write_log(path: Path, prefix: Callable[[int], str], *, fails: bool) -> Path:
    """Write the log of a job of two nodes, of which the second runs out of memory."""
    lines = [
        (node, f"sm-train start: node {node} of 2 ({host}; SLURM_NODEID), first node {HOSTS[0]}:1")
        for node, host in enumerate(HOSTS)
    ]
    lines += [(0, text) for _, text in SimulatedJob(nodes=2, intervals=30).lines() if text]
    if fails:
        lines = [(node, text) for node, text in lines if '"kind": "end"' not in text]
        lines += [(1, text) for text in TRACEBACK.splitlines()]
        message = "CUDA out of memory. Tried to allocate 2.00 GiB"
        lines.append((1, line("error", 2000, 1, code="OutOfMemoryError", message=message)))
    path.write_text("".join(f"{prefix(node)}{text}\n" for node, text in lines))
    return path


@pytest.mark.parametrize("platform", PREFIXES)
def test_diagnose_names_the_node_of_a_pod_or_task(cli: Cli, tmp_path: Path, platform: str) -> None:
    prefix, names = PREFIXES[platform]
    log = write_log(tmp_path / "job.log", prefix, fails=True)
    found = json.loads(cli("diagnose", log, "--json").stdout)
    assert found["cause"] == "gpu-out-of-memory"
    assert found["first_failure"]["node"] == names[1]
    # The task of `srun` is a node's, and no rank.
    assert found["first_failure"]["rank"] != 1
    assert "algo-" not in cli("diagnose", log).stdout


@pytest.mark.parametrize("platform", PREFIXES)
def test_review_reads_the_events_behind_the_prefix(cli: Cli, tmp_path: Path, platform: str) -> None:
    log = write_log(tmp_path / "job.log", PREFIXES[platform][0], fails=False)
    plain = write_log(tmp_path / "plain.log", lambda node: "", fails=False)
    verdicts = []
    for file in (log, plain):
        result = cli("review", file, "--json")
        assert result.returncode == 0, result.stderr
        document = json.loads(result.stdout)
        verdicts.append(json.dumps(document).replace(str(file), "FILE").replace(file.name, "FILE"))
    assert verdicts[0] == verdicts[1]
