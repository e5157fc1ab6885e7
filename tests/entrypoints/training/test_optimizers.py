"""Every optimizer and schedule resumes bit for bit; what a job cannot run is refused."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from sm_train.entrypoints.checkpoints import checkpoint_files
from sm_train.entrypoints.checkpoints.sharded_tensors import ShardSpec, save_shards
from sm_train.entrypoints.distributed.fsdp import gradient_norm
from sm_train.entrypoints.job_interface.checkpoint_layout import PROGRESS_FILE, shard_file_name
from sm_train.entrypoints.job_interface.job_config import JobConfigError, read_job_config
from sm_train.entrypoints.job_interface.optimizer_rules import is_hidden_matrix
from sm_train.entrypoints.training.lr_schedule import build_schedule
from sm_train.entrypoints.training.train_state import TrainState
from torch import nn

from tests.support.cluster.training_jobs import tiny_run
from tests.support.models import build
from tests.support.run_documents import write_job_file

USER_CODE = """
import torch


class KeepsNumbers(torch.optim.SGD):
    '''Keeps what optimizers keep: a number per weight, one per group, a factor of another shape.'''

    def __init__(self, weights, lr, boost=1.0):
        super().__init__(weights, lr=lr, momentum=0.9)
        for group in self.param_groups:
            group["boost"] = boost

    def step(self):
        for group in self.param_groups:
            group["boost"] *= 1.5
            group["seen"] = group.get("seen", 0) + 1
            for weight in group["params"]:
                state = self.state[weight]
                state["count"] = state.get("count", 0) + 1
                row = weight.grad.flatten()[:1].clone()
                state["row"] = state.get("row", torch.zeros(1, dtype=torch.float64)) + row
                weight.data.add_(state["row"].float() * 1e-3 * group["boost"] * state["count"])
        super().step()


class KeepsAList(torch.optim.SGD):
    def step(self):
        super().step()
        for weight in self.param_groups[0]["params"]:
            self.state[weight]["history"] = [torch.zeros(1)]


def not_an_optimizer(weights, lr):
    return None


def half(step, max_steps, floor=0.5):
    return floor if step > max_steps // 2 else 1.0


def negative(step, max_steps):
    return -1.0
"""


@pytest.fixture
def user_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_optimizers.py").write_text(USER_CODE)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "my_optimizers", raising=False)


def train_state(folder: Path, **training: Any) -> TrainState:
    path = write_job_file(folder, tiny_run(max_steps=9, learning_rate=0.01, **training))
    torch.manual_seed(0)
    # Large enough for moments in 8 bits (4,096 numbers), a convolution, and small biases.
    module = nn.Sequential(nn.Linear(80, 64), nn.Conv2d(3, 4, 3), nn.Linear(4, 2))
    return TrainState(read_job_config(path, "8px"), module)


def take_steps(state: TrainState, steps: int) -> None:
    for _ in range(steps):
        for number, weight in enumerate(state.parameters):
            generator = torch.Generator().manual_seed(100 * state.step + number)
            weight.grad = torch.randn(weight.shape, generator=generator)
        state.update(gradient_norm(state.parameters))


def tensors_of(state: TrainState) -> dict[ShardSpec, torch.Tensor]:
    """Return the state's tensors after the pending EMA update, which runs in the background."""
    shards = state.tensors()
    state.background.join()
    return {spec: shard.tensor for spec, shard in shards.items()}


def save(state: TrainState, folder: Path) -> checkpoint_files.CheckpointInfo:
    """Write a checkpoint as the checkpointer does, in this process."""
    folder.mkdir()
    shards = {spec: tensor.contiguous() for spec, tensor in tensors_of(state).items()}
    files = [
        checkpoint_files.write_file(
            folder, shard_file_name(0), lambda path: save_shards(path, shards)
        ),
        checkpoint_files.write_file(
            folder,
            PROGRESS_FILE,
            checkpoint_files.save_bytes(json.dumps(state.progress()).encode()),
        ),
    ]
    checkpoint_files.write_marker(folder, state.step, 1, state.fingerprint, files)
    return checkpoint_files.read_marker(folder)


