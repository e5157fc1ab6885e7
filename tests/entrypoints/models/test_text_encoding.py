"""Encoding captions reads no tensor's content, for which the CPU would wait for the GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.support.models import build

CAPTIONS = ["a grey of 3", "a much longer caption of another grey"]


class _Reads(TorchDispatchMode):  # type: ignore[no-untyped-call, unused-ignore]
    """Counts the scalars that Python reads from tensors."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("preset", ["tiny-sd2", "tiny-sdxl", "tiny-dit", "tiny-mmdit"])
def test_encoding_reads_no_scalar(preset: str) -> None:
    """Fake tensors cannot show it: transformers skips its checks for them."""
    text_encoders = build(preset).text_encoders
    tokens = text_encoders.tokenize(CAPTIONS)
    with torch.no_grad(), _Reads() as reads:
        text_encoders.encode(tokens)
        assert reads.count == 0
        # The mode sees what it is meant to see.
        bool(tokens[0].any())
    assert reads.count == 1


def test_padding_changes_no_state_of_a_caption() -> None:
    """A T5 alone ignores padding: a caption has the same states in any batch."""
    text_encoders = build("tiny-dit").text_encoders
    [encoder], [ids] = text_encoders.encoders, text_encoders.tokenize(CAPTIONS)
    with torch.no_grad():
        states = text_encoders.encode([ids]).states
        for row, caption in zip(states, ids, strict=True):
            length = int(caption.ne(encoder.config.pad_token_id).sum())
            alone = encoder(caption[None, :length]).last_hidden_state[0]
            torch.testing.assert_close(row[:length], alone)
            assert not row[length:].any()
