"""Compiles the repeated layers of a network, and measures how long that takes."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from sm_train.entrypoints.monitoring.heartbeat import HeartbeatWriter
from torch import nn

COMPILED = ("BasicTransformerBlock", "JointTransformerBlock", "ResnetBlock2D")
"""Class names in diffusers of the layers that repeat within a network, which are compiled.

Each compiles once per shape, in seconds; a U-Net's outer blocks took more than two minutes on an
H200. They contain neither FSDP's hooks of a U-Net nor the function that checkpoints activations.
"""

_MAX_VARIANTS = 64
"""Graphs of one class: a U-Net has 18 shapes, and evaluations add variants without gradients.
PyTorch's default of 8 would run the others without compilation."""


def compile_repeated(network: nn.Module, *, one_shape: bool, **options: Any) -> list[nn.Module]:
    """Let each of the :data:`COMPILED` layers compile itself in its first pass; return them.

    One graph for all would start to sum gradients only at its end. With ``one_shape`` kernels are
    specialized to the shapes of a stage; otherwise those that vary become variables of the graph.
    ``options`` are those of torch.compile.
    """
    torch._dynamo.config.cache_size_limit = max(
        _MAX_VARIANTS, torch._dynamo.config.cache_size_limit
    )
    layers = [module for module in network.modules() if type(module).__name__ in COMPILED]
    for layer in layers:
        layer.compile(dynamic=False if one_shape else None, **options)
    return layers


def without_compilation() -> AbstractContextManager[Any]:
    """Return a context in which layers that compile themselves run as they are.

    PyTorch before 2.6 has none: there they compile.
    """
    set_stance = getattr(torch.compiler, "set_stance", None)
    return nullcontext() if set_stance is None else set_stance("force_eager")


class CompilationClock:
    """Adds up the seconds in which this process compiles layers.

    A layer compiles in its first pass, forward and backward, and again for a new shape.
    """

    def __init__(self) -> None:
        self._seconds: float | None = None

    @contextmanager
    def watching(self, heartbeat: HeartbeatWriter) -> Iterator[None]:
        """Watch this process while the block runs; its heartbeat says when it compiles."""
        from torch._dynamo.callback import callback_handler

        self._seconds, started = 0.0, 0.0

        # PyTorch before 2.8 passes no arguments.
        def begin(*_: Any) -> None:
            nonlocal started
            started = time.monotonic()
            heartbeat.begin_compilation()

        def end(*_: Any) -> None:
            heartbeat.end_compilation()
            assert self._seconds is not None
            self._seconds += time.monotonic() - started

        callback_handler.register_start_callback(begin)
        callback_handler.register_end_callback(end)
        try:
            yield
        finally:
            callback_handler.remove_start_callback(begin)
            callback_handler.remove_end_callback(end)

    def take(self) -> float | None:
        """Return the seconds since the last call; None if nothing is watched."""
        seconds = self._seconds
        if seconds is not None:
            self._seconds = 0.0
        return seconds
