"""Records host synchronizations and collectives of a program on fake tensors."""

from __future__ import annotations

import sys
import weakref
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

aten, c10d = torch.ops.aten, torch.ops.c10d

_COPIES = (aten._to_copy.default, aten.copy_.default, aten._foreach_copy_.default)
_READS = {aten._local_scalar_dense.default: "scalar read", aten.equal.default: "comparison"}


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call, unused-ignore]
    """Counts what blocks the CPU, and collectives, by the product's function that caused them.

    A scalar of the device has no value; reading it returns ``scalars[function]``, 0 by default.
    Copies between host and device do not block if they are non-blocking and the host's memory is
    page-locked (CUDA Runtime API 12.2, "API synchronization behavior"; PyTorch synchronizes the
    stream after any other copy).
    """

    def __init__(self, package: str, scalars: Mapping[str, float]) -> None:
        super().__init__()  # type: ignore[no-untyped-call, unused-ignore]
        self.syncs: Counter[tuple[str, str]] = Counter()
        self.collectives: Counter[tuple[str, str, int, int]] = Counter()
        self._package, self._scalars = package, scalars
        self._pinned: weakref.WeakSet[Any] = weakref.WeakSet()

    def clear(self) -> None:
        """Forget what was recorded."""
        self.syncs.clear()
        self.collectives.clear()

    def record_sync(self, cause: str) -> str:
        """Count a synchronization; return the product's innermost function."""
        function = self._function()
        self.syncs[cause, function] += 1
        return function

    def _function(self) -> str:
        frame = sys._getframe(1)
        while frame is not None:
            if f"/{self._package}/" in frame.f_code.co_filename:
                return frame.f_code.co_name
            frame = frame.f_back  # type: ignore[assignment]
        # Backward passes run on a thread of autograd's engine.
        return "backward"

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _READS and args[0].is_cuda:
            function = self.record_sync(_READS[func])
            return self._scalars.get(function, 0.0)
        if func is aten.is_pinned.default:
            return self._is_pinned(args[0])
        if func is aten._pin_memory.default:
            return self._pin(_page_locked_copy(args[0]))
        if func in _COPIES:
            self._check_copies(func, args, kwargs)
        elif func.namespace in ("c10d", "_c10d_functional"):
            self._count_collective(func, args)
        result = func(*args, **kwargs)
        return self._pin(result) if kwargs.get("pin_memory") else result

    def _pin(self, tensor: Tensor) -> Tensor:
        # The storage, because views of it are page-locked too.
        self._pinned.add(tensor.untyped_storage())
        return tensor

    def _is_pinned(self, tensor: Tensor) -> bool:
        if isinstance(tensor, FakeTensor):
            return tensor.untyped_storage() in self._pinned
        with _disable_current_modes():
            return tensor.is_pinned()

    def _check_copies(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        if func is aten._to_copy.default:
            [source] = args
            target = torch.device(kwargs.get("device") or source.device)
            # A new tensor of the host is page-locked only if the call says so.
            pinned_target = bool(kwargs.get("pin_memory"))
            self._check_copy(source, target, pinned_target, bool(kwargs.get("non_blocking")))
            return
        targets, sources, *rest = args
        non_blocking = bool(rest[0] if rest else kwargs.get("non_blocking"))
        pairs = [(targets, sources)]
        if func is aten._foreach_copy_.default:
            pairs = list(zip(targets, sources, strict=True))
        for target, source in pairs:
            self._check_copy(source, target.device, self._is_pinned(target), non_blocking)

    def _check_copy(
        self, source: Tensor, target: torch.device, pinned_target: bool, non_blocking: bool
    ) -> None:
        kinds = source.device.type, target.type
        if kinds == ("cuda", "cpu") and not (non_blocking and pinned_target):
            self.record_sync("copy to the host")
        if kinds == ("cpu", "cuda") and not (non_blocking and self._is_pinned(source)):
            self.record_sync("copy from pageable memory" if non_blocking else "blocking copy")

    def _count_collective(self, func: Any, args: Sequence[Any]) -> None:
        name = func._schema.name.partition("::")[2].strip("_")
        if name == "wait_tensor":
            return
        whole = args[1] if func is c10d._reduce_scatter_base_.default else args[0]
        tensors = whole if isinstance(whole, (list, tuple)) else [whole]
        size = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        self.collectives[name, self._function(), _ranks(args), size] += 1


def _page_locked_copy(tensor: Tensor) -> Tensor:
    """Return what ``pin_memory`` copies into; raise what it raises."""
    if tensor.device.type != "cpu":
        raise RuntimeError("only dense CPU tensors can be pinned")
    if 0 in tensor.stride() and tensor.numel() > 1:
        raise RuntimeError("more than one element refers to a single memory location")
    return torch.empty_like(tensor)


def _ranks(args: Sequence[Any]) -> int:
    """Return the size of the process group among a collective's arguments."""
    for argument in args:
        if isinstance(argument, torch.ScriptObject):
            return int(dist.ProcessGroup.unbox(argument).size())
    # Functional collectives name their group in the last argument.
    return int(dist.distributed_c10d._resolve_process_group(args[-1]).size())
