"""Calls an observer from Accelerate's classes, without a change to the script that uses them.

The methods are replaced on the classes when the script imports Accelerate, and not before: a script
may set variables that torch reads when it is imported.
"""

from __future__ import annotations

import errno
import functools
import importlib.abc
import importlib.util
import sys
from collections.abc import Callable, Iterator, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, Protocol

_MODULE = "accelerate.accelerator"
"""Imports the modules of all observed classes."""

_SAVE_ATTEMPTS = 3
"""For a folder that gets a note on an upload while Accelerate removes it."""


class Observer(Protocol):
    """What is called, in the main thread of the script.

    A call may end the script with SystemExit. Any other exception is the observer's own fault and
    must not be the script's: :meth:`failed` gets it.
    """

    def failed(self, error: Exception) -> None:
        """Report that a call raised ``error``."""

    def created(self, accelerator: Any) -> None:
        """Take note of a new Accelerator."""

    def before_batch(self, loader: Any) -> None:
        """Begin to wait for a batch of a prepared loader."""

    def after_batch(self, loader: Any) -> None:
        """Got a batch."""

    def before_backward(self, accelerator: Any, loss: Any) -> None:
        """Begin a backward pass; ``loss`` is not yet divided by the accumulation steps."""

    def clipped(self, norm: Any) -> None:
        """Take note of the norm that ``clip_grad_norm_`` returned."""

    def after_step(self, optimizer: Any) -> None:
        """End an optimizer step; not called for steps that accumulation skips."""

    def before_save(self, accelerator: Any, output_dir: Any) -> None:
        """Begin to save the state to ``output_dir``."""

    def after_save(self, saved: bool) -> None:
        """End a save, which failed unless ``saved``."""

    def loaded(self, accelerator: Any, input_dir: Any) -> None:
        """Take note of a state that was loaded from ``input_dir``."""


def observe_accelerate(observer: Observer) -> None:
    """Call ``observer`` from Accelerate as soon as the script imports it."""
    if _MODULE in sys.modules:
        _patch(observer)
    else:
        sys.meta_path.insert(0, _ImportHook(lambda: _patch(observer)))


class _ImportHook(importlib.abc.MetaPathFinder):
    """Calls ``after_import`` when :data:`_MODULE` has been imported."""

    def __init__(self, after_import: Callable[[], None]) -> None:
        self._after_import = after_import

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Find the module as usual, with a loader that calls ``after_import``."""
        if fullname != _MODULE:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                execute(module)
                self._after_import()

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def _call(observer: Observer, call: Callable[..., None], *arguments: Any) -> None:
    try:
        call(*arguments)
    except Exception as error:
        observer.failed(error)


def _patch(observer: Observer) -> None:
    # The package itself may still be importing its modules.
    from accelerate.accelerator import Accelerator
    from accelerate.data_loader import DataLoaderDispatcher, DataLoaderShard
    from accelerate.optimizer import AcceleratedOptimizer

    _patch_accelerator(Accelerator, observer)
    for loader in (DataLoaderShard, DataLoaderDispatcher):
        loader.__iter__ = _observed_iter(loader.__iter__, observer)
    # Those of DeepSpeed and Megatron-LM have a step of their own.
    for optimizer in (AcceleratedOptimizer, *AcceleratedOptimizer.__subclasses__()):
        if "step" in vars(optimizer):
            optimizer.step = _observed_step(optimizer.step, observer)


def _patch_accelerator(accelerator: Any, observer: Observer) -> None:
    init, backward, clip = accelerator.__init__, accelerator.backward, accelerator.clip_grad_norm_
    save_state, load_state = accelerator.save_state, accelerator.load_state

    @functools.wraps(init)
    def observed_init(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        _call(observer, observer.created, self)

    @functools.wraps(backward)
    def observed_backward(self: Any, loss: Any, **kwargs: Any) -> Any:
        _call(observer, observer.before_backward, self, loss)
        return backward(self, loss, **kwargs)

    @functools.wraps(clip)
    def observed_clip(self: Any, *args: Any, **kwargs: Any) -> Any:
        norm = clip(self, *args, **kwargs)
        _call(observer, observer.clipped, norm)
        return norm

    @functools.wraps(save_state)
    def observed_save(self: Any, output_dir: Any = None, *args: Any, **kwargs: Any) -> Any:
        _call(observer, observer.before_save, self, output_dir)
        saved = False
        try:
            for attempt in range(_SAVE_ATTEMPTS):
                try:
                    result = save_state(self, output_dir, *args, **kwargs)
                    break
                except OSError as error:
                    # SageMaker noted an upload in a folder while Accelerate removed it (1.15:
                    # rmtree within save_state, before it waits for others or writes anything).
                    if error.errno != errno.ENOTEMPTY or attempt + 1 == _SAVE_ATTEMPTS:
                        raise
            saved = True
        finally:
            _call(observer, observer.after_save, saved)
        return result

    @functools.wraps(load_state)
    def observed_load(self: Any, input_dir: Any = None, *args: Any, **kwargs: Any) -> Any:
        result = load_state(self, input_dir, *args, **kwargs)
        _call(observer, observer.loaded, self, input_dir)
        return result

    accelerator.__init__, accelerator.backward = observed_init, observed_backward
    accelerator.clip_grad_norm_ = observed_clip
    accelerator.save_state, accelerator.load_state = observed_save, observed_load


def _observed_step(step: Callable[..., Any], observer: Observer) -> Callable[..., Any]:
    @functools.wraps(step)
    def observed_step(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = step(self, *args, **kwargs)
        if self.gradient_state.sync_gradients:
            _call(observer, observer.after_step, self)
        return result

    return observed_step


def _observed_iter(iterate: Callable[[Any], Any], observer: Observer) -> Callable[[Any], Any]:
    @functools.wraps(iterate)
    def observed_iter(self: Any) -> Iterator[Any]:
        _call(observer, observer.before_batch, self)
        for batch in iterate(self):
            _call(observer, observer.after_batch, self)
            yield batch
            _call(observer, observer.before_batch, self)

    return observed_iter
