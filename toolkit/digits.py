"""The demonstration's data and its judge: scikit-learn's 1,797 handwritten digits."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

NAMES = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
Images = NDArray[np.float32]
"""(N, 8, 8, 3), from 0 to 1."""


def caption(digit: int) -> str:
    return f"a handwritten {NAMES[digit]}"


def write_digits(folder: Path) -> None:
    """Write each digit as a PNG of 8×8 pixels with its caption beside it."""
    from PIL import Image
    from sklearn.datasets import load_digits

    folder.mkdir(parents=True, exist_ok=True)
    digits = load_digits()
    for number, (image, digit) in enumerate(zip(digits.images, digits.target, strict=True)):
        picture = Image.fromarray(np.rint(image * 255 / 16).astype(np.uint8))
        picture.save(folder / f"{number:04d}.png")
        (folder / f"{number:04d}.txt").write_text(caption(int(digit)), encoding="utf-8")


@dataclass(frozen=True)
class Judge:
    """A support-vector classifier that has seen real digits only.

    ``accuracy`` is its share of right answers on 597 real digits that it was not trained on.
    """

    classifier: Any
    accuracy: float

    def recognised(self, images: Images, digits: NDArray[np.int64]) -> float:
        """The share of ``images`` that are taken for the digits they were asked to be."""
        # Scikit-learn's own units: 64 greys from 0 to 16.
        features = images.mean(axis=-1).reshape(len(images), 64) * 16
        return float(np.mean(self.classifier.predict(features) == digits))


def train_judge() -> Judge:
    """Train on 1,200 digits and test on the remaining 597."""
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split
    from sklearn.svm import SVC

    digits = load_digits()
    seen, unseen, seen_digits, unseen_digits = train_test_split(
        digits.data, digits.target, train_size=1200, stratify=digits.target, random_state=0
    )
    classifier = SVC(gamma=0.001, C=10).fit(seen, seen_digits)
    return Judge(classifier, float(classifier.score(unseen, unseen_digits)))


def draw_digits(model: Path, each: int, seed: int = 0) -> tuple[Images, NDArray[np.int64]]:
    """Draw ``each`` images of every digit with a final model; the images and what was asked."""
    import torch
    from sm_train.entrypoints.model_folder import load_model

    pipeline = load_model(model)
    pipeline.set_progress_bar_config(disable=True)
    digits = np.tile(np.arange(10), each)
    result = pipeline(
        [caption(int(digit)) for digit in digits],
        num_inference_steps=25,
        guidance_scale=2.0,
        generator=torch.Generator().manual_seed(seed),
        output_type="np",
    )
    return result.images, digits
