"""Trains a tiny model for one step; writes the bytes of its state, and the number of collectives
in an accumulation of three micro-batches.

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
from sm_train.entrypoints.distributed import fsdp
from sm_train.entrypoints.distributed.local_shard import to_local
from sm_train.entrypoints.job_interface.job_config import read_job_config
from sm_train.entrypoints.models.builder import build_components
from sm_train.entrypoints.training.model_inputs import ModelInputs
from sm_train.entrypoints.training.parallelize import ParallelPlan, parallelize
from sm_train.entrypoints.training.train_state import TrainState
from torch.utils._python_dispatch import TorchDispatchMode


class CollectiveCounter(TorchDispatchMode):
    """Counts the collectives that are started inside the context, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "c10d" in func.namespace:
            self.counts[func.name().split("::")[1]] += 1
        return func(*args, **(kwargs or {}))


def main() -> None:
    """Measure this rank and write its results to ``FOLDER/rank-N.json``."""
    config = read_job_config(Path(sys.argv[1]), "8px")
    torch.distributed.init_process_group("gloo")
    accelerator = Accelerator(cpu=True)
    components = build_components(config.model, 8, components=None, previous=None)
    world_size = accelerator.num_processes
    plan = ParallelPlan.choose(
        config, components.network_init.component, world_size, world_size, None
    )
    module = parallelize(plan, config, components, accelerator, world_size)
    model = fsdp.wrap(module, accelerator, reduce_bf16=False)
    state = TrainState(config, module)
    network = components.network.config
    noisy = torch.randn(1, network.in_channels, network.sample_size, network.sample_size)
    text = ModelInputs(components, accelerator.device, caption_dropout=0.0).no_text()

    def backward() -> None:
        accelerator.backward(model(noisy, torch.ones(1), *text).mean())

    backward()
    gradients = [to_local(weight.grad) for weight in state.parameters if weight.grad is not None]
    results: dict[str, float] = {
        "gradients": sum(gradient.numel() * gradient.element_size() for gradient in gradients)
    }
    state.update(fsdp.gradient_norm(state.parameters))
    tensors = {spec.name: shard.tensor for spec, shard in state.tensors().items()}
    for part, prefixes in {
        "weights": ("model.",),
        "optimizer": ("optimizer.",),
        "ema": ("ema.",),
    }.items():
        results[part] = sum(
            tensor.untyped_storage().nbytes()
            for name, tensor in tensors.items()
            if name.startswith(prefixes) and "pos_embed.pos_embed" not in name
        )
    if fsdp.is_sharded(module):
        unsharded_weights = plan.sharding == "shard_grad_op"
        for unsharded_grads in (True, False):
            state.zero_grad()
            with CollectiveCounter() as collectives:
                for _ in range(2):
                    with fsdp.no_sync(
                        model,
                        accelerator,
                        unsharded_grads=unsharded_grads,
                        unsharded_weights=unsharded_weights,
                    ):
                        backward()
                backward()
            suffix = f", unsharded_grads: {unsharded_grads}"
            results[f"norm{suffix}"] = float(fsdp.gradient_norm(state.parameters))
            for name, count in collectives.counts.items():
                results[f"{name}{suffix}"] = count
    path = Path(sys.argv[2]) / f"rank-{accelerator.process_index}.json"
    path.write_text(json.dumps(results))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
