"""The functions of docs/examples/enrich_columns.py with tiny models in local folders."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
from sm_train.toolkit.data_prep.enrichment.enrich import EnrichJob, enrich

from tests.support.image_files import write_album

pytestmark = pytest.mark.integration

EXAMPLES = Path(__file__).parents[4] / "docs" / "examples"
LAYERS = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
VISION = LAYERS | {"num_attention_heads": 2, "image_size": 32, "patch_size": 16}
TEXT = LAYERS | {"num_attention_heads": 2, "vocab_size": 40, "max_position_embeddings": 64}
SQUARE = {"height": 32, "width": 32}


def save_clip(folder: Path) -> None:
    from transformers import CLIPConfig, CLIPImageProcessor, CLIPModel

    config = CLIPConfig(vision_config=VISION, text_config=TEXT, projection_dim=8)
    CLIPModel(config).save_pretrained(folder)
    CLIPImageProcessor(size={"shortest_edge": 32}, crop_size=SQUARE).save_pretrained(folder)
    torch.save({"weight": torch.randn(1, 8), "bias": torch.zeros(1)}, folder / "linear.pt")


def save_siglip(folder: Path) -> None:
    from transformers import SiglipConfig, SiglipImageProcessor, SiglipModel

    SiglipModel(SiglipConfig(vision_config=VISION, text_config=TEXT)).save_pretrained(folder)
    SiglipImageProcessor(size=SQUARE).save_pretrained(folder)


def save_classifier(folder: Path) -> None:
    from transformers import ViTConfig, ViTForImageClassification, ViTImageProcessor

    labels = {"clean": 0, "watermark": 1}
    config = ViTConfig(**VISION, label2id=labels, id2label={0: "clean", 1: "watermark"})
    ViTForImageClassification(config).save_pretrained(folder)
    ViTImageProcessor(size=SQUARE).save_pretrained(folder)


def save_blip(folder: Path) -> None:
    from transformers import (
        BertTokenizer,
        BlipConfig,
        BlipForConditionalGeneration,
        BlipImageProcessor,
        BlipProcessor,
    )

    folder.mkdir(parents=True)
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "[DEC]", "[ENC]"]
    words += [f"word{number}" for number in range(33)]
    (folder / "vocab.txt").write_text("\n".join(words))
    ends = {"bos_token_id": 5, "eos_token_id": 3, "sep_token_id": 3, "pad_token_id": 0}
    text = TEXT | ends | {"encoder_hidden_size": 16}
    BlipForConditionalGeneration(
        BlipConfig(vision_config=VISION, text_config=text, projection_dim=8)
    ).save_pretrained(folder)
    tokenizer = BertTokenizer(str(folder / "vocab.txt"))
    BlipProcessor(BlipImageProcessor(size=SQUARE), tokenizer).save_pretrained(folder)


def run(folder: Path, function: str) -> list[Any]:
    """Return the column that a function of the example makes for three images."""
    write_album(folder / "in", 3)
    job = EnrichJob(
        *(str(folder / "in"), str(folder / "out"), f"enrich_columns:{function}", EXAMPLES),
        *(folder / "model", 2, 64),
        workers=1,
    )
    [column] = enrich(job, lambda progress: None).result.columns
    values: list[Any] = pq.read_table(folder / "out" / "table")[column].to_pylist()
    return values


@pytest.mark.slow
def test_captions(tmp_path: Path) -> None:
    save_blip(tmp_path / "model")
    captions = run(tmp_path, "caption")
    assert all(isinstance(caption, str) for caption in captions)
    assert len(captions) == 3


@pytest.mark.slow
@pytest.mark.parametrize("save", [save_clip, save_siglip])
def test_embeddings_have_the_length_one(tmp_path: Path, save: Any) -> None:
    save(tmp_path / "model")
    vectors = torch.tensor(run(tmp_path, "embedding"))
    assert vectors.norm(dim=1).tolist() == pytest.approx([1.0] * 3)
    assert not torch.equal(vectors[0], vectors[1])


@pytest.mark.slow
def test_aesthetic_scores_are_a_linear_layer_on_the_embedding(tmp_path: Path) -> None:
    save_clip(tmp_path / "first" / "model")
    vectors = torch.tensor(run(tmp_path / "first", "embedding"))
    (tmp_path / "second").mkdir()
    (tmp_path / "second" / "model").symlink_to(tmp_path / "first" / "model")
    weight = torch.load(tmp_path / "first" / "model" / "linear.pt")["weight"]
    scores = run(tmp_path / "second", "aesthetic")
    assert scores == pytest.approx((vectors @ weight.T).squeeze(1).tolist(), abs=1e-5)


@pytest.mark.slow
def test_watermarks_are_probabilities(tmp_path: Path) -> None:
    save_classifier(tmp_path / "model")
    assert all(0 < value < 1 for value in run(tmp_path, "watermark"))
