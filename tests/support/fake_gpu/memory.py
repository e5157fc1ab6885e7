"""Peak memory of a training step, by PyTorch's own trackers."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
from torch.distributed._tools.mem_tracker import MemTracker

DEVICE = torch.device("cuda", 0)


class _PeakOnly:
    """Tracks the peak of all memory, without the peaks of each module.

    PyTorch's trackers look through all modules after each operator, which takes most of the time
    for thousands of modules.
    """

    _curr_mem_snap: dict[torch.device, dict[Any, int]]
    _peak_mem: dict[torch.device, int]
    _peak_mem_snap: dict[torch.device, dict[Any, int]]

    def _update_peak_stats(self, _: object) -> None:
        for device, snapshot in self._curr_mem_snap.items():
            total = snapshot["Total"]
            if self._peak_mem.get(device, 0) < total:
                self._peak_mem[device] = total
                self._peak_mem_snap[device] = dict(snapshot)


class _FsdpMemTracker(_PeakOnly, FSDPMemTracker):
    """PyTorch's tracker of sharded models."""


class _MemTracker(_PeakOnly, MemTracker):
    """PyTorch's tracker, extended for frozen weights and for several calls of an encoder (2.13)."""

    def _pre_fw_hook(self, module: nn.Module, inputs: Any) -> None:
        name = self._mod_tracker.get_known_fqn(module)
        outermost = self._mod_tracker.parents - {name} == {"Global"}
        if module in self.memory_tracking and outermost and not self._mod_tracker.is_bw:
            self.reset_mod_stats()
        super()._pre_fw_hook(module, inputs)

    def _track_module_params_and_buffers(
        self, module: nn.Module, install_grad_hooks: bool = True
    ) -> tuple[int, int]:
        for parameter in module.parameters():
            if not parameter.requires_grad:
                # The tracker installs no hooks where there are some.
                self._param_to_grad_hook_handles.setdefault(parameter, (_NoHook(), _NoHook()))
        return super()._track_module_params_and_buffers(module, install_grad_hooks)


class _NoHook:
    """The handle of a hook on a parameter that has no gradient."""

    def remove(self) -> None: ...


class MemoryTracker:
    """Tracks a trainer's steps after the first one.

    What exists before is counted as external: weights, AdamW's state, EMA and frozen components.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._tracker: Any = None

    def before_pass(self, *, first: bool) -> None:
        """Call before each micro-batch; ``first`` in the first optimizer step."""
        if first:
            return
        if self._tracker is None:
            self._tracker = self._start()
        else:
            self._tracker.reset_mod_stats()

    def _start(self) -> Any:
        from sm_train.entrypoints.distributed import fsdp

        state, components = self._trainer.state, self._trainer.components
        frozen = [
            tensor
            for module in components.frozen_modules()
            for tensor in (*module.parameters(), *module.buffers())
        ]
        average = state._ema.averages if state._ema else []
        if fsdp.is_sharded(state.module):
            tracker: Any = _FsdpMemTracker(components.network, state._optimizers[0])
            tracker.track_inputs(([*frozen, *average],))
        else:
            tracker = _MemTracker()
            tracker.track_external(state.module, state._optimizers[0], *frozen, *average)
        tracker.__enter__()
        return tracker

    def finish(self) -> dict[str, int]:
        """Stop and return the bytes at the peak by kind of memory."""
        self._tracker.__exit__(None, None, None)
        peak = self._tracker.get_tracker_snapshot("peak")[DEVICE]
        return {getattr(kind, "value", kind): size for kind, size in peak.items()}
