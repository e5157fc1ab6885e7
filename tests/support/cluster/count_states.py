"""A process of a tiny model's training: writes down the bytes of its states after a step, and how
often processes exchange something while three micro-batches accumulate.

torchrun count_states.py JOB-FILE FOLDER
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from sm_train.entrypoints.common.job_config import read_job_config
from sm_train.entrypoints.distributed import fsdp
from sm_train.entrypoints.distributed.local_shard import to_local
from sm_train.entrypoints.models.builder import build_components
from sm_train.entrypoints.training.model_inputs import ModelInputs
from sm_train.entrypoints.training.parallelize import ParallelPlan, parallelize
from sm_train.entrypoints.training.train_state import TrainState
from torch.utils._python_dispatch import TorchDispatchMode


class Exchanges(TorchDispatchMode):
    """Counts the collectives that are begun inside, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "c10d" in func.namespace:
            self.counts[func.name().split("::")[1]] += 1
        return func(*args, **(kwargs or {}))


def main() -> None:
    """Of this process: one step on noise, then what is allocated for weights and the rest."""
    settings = read_job_config(Path(sys.argv[1]), "8px")
    torch.distributed.init_process_group("gloo")
    accelerator = Accelerator(cpu=True)
    parts = build_components(settings.model, 8, components=None, previous=None)
    processes = accelerator.num_processes
    placing = ParallelPlan.choose(
        settings, parts.network_init.component, processes, processes, None
    )
    module = parallelize(placing, settings, parts, accelerator, processes)
    model = fsdp.wrap(module, accelerator)
    learner = TrainState(settings, module)
    config = parts.network.config
    noisy = torch.randn(1, config.in_channels, config.sample_size, config.sample_size)
    text = ModelInputs(parts, accelerator.device, 0.0).no_text()

    def backward() -> None:
        accelerator.backward(model(noisy, torch.ones(1), *text).mean())

    backward()
    gradients = [to_local(one.grad) for one in learner.parameters if one.grad is not None]
    found: dict[str, float] = {
        "gradients": sum(one.numel() * one.element_size() for one in gradients)
    }
    learner.update(fsdp.gradient_norm(learner.parameters))
    tensors = {box.name: own.tensor for box, own in learner.tensors().items()}
    for state, prefixes in {
        "weights": ("model.",),
        "adamw": ("exp_avg.", "exp_avg_sq."),
        "ema": ("ema.",),
    }.items():
        found[state] = sum(
            one.untyped_storage().nbytes()
            for name, one in tensors.items()
            if name.startswith(prefixes) and "pos_embed.pos_embed" not in name
        )
    if fsdp.is_sharded(module):
        for whole in (True, False):
            keeps = placing.sharding == "shard_grad_op"
            learner.zero_grad()
            with Exchanges() as exchanges:
                for _ in range(2):
                    with fsdp.no_sync(
                        model, accelerator, unsharded_grads=whole, unsharded_weights=keeps
                    ):
                        backward()
                backward()
            found[f"norm, whole: {whole}"] = float(fsdp.gradient_norm(learner.parameters))
            for operation, count in exchanges.counts.items():
                found[f"{operation}, whole: {whole}"] = count
    path = Path(sys.argv[2]) / f"rank-{accelerator.process_index}.json"
    path.write_text(json.dumps(found))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
