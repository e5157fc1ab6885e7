"""What the objects of Accelerate tell about a script's loop."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

from sm_train.entrypoints.job_interface.job_config import JobConfig
from sm_train.entrypoints.script.step_events import LoopFacts

REPLACED_AFTER = 100
"""Steps of another optimizer in a row after which it counts as the successor of the first one.

A training of two networks may take several steps of one for each step of the other."""


class CountedOptimizer:
    """The optimizer whose steps count: the first one, until another replaces it for good."""

    def __init__(self) -> None:
        self.current: Any = None
        self.has_others = False
        self._steps_of_others: Counter[int] = Counter()

    def count(self, optimizer: Any, accelerator: Any) -> int:
        """Return how many steps a step of ``optimizer`` counts as: 0 if another one is counted.

        One that replaces the counted optimizer counts with the steps that it has taken since then.
        """
        if self.current is None:
            self.current = optimizer
        if optimizer is self.current:
            self._steps_of_others.clear()
            return 1
        self.has_others = True
        self._steps_of_others[id(optimizer)] += 1
        count = self._steps_of_others[id(optimizer)]
        prepared = getattr(accelerator, "_optimizers", ())
        if count < REPLACED_AFTER and any(item is self.current for item in prepared):
            return 0
        self.current = optimizer
        self._steps_of_others.clear()
        return count


def loop_facts(
    accelerator: Any, loader: Any, optimizer: Any, config: JobConfig, *, first_step: int
) -> LoopFacts:
    """Return the actual configuration of a loop; ``loader`` and ``optimizer`` may be None.

    The batch size is the loader's, else the run file's.
    """
    backend, precision = _backend(accelerator), str(accelerator.mixed_precision)
    processes = int(accelerator.num_processes)
    total = getattr(loader, "total_batch_size", None)
    if isinstance(total, int) and total > 0:
        batch_size = max(1, total // processes)
    else:
        batch_size = config.stage.per_device_batch_size
    return LoopFacts(
        processes,
        batch_size,
        int(accelerator.gradient_accumulation_steps),
        _parameters([optimizer] if optimizer else accelerator._optimizers[:1]),
        backend,
        "cluster.backend" if backend == "smddp" else "chosen by Accelerate",
        "fp32" if precision == "no" else precision,
        first_step,
        tuple(_unobserved(accelerator, loader, observes_loss=optimizer is None)),
    )


def _unobserved(accelerator: Any, loader: Any, *, observes_loss: bool) -> list[str]:
    """Return what the events of a loop lack, each with the reason."""
    missing = []
    if not observes_loss:
        missing.append("loss: the script did not call Accelerator.backward")
    elif accelerator.num_processes > 1:
        missing.append("loss of the other processes: `loss` is that of rank 0")
    if loader is None:
        missing.append(
            "data wait and epoch: Accelerator.prepare got no loader; a stop takes place at "
            "the next backward pass"
        )
    return missing


def _parameters(optimizers: list[Any]) -> int:
    return sum(
        parameter.numel()
        for optimizer in optimizers
        for group in optimizer.param_groups
        for parameter in group["params"]
    )


def _backend(accelerator: Any) -> str:
    """Return the name of the process group's backend, as in the ``start`` event."""
    if accelerator.num_processes == 1:
        return "none"
    import torch.distributed as dist

    return str(dist.get_backend()) if dist.is_initialized() else "none"


def saved_folder(accelerator: Any, output_dir: Any) -> Path | None:
    """Return the folder that ``save_state`` writes to: Accelerate may number it."""
    project = accelerator.project_configuration
    if project.automatic_checkpoint_naming:
        name = f"checkpoint_{project.iteration}"
        return Path(accelerator.project_dir, "checkpoints", name).resolve()
    return None if output_dir is None else Path(output_dir).resolve()


def loaded_folder(accelerator: Any, input_dir: Any) -> Path | None:
    """Return the folder that ``load_state`` has read: without a name, the last numbered one."""
    if input_dir is not None:
        return Path(input_dir).expanduser().resolve()
    numbered = Path(accelerator.project_dir, "checkpoints").resolve().glob("checkpoint_*")
    return max(numbered, key=lambda folder: int(folder.name.rpartition("_")[2]), default=None)
