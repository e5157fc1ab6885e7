"""The patterns of the lines that the scan of a log parses, and of the lines that report a step."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from typing import Protocol

from sm_train.entrypoints.distributed.nccl_log import LITERALS as NCCL_LITERALS
from sm_train.toolkit.analysis.diagnose.signatures import searched_patterns
from sm_train.toolkit.analysis.diagnose.tracebacks import BEGIN, CHAINED, IGNORED
from sm_train.toolkit.analysis.diagnose.watchdog_lines import GROUP_OF_WORK

FIRST_FAILURE = ("Root Cause (first observed failure)", "Root Cause:")
"""Heads of torchrun's summary of the first failure."""
# A line which reports that the whole training ended as intended:
#   … sagemaker-training-toolkit INFO     Reporting training SUCCESS
#   Training completed. Do not forget to share your model …            Hugging Face's Trainer
#   `Trainer.fit` stopped: `max_epochs=10` reached.                    Lightning
#   "name": "torchelastic.worker.status.SUCCEEDED"                     torchrun
#   2026-11-21 10:00:00 Completed - Training job completed             the SageMaker SDK
#   {'train_runtime': 5211.2, 'train_loss': 0.95, …}                   Hugging Face's Trainer
#   [default] worker group successfully finished. Waiting 300 seconds …  torchrun
#   [after training is done] datetime: 2026-11-21 10:00:00             Megatron-LM
SUCCESS = (
    "Reporting training SUCCESS",
    "Training completed. Do not forget to share your model",
    "`Trainer.fit` stopped: `max_",
    "torchelastic.worker.status.SUCCEEDED",
    "Completed - Training job completed",
    "'train_runtime': ",
    "worker group successfully finished",
    "[after training is done] datetime:",
)
COMMUNICATOR = " nranks "
"""A line with the size of an NCCL communicator contains it."""
_EVENTS = ('"kind": "error"', '"kind": "end"', '"kind": "start"', '"code": "stall-resolved"')
_AUTOMATON_BYTES = 64 << 20

# A completed training step; one group holds text that is the same for all ranks of a step:
#   SMT {"kind": "step", "time": 1795300000.0, …, "step": 120, …       this project's event
#     5%|▌         | 72/1398 [1:12:34<24:31:08, 66.57s/it]              tqdm
#   [batch=120/5000]:                                                  Composer
#   step 120 loss 0.31 lr 1.0e-04, global_step=120 … 1.8 it/s          many training loops
#   Epoch: [3] [ 120/5000] …, epoch 3: 120/5000 …                      torchvision's references
#   {'loss': 0.31, 'grad_norm': 1.2, …, 'epoch': 0.12}                 Hugging Face Trainer
_STEP = (
    rb'"kind": "step", .{0,160}?"step": (\d+)'
    rb"|([\w /.:()-]{0,40}\d%\|[^|\n]*\| +[1-9]\d*/\d+) \[\d+:\d\d"
    rb"|\[batch=(\d+)/"
    rb"|(?i:(?:\b|\x1b\[\d+m)(?:global_?step|steps?|iter|iteration))[:=\[ ] ?\[? *(\d+)\b"
    rb".{0,160}?(?i:loss|lr|learning.rate|it/s|s/it)"
    rb"|(?i:(?:\b|\x1b\[\d+m)epoch):? +(\d+: +\d+ ?/|\[\d+\]\s*\[ *\d+/)"
    rb"|'loss': .{0,200}'epoch': ([\d.]+)"
)

# "Loading pipeline components...:  43%|", "Fetching 12 files: …", "model.safetensors: …"
_LOADING = re.compile(
    rb"(?i:\b(?:loading|fetching|downloading|map|tokenizing|generating \w+ split)\b"
    rb"|\.(?:safetensors|bin|json|pt|ckpt|tar|parquet)\b)"
)


class BytesMatch(Protocol):
    """A match of RE2, which ships no types."""

    def start(self) -> int: ...
    def end(self) -> int: ...
    def groups(self) -> tuple[bytes | None, ...]: ...


class BytesPattern(Protocol):
    """A compiled pattern of RE2 over bytes, which ships no types."""

    def search(self, text: bytes, start: int = ..., stop: int = ..., /) -> BytesMatch | None: ...
    def finditer(
        self, text: bytes, start: int = ..., stop: int = ..., /
    ) -> Iterator[BytesMatch]: ...


def step_in(step_match: BytesMatch) -> bytes:
    """Return what identifies the training step of a match; it is the same for all ranks."""
    return next(group for group in step_match.groups() if group is not None)


@cache
def searched_pattern() -> BytesPattern:
    """Return one pattern of everything that the scan looks for: other lines are not parsed."""
    import re2

    literals = (
        *(BEGIN, *CHAINED, *IGNORED, *FIRST_FAILURE, *SUCCESS, *_EVENTS, COMMUNICATOR),
        GROUP_OF_WORK,
    )
    patterns = [re2.escape(text).encode() for text in (*literals, *NCCL_LITERALS)]
    patterns += searched_patterns()
    options = re2.Options()
    # Without enough memory for its automaton, RE2 falls back to slower ones.
    options.max_mem = _AUTOMATON_BYTES
    options.never_capture = True
    compiled: BytesPattern = re2.compile(
        b"|".join(b"(?:%b)" % pattern for pattern in patterns), options
    )
    return compiled


@cache
def step_pattern() -> BytesPattern:
    """Return the pattern of a completed training step, with one group of those of all programs."""
    import re2

    pattern: BytesPattern = re2.compile(_STEP)
    return pattern


def is_loading(step: bytes) -> bool:
    """Return whether a progress bar is of a model or data being loaded, not of the training."""
    return _LOADING.search(step) is not None
