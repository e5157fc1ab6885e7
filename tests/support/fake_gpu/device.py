"""A GPU without a GPU: fake tensors on device ``cuda`` in a PyTorch that was built for CPUs.

:func:`load` compiles ``fake_cuda.cpp`` and loads it, which must happen before PyTorch is imported:
PyTorch asks for its CUDA hooks once. :func:`install` then replaces the parts of ``torch.cuda`` that
need a driver.
"""

from __future__ import annotations

import ctypes
import importlib.util
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

SOURCE = Path(__file__).with_name("fake_cuda.cpp")
MEMORY = 80 * 2**30
"""Bytes of the fake GPU's memory."""


def load() -> None:
    """Compile and load the fake CUDA device; call it before the first import of PyTorch."""
    assert "torch" not in sys.modules, "PyTorch has looked for CUDA already"
    spec = importlib.util.find_spec("torch")
    assert spec is not None
    assert spec.origin is not None
    torch = Path(spec.origin).parent
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder) / "fake_cuda.so"
        subprocess.run(
            [
                *("g++", "-std=c++20", "-O0", "-shared", "-fPIC", str(SOURCE), "-o", str(library)),
                *(f"-I{torch / 'include'}", f"-L{torch / 'lib'}", "-ltorch_cpu", "-lc10"),
            ],
            check=True,
        )
        for path in (torch / "lib" / "libtorch_cpu.so", library):
            ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)


def install(on_sync: Any) -> None:
    """Replace what ``torch.cuda`` asks a driver; ``on_sync(name)`` is called when the CPU waits."""
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    class Event:
        def __init__(self, *_: Any, **__: Any) -> None: ...
        def record(self, stream: Any = None) -> None: ...
        def wait(self, stream: Any = None) -> None: ...
        def query(self) -> bool:
            return True

        def synchronize(self) -> None:
            on_sync("Event.synchronize")

        def elapsed_time(self, _: Any) -> float:
            # Of completed events; it raises an error for others, and never waits.
            return 1.0

    class Stream:
        device = torch.device("cuda", 0)

        def __init__(self, *_: Any, **__: Any) -> None: ...
        def wait_event(self, event: Any) -> None: ...
        def wait_stream(self, stream: Any) -> None: ...
        def record_event(self, event: Any = None) -> Any:
            return event or Event()

        def synchronize(self) -> None:
            on_sync("Stream.synchronize")

        def __enter__(self) -> Stream:
            return self

        def __exit__(self, *_: object) -> None: ...

    stream = Stream()
    properties = SimpleNamespace(
        total_memory=MEMORY, name="NVIDIA H100 80GB HBM3", major=9, minor=0
    )
    replacements: dict[str, Any] = {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "set_device": lambda _: None,
        "is_bf16_supported": lambda *_, **__: True,
        "get_device_properties": lambda *_: properties,
        "get_device_name": lambda *_: properties.name,
        "get_device_capability": lambda *_: (9, 0),
        "Stream": Stream,
        "Event": Event,
        "current_stream": lambda *_: stream,
        "default_stream": lambda *_: stream,
        "stream": lambda _: stream,
        "synchronize": lambda *_: on_sync("torch.cuda.synchronize"),
        "_lazy_init": lambda: None,
    }
    for name, replacement in replacements.items():
        setattr(torch.cuda, name, replacement)
    attention = torch.library.Library("aten", "IMPL")
    attention.impl("scaled_dot_product_attention", _fused_attention, "AutogradCUDA")
    _LIBRARIES.append(attention)
    # A fake tensor is made on the CPU and moved: there is no device to make it on.
    FakeTensorMode.avoid_device_init = property(lambda _: True)

    torch.nn.Module._apply = _apply


_LIBRARIES: list[Any] = []
"""Registrations of operators, which end with their library."""


def _fused_attention(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    """Choose a kernel as PyTorch does on an H100: flash, or memory-efficient with a mask."""
    import torch

    aten = torch.ops.aten
    if attn_mask is None and query.dtype == torch.bfloat16:
        return aten._scaled_dot_product_flash_attention(
            query, key, value, dropout_p, is_causal, False, scale=scale
        )[0]
    return aten._scaled_dot_product_efficient_attention(
        query, key, value, attn_mask, query.requires_grad, dropout_p, is_causal, scale=scale
    )[0]


def _apply(module: Any, convert: Any, recurse: bool = True) -> Any:
    """Replace a module's parameters; PyTorch's own function cannot swap those with weak references.

    Modules that share a parameter share the new one.
    """
    import torch

    converted: dict[Any, Any] = {}
    for layer in module.modules():
        for name, parameter in layer._parameters.items():
            if parameter is None:
                continue
            if parameter not in converted:
                moved = convert(parameter.detach())
                if _layout(moved) == _layout(parameter):
                    converted[parameter] = parameter
                else:
                    converted[parameter] = torch.nn.Parameter(moved, parameter.requires_grad)
            layer._parameters[name] = converted[parameter]
        for name, buffer in layer._buffers.items():
            if buffer is not None:
                layer._buffers[name] = convert(buffer)
    return module


def _layout(tensor: Any) -> tuple[Any, ...]:
    return tensor.device, tensor.dtype, tensor.stride()
