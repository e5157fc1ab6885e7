"""The demonstration's data, scikit-learn's 1,797 handwritten digits, and its classifier."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

NAMES = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
Images = NDArray[np.float32]
"""Images (N, 8, 8, 3) in 0 to 1."""

Features = NDArray[np.floating[Any]]
"""Features (N, D)."""

_COMPONENTS = 24
"""Principal components that keep 90 % of the digits' variance."""


def caption(digit: int) -> str:
    """Return the caption of a digit's images."""
    return f"a handwritten {NAMES[digit]}"


def write_digits(folder: Path) -> None:
    """Write each digit as a PNG of 8×8 pixels with its caption in a text file next to it."""
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
    """A support-vector classifier that was trained on real digits only.

    ``accuracy`` is measured on 597 real digits that it was not trained on. ``real`` are the
    features of all real digits; ``projection`` computes features from gray values.
    """

    classifier: Any
    accuracy: float
    projection: Any
    real: Features

    def recognized(self, images: Images, digits: NDArray[np.int64]) -> float:
        """Return the share of ``images`` that are classified as their prompted digits."""
        return float(np.mean(self.classifier.predict(_gray_values(images)) == digits))

    def distance(self, images: Images) -> float:
        """Return the Fréchet distance of ``images`` from real digits; 0 if they are alike.

        Computed like FID (Heusel et al., arXiv 1706.08500), with principal components for features.
        """
        return frechet_distance(self.projection.transform(_gray_values(images)), self.real)


def frechet_distance(first: Features, second: Features) -> float:
    """Return the Fréchet distance between two sets of features.

    |μ₁ − μ₂|² + tr(C₁ + C₂ − 2·(C₁·C₂)^½), with the means and covariances of the sets.
    """
    shift = first.mean(axis=0) - second.mean(axis=0)
    first_cov, second_cov = np.cov(first, rowvar=False), np.cov(second, rowvar=False)
    # The trace of the root is the sum of the eigenvalues' roots; rounding may make some negative.
    roots = np.sqrt(np.maximum(np.linalg.eigvals(first_cov @ second_cov).real, 0.0))
    return float(shift @ shift + np.trace(first_cov) + np.trace(second_cov) - 2 * roots.sum())


def _gray_values(images: Images) -> Features:
    """Return images in scikit-learn's units: (N, 64), gray values from 0 to 16."""
    grays: Features = images.mean(axis=-1).reshape(len(images), 64) * 16
    return grays


def train_judge() -> Judge:
    """Train on 1,200 digits and test on the remaining 597."""
    from sklearn.datasets import load_digits
    from sklearn.decomposition import PCA
    from sklearn.model_selection import train_test_split
    from sklearn.svm import SVC

    digits = load_digits()
    train, test, train_digits, test_digits = train_test_split(
        digits.data, digits.target, train_size=1200, stratify=digits.target, random_state=0
    )
    classifier = SVC(gamma=0.001, C=10).fit(train, train_digits)
    projection = PCA(_COMPONENTS, random_state=0).fit(digits.data)
    accuracy = float(classifier.score(test, test_digits))
    return Judge(classifier, accuracy, projection, projection.transform(digits.data))


def sample_digits(model: Path, per_digit: int, seed: int = 0) -> tuple[Images, NDArray[np.int64]]:
    """Sample ``per_digit`` images of every digit from a final model or a checkpoint.

    Return the images and their prompted digits.
    """
    import torch
    from sm_train.entrypoints.models.image_sampling import find_source, load_pipeline

    pipeline = load_pipeline(find_source(model))
    digits = np.tile(np.arange(10), per_digit)
    result = pipeline(
        [caption(int(digit)) for digit in digits],
        num_inference_steps=25,
        guidance_scale=2.0,
        generator=torch.Generator().manual_seed(seed),
        output_type="np",
    )
    return result.images, digits