SETTINGS: list[dict[str, Any]] = [
    {"optimizer": "adamw", "lr_schedule": "cosine"},
    {"optimizer": {"name": "adamw", "betas": [0.8, 0.95], "eps": 1e-6}, "lr_schedule": "linear"},
    {"optimizer": "adafactor", "lr_schedule": {"name": "wsd", "decay_fraction": 0.5}},
    {"optimizer": {"name": "muon", "momentum": 0.9}, "warmup_steps": 5},
    {"optimizer": {"name": "torch.optim:NAdam"}},
    {"optimizer": {"name": "torch.optim:Adagrad", "weight_decay": 0.1}},
    {"optimizer": {"name": "my_optimizers:KeepsNumbers", "options": {"boost": 2.0}}},
    {"lr_schedule": {"name": "my_optimizers:half", "options": {"floor": 0.25}}},
]


@pytest.mark.usefixtures("user_code")
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_resumed_training_equals_uninterrupted_training(
    tmp_path: Path, settings: dict[str, Any]
) -> None:
    uninterrupted = train_state(tmp_path, **settings)
    take_steps(uninterrupted, 4)
    checkpoint = save(uninterrupted, tmp_path / "step-00000004")
    take_steps(uninterrupted, 4)

    resumed = train_state(tmp_path, **settings)
    resumed.restore(checkpoint)
    assert resumed.learning_rate != uninterrupted.learning_rate or "lr_schedule" not in settings
    take_steps(resumed, 4)
    assert resumed.learning_rate == uninterrupted.learning_rate
    for ours, theirs in zip(resumed.parameters, uninterrupted.parameters, strict=True):
        assert torch.equal(ours, theirs)
    expected, found = tensors_of(uninterrupted), tensors_of(resumed)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[spec], expected[spec]) for spec in expected)
    assert resumed.progress() == uninterrupted.progress()


def test_update_equals_the_librarys_own_loop(tmp_path: Path) -> None:
    """Of Adafactor, with clipping: the gradient is clipped once, before the optimizer."""
    state = train_state(tmp_path, optimizer={"name": "adafactor", "weight_decay": 0.1})
    reference = [weight.detach().clone().requires_grad_() for weight in state.parameters]
    optimizer = torch.optim.Adafactor(reference, lr=0.01, weight_decay=0.1)
    for _ in range(3):
        for weight, expected in zip(state.parameters, reference, strict=True):
            weight.grad = 10 * torch.randn_like(weight)
            expected.grad = weight.grad.clone()
        state.update(gradient_norm(state.parameters))
        nn.utils.clip_grad_norm_(reference, 1.0)
        optimizer.step()
    for weight, expected in zip(state.parameters, reference, strict=True):
        torch.testing.assert_close(weight, expected)


def test_nonfinite_gradient_skips_the_step_of_any_optimizer(tmp_path: Path) -> None:
    state = train_state(tmp_path, optimizer="muon")
    take_steps(state, 1)
    before = [weight.detach().clone() for weight in state.parameters]
    for weight in state.parameters:
        weight.grad = torch.full_like(weight, float("nan"))
    assert float(state.update(gradient_norm(state.parameters))) == 1.0
    assert all(map(torch.equal, before, state.parameters))


def test_muon_trains_matrices_of_blocks_alone(tmp_path: Path) -> None:
    state = train_state(tmp_path, optimizer="muon")
    take_steps(state, 1)
    names = {spec.name for spec in state.tensors()}
    assert {"optimizer.momentum_buffer.0.weight", "optimizer.exp_avg.1.weight"} <= names
    assert {"optimizer.exp_avg.0.bias", "optimizer.momentum_buffer.2.weight"} <= names
    assert "optimizer.exp_avg.0.weight" not in names


