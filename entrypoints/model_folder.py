"""Model folders in diffusers' own ``save_pretrained`` layout."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from sm_train.entrypoints import pipeline as pipeline_module
from sm_train.entrypoints.models import Parts
from sm_train.entrypoints.pipeline import TextToImagePipeline

_PIPELINE_FILE = "pipeline.py"


def to_pipeline(parts: Parts) -> TextToImagePipeline:
    """The pipeline of a model's parts, sampling by DDIM (Song et al., arXiv 2010.02502)."""
    from diffusers import DDIMScheduler

    return TextToImagePipeline(
        unet=parts.unet,
        scheduler=DDIMScheduler.from_config(parts.scheduler.config),
        text_encoder=parts.text_encoder,
        tokenizer=parts.tokenizer,
        vae=parts.vae,
    )


def _without_progress_bars() -> None:
    """Loading and saving print bars, on a terminal or not; a log and a command want none."""
    from diffusers.utils import logging as diffusers_logging
    from transformers.utils import logging as transformers_logging

    diffusers_logging.disable_progress_bar()
    transformers_logging.disable_progress_bar()


def save_model(parts: Parts, folder: Path) -> None:
    """Save every part below ``folder``, with the pipeline's code beside them.

    ``model_index.json`` is written last: a folder without it is not a model yet.
    """
    _without_progress_bars()
    staging = folder / ".saving"
    shutil.rmtree(staging, ignore_errors=True)
    to_pipeline(parts).save_pretrained(staging)
    shutil.copyfile(pipeline_module.__file__, staging / _PIPELINE_FILE)
    index = json.loads((staging / "model_index.json").read_text(encoding="utf-8"))
    index["_class_name"] = [Path(_PIPELINE_FILE).stem, TextToImagePipeline.__name__]
    (staging / "model_index.json").unlink()
    for path in sorted(staging.rglob("*")):
        target = folder / path.relative_to(staging)
        if path.is_dir():
            target.mkdir(parents=True, exist_ok=True)
        else:
            path.replace(target)
    shutil.rmtree(staging)
    temporary = folder / ".model_index.json"
    temporary.write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    temporary.replace(folder / "model_index.json")


def load_model(folder: Path) -> TextToImagePipeline:
    """Load what :func:`save_model` wrote, part by part: code that lies in the folder is not run."""
    from diffusers import AutoencoderKL, DDIMScheduler, UNet2DConditionModel
    from transformers import AutoTokenizer, CLIPTextModel

    _without_progress_bars()
    vae = folder / "vae"
    return TextToImagePipeline(
        unet=UNet2DConditionModel.from_pretrained(folder / "unet", local_files_only=True),
        scheduler=DDIMScheduler.from_pretrained(folder / "scheduler", local_files_only=True),
        text_encoder=CLIPTextModel.from_pretrained(folder / "text_encoder", local_files_only=True),
        tokenizer=AutoTokenizer.from_pretrained(folder / "tokenizer", local_files_only=True),
        vae=AutoencoderKL.from_pretrained(vae, local_files_only=True) if vae.is_dir() else None,
    )
