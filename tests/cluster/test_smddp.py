"""Training with a stub in place of SMDDP, which only AWS's images include.

The stub supports CUDA tensors only, as torch's object collectives would find out: any of them
fails. It is loaded through the self-test that precedes training with the real library.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
from sm_train.toolkit.records.job_logs import parse_event

from tests.support.cluster.training_jobs import Job, tiny_run, write_shards
from tests.support.deadline import DEADLINE

pytestmark = pytest.mark.integration

STUB = Path(__file__).parents[1] / "support" / "cluster" / "smddp_stub"

# What a GPU node of AWS would make the program choose, and gradients that are not finite in steps 7
# to 9.
ENTRY = f"""
import os, sys
sys.path.insert(0, {str(STUB)!r})
import torch
from sm_train.entrypoints.distributed import backend, fsdp, smddp
from sm_train.entrypoints.training.train import main

backend.decide = lambda **_: backend.BackendChoice("smddp", "stub")
torch.cuda.set_device = lambda device: None
smddp.SELF_TEST_SECONDS = float(os.environ.get("SELF_TEST_SECONDS", smddp.SELF_TEST_SECONDS))
steps, norm = 0, fsdp.gradient_norm

def some_are_nan(parameters):
    global steps
    steps += 1
    return norm(parameters) * (float("nan") if 7 <= steps <= 9 else 1.0)

fsdp.gradient_norm = some_are_nan
main()
"""


def smddp_job(folder: Path, **options: Any) -> Job:
    job = Job(folder / "ml", tiny_run(**options))
    write_shards(job.train_channel, shards=4, each=20)
    write_shards(job.base / "input" / "data" / "validation", shards=2, each=4)
    (job.bundle / "train.py").write_text(ENTRY)
    return job


def run(job: Job) -> tuple[int, list[dict[str, Any]], str]:
    return job.run(processes=2)


def test_training_rollback_evaluation_and_stop_send_no_objects(tmp_path: Path) -> None:
    job = smddp_job(
        tmp_path,
        max_steps=10**6,
        checkpoint_every=3,
        max_nonfinite_steps=2,
        max_rollbacks=1,
        evaluation={"every_steps": 5, "prompts": ["a", "b", "c"], "num_inference_steps": 1},
    )
    with job.start(processes=2) as running:
        start = running.wait_for("start")
        assert start["backend"] == "smddp"
        running.wait_for("warning", code="rolled-back")
        running.wait_for("eval")
        for pid in running.workers():
            os.kill(pid, signal.SIGTERM)
        lines = list(running.lines())
        events = [event for line in lines if (event := parse_event(line))]
        assert running.process.wait(timeout=DEADLINE) == 0, "".join(lines)
    [end] = [event for event in events if event["kind"] == "end"]
    assert end["reason"] == "sigterm"
    assert (job.checkpoints / f"step-{end['step']:08d}" / "complete.json").is_file()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "problem"),
    [
        ("raise", "rank 0: RuntimeError: SMDDP does not support: stub"),
        ("wrong", "rank 0: RuntimeError: wrong result of all_reduce"),
        ("absent", "rank 0: ModuleNotFoundError: No module named 'smdistributed'"),
    ],
)
def test_failed_self_test_falls_back_with_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str, problem: str
) -> None:
    job = smddp_job(tmp_path, max_steps=2)
    monkeypatch.setenv("SMDDP_STUB", fault)
    if fault == "absent":
        (job.bundle / "train.py").write_text(ENTRY.replace("smddp_stub", "no-such-folder"))
    code, events, text = run(job)
    assert code == 0, text
    [warning] = [event for event in events if event.get("code") == "smddp-unavailable"]
    assert problem in warning["message"]
    assert warning["message"].endswith("; NCCL is used instead")
    [start] = [event for event in events if event["kind"] == "start"]
    assert start["backend_reason"] == "SMDDP fails its self-test"


def test_hanging_self_test_ends_the_job_with_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = smddp_job(tmp_path, max_steps=2)
    monkeypatch.setenv("SMDDP_STUB", "hang")
    monkeypatch.setenv("SELF_TEST_SECONDS", "1")
    code, events, text = run(job)
    assert code != 0
    assert "self-test does not end within 1 s; set cluster.backend: nccl" in job.failure
    assert {event["kind"] for event in events} == {"error"}, text
