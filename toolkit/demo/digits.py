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

Features = NDArray[np.floating[Any]]
"""(N, D)."""

_COMPONENTS = 24
"""Principal components that keep 90 % of the digits' variance."""


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
    ``real`` are the features of all real digits, which ``projection`` makes of greys.
    """

    classifier: Any
    accuracy: float
    projection: Any
    real: Features

    def recognised(self, images: Images, digits: NDArray[np.int64]) -> float:
        """The share of ``images`` that are taken for the digits they were asked to be."""
        return float(np.mean(self.classifier.predict(_greys(images)) == digits))

    def distance(self, images: Images) -> float:
        """The Fréchet distance of ``images`` from real digits; 0 if they are alike.

        As FID (Heusel et al., arXiv 1706.08500), with principal components for features.
        """
        return frechet_distance(self.projection.transform(_greys(images)), self.real)


def frechet_distance(one: Features, other: Features) -> float:
    """Between two normal distributions that have the samples' means and covariances (N, D):
    |μ₁ − μ₂|² + tr(C₁ + C₂ − 2·(C₁·C₂)^½)."""
    means = one.mean(axis=0) - other.mean(axis=0)
    first, second = np.cov(one, rowvar=False), np.cov(other, rowvar=False)
    # The roots of the product's eigenvalues; rounding may leave them a little below zero.
    roots = np.sqrt(np.maximum(np.linalg.eigvals(first @ second).real, 0.0))
    return float(means @ means + np.trace(first) + np.trace(second) - 2 * roots.sum())


def _greys(images: Images) -> Features:
    """Scikit-learn's own units: 64 greys from 0 to 16."""
    greys: Features = images.mean(axis=-1).reshape(len(images), 64) * 16
    return greys


def train_judge() -> Judge:
    """Train on 1,200 digits and test on the remaining 597."""
    from sklearn.datasets import load_digits
    from sklearn.decomposition import PCA
    from sklearn.model_selection import train_test_split
    from sklearn.svm import SVC

    digits = load_digits()
    seen, unseen, seen_digits, unseen_digits = train_test_split(
        digits.data, digits.target, train_size=1200, stratify=digits.target, random_state=0
    )
    classifier = SVC(gamma=0.001, C=10).fit(seen, seen_digits)
    projection = PCA(_COMPONENTS, random_state=0).fit(digits.data)
    accuracy = float(classifier.score(unseen, unseen_digits))
    return Judge(classifier, accuracy, projection, projection.transform(digits.data))


def draw_digits(model: Path, each: int, seed: int = 0) -> tuple[Images, NDArray[np.int64]]:
    """Draw ``each`` images of every digit with a final model or a checkpoint.

    Returns the images and what was asked.
    """
    import torch
    from sm_train.entrypoints.models.sampling import find_source, load_pipeline

    pipeline = load_pipeline(find_source(model))
    digits = np.tile(np.arange(10), each)
    result = pipeline(
        [caption(int(digit)) for digit in digits],
        num_inference_steps=25,
        guidance_scale=2.0,
        generator=torch.Generator().manual_seed(seed),
        output_type="np",
    )
    return result.images, digits
