"""The trainer's parts: backend, average, presets, settings, events, checkpoints."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sm_train.entrypoints.checkpointing import manifest
from sm_train.entrypoints.checkpointing.sharded_tensors import ShardSpec, save_shards
from sm_train.entrypoints.common.events import FIELDS, format_event
from sm_train.entrypoints.common.job_config import JobConfigError, read_job_config
from sm_train.entrypoints.common.sagemaker_paths import ResourceConfig, SageMakerPaths
from sm_train.entrypoints.distributed.backend import choose
from sm_train.entrypoints.models.components import read_preset
from sm_train.entrypoints.training.ema import ExponentialMovingAverage
from sm_train.toolkit.jobs.events import parse_event

from tests.support.run_documents import config, job_document

P4DE = {"instance_type": "ml.p4de.24xlarge", "gpus": 8, "efa": True}
SMDDP = {"smddp_installed": True, "mpi": True}
P5 = {"instance_type": "ml.p5.48xlarge", "gpus": 8, "efa": True}


@pytest.mark.parametrize(
    ("situation", "backend", "reason"),
    [
        ({**P4DE, "nodes": 4, **SMDDP}, "smddp", "SMDDP in the image"),
        ({**P4DE, "nodes": 4, "smddp_installed": True}, "nccl", "NCCL over EFA"),
        ({**P4DE, "nodes": 4}, "nccl", "NCCL over EFA"),
        ({**P4DE, "nodes": 4, **SMDDP, "backend": "nccl"}, "nccl", "EFA"),
        ({**P4DE, "nodes": 1, **SMDDP}, "nccl", "one node"),
        ({**P5, "nodes": 4, **SMDDP}, "nccl", "NCCL over EFA"),
        ({**P5, "nodes": 4, "efa": False}, "nccl", "slow between nodes"),
        ({"nodes": 2}, "gloo", "no GPU"),
        ({**P5, "nodes": 1, "processes": 1}, "none", "a single process"),
    ],
)
def test_the_backend_follows_from_what_is_there(
    situation: dict[str, Any], backend: str, reason: str
) -> None:
    choice = choose(**(SITUATION | situation))
    assert choice.backend == backend
    assert reason in choice.reason


SITUATION: dict[str, Any] = {
    "instance_type": None,
    "nodes": 1,
    "processes": 16,
    "gpus": 0,
    "backend": "auto",
    "smddp_installed": False,
    "efa": False,
    "mpi": False,
}


@pytest.mark.parametrize("machine", ["ml.p5.48xlarge", "ml.p5en.48xlarge", "ml.p6-b200.48xlarge"])
def test_several_machines_with_efa_are_told_to_use_it(machine: str) -> None:
    choice = choose(**(SITUATION | P5 | {"nodes": 2, "instance_type": machine}))
    assert choice.set_variables == {"FI_PROVIDER": "efa", "FI_EFA_USE_DEVICE_RDMA": "1"}


@pytest.mark.parametrize("machine", [P5 | SMDDP, P4DE, P4DE | {"smddp_installed": True}])
def test_smddp_where_it_cannot_run_is_an_error(machine: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="nccl would"):
        choose(**(SITUATION | machine | {"nodes": 2, "backend": "smddp"}))


@pytest.mark.parametrize("start", [0, 12])
def test_the_average_equals_diffusers_own(start: int) -> None:
    from diffusers.training_utils import EMAModel

    generator = torch.Generator().manual_seed(0)
    parameters = [torch.nn.Parameter(torch.randn(7, 5, generator=generator)) for _ in range(3)]
    ours = ExponentialMovingAverage(parameters, 0.999, start)
    theirs = EMAModel(parameters, decay=0.999, update_after_step=start)
    for _ in range(30):
        with torch.no_grad():
            for parameter in parameters:
                parameter += torch.randn(7, 5, generator=generator)
        ours.update()
        theirs.step(parameters)
    for own, other in zip(ours.averages, theirs.shadow_params, strict=True):
        # Their update subtracts, ours interpolates: the same number up to rounding.
        torch.testing.assert_close(own, other, rtol=1e-5, atol=1e-6)


def test_an_unknown_preset_names_the_known() -> None:
    with pytest.raises(JobConfigError, match="digits, dit-xl, mmdit-20b"):
        read_preset("sd9")


def test_the_run_document_is_read_by_stage(tmp_path: Path) -> None:
    document = job_document(config())
    path = tmp_path / "job.json"
    path.write_text(json.dumps(document))
    settings = read_job_config(path, "256px")
    assert settings.stage.gradient_accumulation_steps == 2
    assert settings.training.warmup_steps == 1000
    with pytest.raises(JobConfigError, match=r"--stage: 'x' .*it has 256px"):
        read_job_config(path, "x")
    del document["256px"]["training"]["seed"]
    path.write_text(json.dumps(document))
    with pytest.raises(JobConfigError, match="seed is missing"):
        read_job_config(path, "256px")
    with pytest.raises(JobConfigError, match="no job configuration"):
        read_job_config(tmp_path / "none.json", "256px")


@given(
    st.sampled_from(sorted(FIELDS)),
    st.dictionaries(st.text(min_size=1), st.floats() | st.integers() | st.text()),
)
def test_what_the_writer_writes_the_reader_reads(kind: str, more: dict[str, Any]) -> None:
    fields = dict.fromkeys(FIELDS[kind], 1.5) | {
        key: value for key, value in more.items() if key not in ("kind", "time", "node", "rank")
    }
    line = format_event(kind, fields, time=2.0, node=1, rank=9)
    assert "\n" not in line
    event = parse_event(f"[1,9]<stdout>: {line}")
    assert event is not None
    assert (event["kind"], event["node"], event["rank"]) == (kind, 1, 9)
    assert FIELDS[kind] <= event.keys()


def test_an_event_that_breaks_the_contract_is_not_written() -> None:
    with pytest.raises(ValueError, match="lacks loss"):
        format_event("step", dict.fromkeys(FIELDS["step"] - {"loss"}, 1), time=0, node=0, rank=0)
    with pytest.raises(ValueError, match="unknown event kind"):
        format_event("news", {}, time=0, node=0, rank=0)


def test_nan_is_null_in_an_event() -> None:
    fields = dict.fromkeys(FIELDS["step"], float("nan"))
    event = parse_event(format_event("step", fields, time=0, node=0, rank=0))
    assert event is not None
    assert event["loss"] is None


def write_checkpoint(checkpoints: Path, step: int) -> Path:
    folder = manifest.step_folder(checkpoints, step)
    folder.mkdir(parents=True)
    pieces = {ShardSpec("weight", (0,)): torch.full((3,), float(step))}
    file = manifest.write_file(folder, "model.safetensors", lambda path: save_shards(path, pieces))
    manifest.write_marker(folder, step, 1, "same", [file])
    return folder


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-10])


def flip(path: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))


@pytest.mark.parametrize(
    ("harm", "reason"),
    [
        (lambda folder: (folder / "complete.json").unlink(), "incomplete"),
        (lambda folder: cut(folder / "complete.json"), "damaged"),
        (lambda folder: (folder / "model.safetensors").unlink(), "is missing"),
        (lambda folder: cut(folder / "model.safetensors"), "bytes of"),
        (lambda folder: flip(folder / "model.safetensors"), "is not what was written"),
    ],
)
def test_the_newest_whole_checkpoint_is_found(tmp_path: Path, harm: Any, reason: str) -> None:
    for step in (10, 20, 30):
        write_checkpoint(tmp_path, step)
    harm(manifest.step_folder(tmp_path, 30))
    passed: list[str] = []
    found = manifest.latest_complete(
        tmp_path, lambda folder, why: passed.append(f"{folder.name} {why}")
    )
    assert found is not None
    assert found.step == 20
    [why] = passed
    assert why.startswith("step-00000030")
    assert reason in why


def test_a_save_that_fails_leaves_no_file(tmp_path: Path) -> None:
    def fail(path: Path) -> None:
        path.write_bytes(b"half")
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        manifest.write_file(tmp_path, "model.safetensors", fail)
    assert list(tmp_path.iterdir()) == []


def test_the_platform_names_the_hosts_and_a_laptop_is_one(tmp_path: Path) -> None:
    directories = SageMakerPaths(tmp_path)
    assert ResourceConfig.read(directories) == ResourceConfig("algo-1", ("algo-1",), None)
    directories.input_config.mkdir(parents=True)
    document = {
        "current_host": "algo-2",
        "current_instance_type": "ml.p5.48xlarge",
        "hosts": ["algo-1", "algo-2"],
    }
    (directories.input_config / "resourceconfig.json").write_text(json.dumps(document))
    hosts = ResourceConfig.read(directories)
    assert (hosts.rank, hosts.instance_type) == (1, "ml.p5.48xlarge")