def test_checkpoint_of_another_optimizer_is_refused(tmp_path: Path) -> None:
    state = train_state(tmp_path, optimizer="adafactor")
    take_steps(state, 1)
    checkpoint = save(state, tmp_path / "step-00000001")
    with pytest.raises(
        checkpoint_files.CheckpointError, match=r"state of Adafactor, and .* is AdamW"
    ):
        train_state(tmp_path).restore(checkpoint)


@pytest.mark.usefixtures("user_code")
@pytest.mark.parametrize(
    ("optimizer", "message"),
    [
        ("my_optimizers:missing", "my_optimizers has no function missing"),
        ("no_such_module:x", "no module no_such_module; add it to the folder of code"),
        ("my_optimizers:not_an_optimizer", "returned a NoneType; return a torch.optim.Optimizer"),
        ({"name": "torch.optim:SGD", "betas": [0.9, 0.9]}, "unexpected keyword argument 'betas'"),
    ],
)
def test_unusable_function_is_one_line_that_names_it(
    tmp_path: Path, optimizer: Any, message: str
) -> None:
    with pytest.raises(JobConfigError, match=rf"^training.optimizer.name: .*{message}"):
        train_state(tmp_path, optimizer=optimizer)


@pytest.mark.usefixtures("user_code")
def test_state_that_no_checkpoint_can_hold_is_refused_at_the_first_step(tmp_path: Path) -> None:
    state = train_state(tmp_path, optimizer="my_optimizers:KeepsAList")
    with pytest.raises(JobConfigError, match=r"state history of 0.weight is a list"):
        take_steps(state, 1)


@pytest.mark.usefixtures("user_code")
def test_schedule_that_returns_no_factor_is_refused(tmp_path: Path) -> None:
    with pytest.raises(JobConfigError, match=r"my_optimizers:negative returned -1.0 for step 0"):
        train_state(tmp_path, lr_schedule="my_optimizers:negative")


@pytest.mark.parametrize("name", ["constant", "cosine", "linear", "wsd"])
def test_schedules_equal_transformers_after_the_warm_up(tmp_path: Path, name: str) -> None:
    """Ours warms up from 1/(n + 1) instead of 0; after that the factors are the same."""
    import transformers

    options = {} if name == "constant" else {"final_factor": 0.1}
    config = read_job_config(
        write_job_file(
            tmp_path,
            tiny_run(max_steps=50, warmup_steps=10, lr_schedule={"name": name, **options}),
        ),
        "8px",
    )
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=1.0)
    build: Any = {
        "constant": lambda: transformers.get_constant_schedule_with_warmup(optimizer, 10),
        "cosine": lambda: transformers.get_cosine_with_min_lr_schedule_with_warmup(
            optimizer, 10, 50, min_lr_rate=0.1
        ),
        "linear": lambda: transformers.get_linear_schedule_with_warmup(optimizer, 10, 50),
        "wsd": lambda: transformers.get_wsd_schedule(
            optimizer,
            num_warmup_steps=10,
            num_decay_steps=5,
            num_training_steps=50,
            min_lr_ratio=0.1,
            decay_type="linear",
        ),
    }[name]
    reference = build().lr_lambdas[0]
    schedule = build_schedule(config)
    for step in range(10, 50):
        expected = reference(step)
        if name == "linear":
            expected = 0.1 + 0.9 * expected
        assert schedule(step) == pytest.approx(expected), step
    assert [schedule(step) for step in range(3)] == pytest.approx([1 / 11, 2 / 11, 3 / 11])


def test_muon_trains_the_matrices_of_linear_layers() -> None:
    """PixArt's modulation tables have two dimensions, and are vectors."""
    network = build("tiny-dit").network
    linear = {
        f"{name}.weight"
        for name, module in network.named_modules()
        if isinstance(module, nn.Linear) and any(part.isdigit() for part in name.split("."))
    }
    weights = dict(network.named_parameters())
    assert {
        weight for weight in weights if is_hidden_matrix(weight, weights[weight].shape)
    } == linear
    assert any(name.endswith("scale_shift_table") for name in weights)
