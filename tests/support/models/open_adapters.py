"""Draws an image with diffusers' own pipelines and an exported adapter, in a new process.

diffusers looks for PEFT when it is imported. Arguments: the folder of PEFT, and folders with a
``model`` and an adapter in ``run/final``, as FOLDER or FOLDER@SIZE for images of that many pixels a
side. Each gets ``image.npy``.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

ARGUMENTS: dict[str, Any] = {
    "prompt": ["a grey of 3"],
    "num_inference_steps": 3,
    "guidance_scale": 4.0,
    "output_type": "np",
}


def draw(pipeline: Any, **arguments: Any) -> Any:
    """Return one image (1, H, W, C) in [0, 1], from fixed noise."""
    import torch

    pipeline.set_progress_bar_config(disable=True)
    generator = [torch.Generator().manual_seed(0)]
    return pipeline(**ARGUMENTS, generator=generator, **arguments).images


def main() -> None:
    """Open each model and its adapter as the adapter's card says."""
    packages, *folders = sys.argv[1:]
    sys.path.insert(0, packages)
    import numpy as np
    from diffusers import DiffusionPipeline

    for argument in folders:
        name, _, size = argument.partition("@")
        folder = Path(name)
        model, adapter = folder / "model", folder / "run" / "final"
        pipeline = DiffusionPipeline.from_pretrained(
            model, trust_remote_code=(model / "pipeline.py").is_file()
        )
        card = (adapter / "README.md").read_text(encoding="utf-8")
        lines = card.partition("```python\n")[2].partition("```")[0].splitlines()
        [line] = [text for text in lines if "folder" in text]
        names = {"pipeline": pipeline, "folder": adapter}
        exec("\n".join([text for text in lines if text == "import peft"] + [line]), names)
        # PixArt's pipeline would draw the nearest published size.
        is_pixart = type(pipeline).__name__ == "PixArtSigmaPipeline"
        options: dict[str, Any] = {"use_resolution_binning": False} if is_pixart else {}
        options |= {"height": int(size), "width": int(size)} if size else {}
        np.save(folder / "image.npy", draw(pipeline, **options))


if __name__ == "__main__":
    main()
