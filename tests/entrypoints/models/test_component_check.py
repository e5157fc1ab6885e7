"""Pretrained components against the run file: every problem is one line with a fix."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sm_train.entrypoints.checkpoints.safetensors_header import HeaderError, parse_header
from sm_train.entrypoints.job_interface.job_config import JobConfigError, ModelConfig
from sm_train.entrypoints.models.component_files import (
    ComponentFileError,
    read_header,
    read_json,
    weight_files,
)
from sm_train.entrypoints.models.components import (
    ContradictionError,
    component_problems,
    learned_sigma,
    noise_settings,
    read_preset,
)
from sm_train.entrypoints.models.weight_files import read_layout

from tests.support.models.components import Files, as_json, published, safetensors


@dataclass
class Memory:
    """A model folder in memory."""

    contents: Files
    location: str = "model"

    @property
    def files(self) -> dict[str, int]:
        return {path: len(content) for path, content in self.contents.items()}

    def read(self, path: str, start: int, length: int) -> bytes:
        return self.contents[path][start : start + length]


def config(preset: str, **changes: Any) -> ModelConfig:
    options: dict[str, Any] = {
        "prediction_type": None,
        "zero_terminal_snr": None,
        "min_snr_gamma": None,
        "timestep_shift": None,
    }
    return ModelConfig(preset, **(options | changes))


def problems(files: Files, preset: str, **model: Any) -> list[str]:
    return component_problems(Memory(files), read_preset(preset), config(preset, **model))


def edited(files: Files, path: str, **changes: Any) -> Files:
    """Return the folder with keys of a JSON file changed; None removes a key."""
    document = json.loads(files[path]) | changes
    kept = {key: value for key, value in document.items() if changes.get(key, 0) is not None}
    return files | {path: as_json(kept)}


def without(files: Files, *prefixes: str) -> Files:
    return {path: content for path, content in files.items() if not path.startswith(prefixes)}


@pytest.mark.parametrize("preset", ["sd2", "sdxl", "mmdit-2b", "dit-xl", "tiny-sd2"])
def test_the_models_of_the_presets_have_no_problem(preset: str) -> None:
    assert problems(published(preset), preset) == []


SD2, SDXL, SD3, PIXART = "sd2", "sdxl", "mmdit-2b", "dit-xl"
UNET = "unet/diffusion_pytorch_model.safetensors"
TEXT = "text_encoder/model.safetensors"

CASES: dict[str, tuple[Files, str, dict[str, Any], str]] = {
    "an epsilon model, contradicted": (
        published(SD2, prediction_type="epsilon"),
        SD2,
        {"prediction_type": "v_prediction"},
        "model.prediction_type: the run file says v_prediction, and the pretrained model's "
        "scheduler/scheduler_config.json epsilon; remove it from the run file",
    ),
    "a scheduler without prediction_type is epsilon": (
        edited(published(SDXL), "scheduler/scheduler_config.json", prediction_type=None),
        SDXL,
        {"prediction_type": "v_prediction"},
        "model.prediction_type: the run file says v_prediction",
    ),
    "zero-SNR, contradicted": (
        published(SD2, rescale_betas_zero_snr=True),
        SD2,
        {"zero_terminal_snr": False},
        "model.zero_terminal_snr: the run file says false, and the pretrained model's "
        "scheduler/scheduler_config.json true",
    ),
    "zero-SNR with epsilon": (
        published(SD2, prediction_type="epsilon"),
        SD2,
        {"zero_terminal_snr": True},
        "model.zero_terminal_snr: needs v_prediction, and the pretrained model predicts epsilon",
    ),
    "zero-SNR with min-SNR": (
        published(SD2, rescale_betas_zero_snr=True),
        SD2,
        {"min_snr_gamma": 5.0},
        "model.min_snr_gamma: the pretrained model has zero terminal SNR",
    ),
    "shift, contradicted": (
        published(SD3),
        SD3,
        {"timestep_shift": 4.0},
        "model.timestep_shift: the run file says 4.0, and the pretrained model's "
        "scheduler/scheduler_config.json 3.0",
    ),
    "a flow model under a U-Net preset": (
        published(SD2, _class_name="FlowMatchEulerDiscreteScheduler"),
        SD2,
        {},
        "model.preset: the pretrained model predicts flow, and the preset supports epsilon or",
    ),
    "an SD2 U-Net under sdxl": (
        published(SD2),
        SDXL,
        {},
        "unet: is not the preset's network: down_block_types [",
    ),
    "an SD 1.5 U-Net under sd2": (
        edited(published(SD2), "unet/config.json", cross_attention_dim=768, attention_head_dim=8),
        SD2,
        {},
        "unet: is not the preset's network: attention_head_dim 8 instead of [5, 10, 20, 20], "
        "cross_attention_dim 768 instead of 1024; use another preset",
    ),
    "a transformer under a U-Net preset": (
        without(published(SD3), "vae") | {"model_index.json": b"{}"},
        SD2,
        {},
        "transformer: is a SD3Transformer2DModel, and the preset's network a UNet2D",
    ),
    "no tokenizer": (
        without(published(SD2), "tokenizer"),
        SD2,
        {},
        "tokenizer/ is missing: captions of text_encoder need the tokenizer",
    ),
    "no second tokenizer": (
        without(published(SDXL), "tokenizer_2"),
        SDXL,
        {},
        "tokenizer_2/ is missing: captions of text_encoder_2 need",
    ),
    "no second encoder": (
        without(published(SDXL), "text_encoder_2", "tokenizer_2", "model_index"),
        SDXL,
        {},
        "text_encoder_2/ is missing: the preset needs 2 text encoders",
    ),
    "an encoder too many": (
        published(SDXL) | {"text_encoder_3/config.json": b"{}"},
        SDXL,
        {},
        "text_encoder_3: the preset has 2 text encoders",
    ),
    "an encoder of another width": (
        edited(published(SD2), "text_encoder/config.json", hidden_size=768),
        SD2,
        {},
        "text_encoder: has hidden_size 768, and the preset 1024",
    ),
    "an encoder of another class": (
        edited(published(SD2), "text_encoder/config.json", architectures=["CLIPTextModelX"]),
        SD2,
        {},
        "text_encoder: is a CLIPTextModelX, and the preset needs CLIPTextModel",
    ),
    "latents of another autoencoder": (
        edited(published(SD2), "vae/config.json", latent_channels=16),
        SD2,
        {},
        "vae: has 16 latent channels, and the preset's network 4",
    ),
    "pickles": (
        without(published(SD2), UNET) | {"unet/diffusion_pytorch_model.bin": b"pickle"},
        SD2,
        {},
        "unet/diffusion_pytorch_model.bin: only pickled weights, which can run code when they are "
        "loaded; use a revision with safetensors",
    ),
    "no weights": (
        without(published(SD2), TEXT),
        SD2,
        {},
        "text_encoder: has no safetensors weights",
    ),
    "a cut file": (
        published(SD2) | {UNET: published(SD2)[UNET][:-3]},
        SD2,
        {},
        f"{UNET} has ",
    ),
    "a corrupt header": (
        published(SD2) | {UNET: b"\x00" * 6 + b"\xff\xff" + b"{}"},
        SD2,
        {},
        f"{UNET}: the safetensors header is damaged",
    ),
    "an empty file": (
        published(SD2) | {UNET: b""},
        SD2,
        {},
        f"{UNET}: the safetensors header is damaged",
    ),
    "a configuration that is not JSON": (
        published(SD2) | {"vae/config.json": b"{"},
        SD2,
        {},
        "vae/config.json is not JSON",
    ),
    "a component that the index lists": (
        without(published(SD2), "vae/"),
        SD2,
        {},
        "vae/ is missing, and model_index.json lists it",
    ),
    "noise levels of another kind": (
        published(SDXL, _class_name="EDMEulerScheduler"),
        SDXL,
        {},
        "scheduler/scheduler_config.json: _class_name EDMEulerScheduler is not supported: the "
        "network learned other noise levels",
    ),
    "continuous timesteps": (
        published(SDXL, _class_name="EulerDiscreteScheduler", timestep_type="continuous"),
        SDXL,
        {},
        "scheduler/scheduler_config.json: timestep_type continuous is not supported",
    ),
    "a number that is none": (
        published(SD2, beta_start="0.1"),
        SD2,
        {},
        "scheduler/scheduler_config.json: beta_start 0.1 is not supported",
    ),
    "a shift that is none": (
        published(SD3, shift="three"),
        SD3,
        {},
        "scheduler/scheduler_config.json: shift three is not supported",
    ),
    "a U-Net without a scheduler": (
        without(published(SD2), "scheduler", "model_index"),
        SD2,
        {},
        "scheduler/scheduler_config.json is missing, which says what unet learned to predict; copy "
        "it from the same model, or set model.prediction_type",
    ),
    "a tokenizer without a vocabulary": (
        without(published(SDXL), "tokenizer_2/tokenizer.json") | {"tokenizer_2/vocab.json": b"{}"},
        SDXL,
        {},
        "tokenizer_2/ has no vocabulary (tokenizer.json, or vocab.json with merges.txt",
    ),
    "a tokenizer that a job cannot convert": (
        without(published(PIXART), "tokenizer/tokenizer.json")
        | {"tokenizer/spiece.model": b"x", "tokenizer/added_tokens.json": b"{}"},
        PIXART,
        {},
        "tokenizer/ has spiece.model and no tokenizer.json, and a job has no sentencepiece",
    ),
    "an autoencoder of another size of latents": (
        edited(published(SD2), "vae/config.json", block_out_channels=[128, 256, 512]),
        SD2,
        {},
        "vae: divides the image's sides by 4, and the preset's by 8",
    ),
    "a configuration without its keys": (
        published(PIXART)
        | {"transformer/config.json": b'{"_class_name": "PixArtTransformer2DModel"}'},
        PIXART,
        {},
        "transformer: is not the preset's network: ",
    ),
    "architectures that are no list": (
        edited(published(SD2), "text_encoder/config.json", architectures=5),
        SD2,
        {},
        "text_encoder: is a nothing, and the preset needs CLIPTextModel",
    ),
    "an empty folder": ({"README.md": b""}, SD2, {}, "holds no unet, transformer, vae or text"),
}


@pytest.mark.parametrize("case", CASES)
def test_a_problem_is_one_line_with_a_fix(case: str) -> None:
    files, preset, model, expected = CASES[case]
    found = problems(files, preset, **model)
    assert any(expected in problem for problem in found), found
    for problem in found:
        assert "\n" not in problem
        assert "; " in problem or case == "an empty folder"


def test_what_the_scheduler_says_is_the_default() -> None:
    scheduler = {
        "prediction_type": "epsilon",
        "beta_schedule": "linear",
        "beta_start": 0.001,
        "beta_end": 0.02,
        "num_train_timesteps": 1000,
        "clip_sample": True,
    }
    settings = noise_settings(read_preset(SD2), config(SD2), scheduler)
    assert settings.prediction_type == "epsilon"
    assert settings.schedule["beta_schedule"] == "linear"
    assert settings.schedule["beta_start"] == 0.001
    flow = {"_class_name": "FlowMatchEulerDiscreteScheduler", "shift": 3.0}
    assert noise_settings(read_preset(SD3), config(SD3), flow).shift == 3.0
    zero_snr = scheduler | {"prediction_type": "v_prediction", "rescale_betas_zero_snr": True}
    assert noise_settings(read_preset(SD2), config(SD2), zero_snr).zero_terminal_snr
    # An epsilon PixArt under the preset whose own default is a flow.
    assert noise_settings(read_preset(PIXART), config(PIXART), scheduler).prediction_type == (
        "epsilon"
    )


def test_values_that_agree_are_no_contradiction() -> None:
    flow = {"_class_name": "FlowMatchEulerDiscreteScheduler", "shift": 3.0}
    model = config(SD3, timestep_shift=3.0, prediction_type="flow")
    assert noise_settings(read_preset(SD3), model, flow).shift == 3.0
    with pytest.raises(ContradictionError, match="use_dynamic_shifting"):
        noise_settings(read_preset(SD3), config(SD3), flow | {"use_dynamic_shifting": True})


def test_a_scheduler_without_a_network_decides_nothing() -> None:
    files = without(published(SD2, prediction_type="epsilon"), "unet", "model_index")
    assert problems(files, SD2, prediction_type="v_prediction") == []


def test_a_network_without_a_scheduler_is_trained_for_what_the_run_file_says() -> None:
    files = without(published(SD2), "scheduler", "model_index")
    assert problems(files, SD2, prediction_type="epsilon") == []
    # Nothing else than a flow is known of this class.
    assert problems(without(published(SD3), "scheduler", "model_index"), SD3) == []


def test_tokens_of_bytes_need_no_vocabulary() -> None:
    files = edited(
        published(SD3), "tokenizer_3/tokenizer_config.json", tokenizer_class="ByT5Tokenizer"
    )
    assert problems(without(files, "tokenizer_3/tokenizer.json"), SD3) == []


def test_sd3_without_t5_is_supported() -> None:
    files = without(published(SD3), "text_encoder_3", "tokenizer_3", "model_index")
    assert problems(files, SD3) == []


def test_pixart_is_known_by_its_earlier_class_and_with_a_learned_sigma() -> None:
    changes = {
        "_class_name": "Transformer2DModel",
        "norm_type": "ada_norm_single",
        "out_channels": 8,
    }
    files = edited(
        published(PIXART, _class_name="DPMSolverMultistepScheduler", prediction_type="epsilon"),
        "transformer/config.json",
        **changes,
    )
    assert problems(files, PIXART) == []
    assert learned_sigma(read_json(Memory(files), "transformer/config.json"))


def sharded(variant: str = "", index_variant: str = "") -> Files:
    shard = f"diffusion_pytorch_model{variant}-0000{{}}-of-00002.safetensors"
    names = [shard.format(number) for number in (1, 2)]
    weight_map = {"a": names[0], "b": names[1]}
    return {
        f"unet/diffusion_pytorch_model.safetensors.index{index_variant}.json": as_json(
            {"weight_map": weight_map}
        ),
        f"unet/{names[0]}": safetensors(a=(2,)),
        f"unet/{names[1]}": safetensors(b=(3,)),
    }


@pytest.mark.parametrize(
    ("files", "variant", "count"),
    [
        ({"unet/diffusion_pytorch_model.fp16.safetensors": safetensors(a=(1,))}, "fp16", 1),
        (sharded(), None, 2),
        (sharded(".fp16", ".fp16"), "fp16", 2),
        (
            sharded() | {"unet/diffusion_pytorch_model.fp16.safetensors": safetensors(a=(1,))},
            None,
            2,
        ),
    ],
)
def test_the_variant_that_exists_is_used(files: Files, variant: str | None, count: int) -> None:
    found = weight_files(Memory(files), "unet")
    assert (found.variant, len(found.paths)) == (variant, count)


def test_a_missing_shard_is_named() -> None:
    files = without(sharded(), "unet/diffusion_pytorch_model-00002")
    with pytest.raises(ComponentFileError, match=r"00002-of-00002\.safetensors is missing, and"):
        weight_files(Memory(files), "unet")


@pytest.mark.parametrize(
    "weight_map", [None, [], {}, ["a"], "a", 3, {"a": 3, "b": "x"}, {"a": ["x"]}]
)
def test_an_index_of_another_form_is_refused(weight_map: object) -> None:
    index = "unet/diffusion_pytorch_model.safetensors.index.json"
    with pytest.raises(ComponentFileError, match=r"index\.json lists no weights; copy"):
        weight_files(Memory({index: as_json({"weight_map": weight_map})}), "unet")


@given(st.binary(max_size=200))
def test_any_header_is_read_or_refused(content: bytes) -> None:
    with contextlib.suppress(ComponentFileError):
        read_header(Memory({"x.safetensors": content}), "x.safetensors")


def headed(header: bytes, length: int | None = None) -> bytes:
    return (len(header) if length is None else length).to_bytes(8, "little") + header


def tensors(**places: tuple[int, int, int]) -> bytes:
    """Return the header of float32 vectors, each given as start, end and number of values."""
    return json.dumps(
        {
            name: {"dtype": "F32", "shape": [values], "data_offsets": [start, end]}
            for name, (start, end, values) in places.items()
        }
    ).encode()


@pytest.mark.parametrize(
    "content",
    [
        headed(b"{}", 2**63),
        headed(b"{}", 100_000_001),
        headed(b"[" * 100_000),
        headed(b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": []}}'),
        headed(b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, "4"]}}'),
        headed(b'{"a": {"dtype": "F32", "shape": ["1"], "data_offsets": [0, 4]}}'),
        headed(
            b'{"a": {"dtype": "F32", "shape": [1' + b"0" * 5000 + b'], "data_offsets": [0, 4]}}'
        ),
        headed(tensors(a=(0, 8, 2), b=(4, 12, 2))) + bytes(12),
        headed(tensors(a=(0, 4, 1), b=(8, 12, 1))) + bytes(12),
        headed(tensors(a=(-4, 0, 1))) + bytes(4),
        headed(tensors(a=(0, 4, 2**40))) + bytes(4),
        headed(tensors(a=(0, 0, -1))),
        headed(b'{"a": {"dtype": "F32", "shape": [-1, -2], "data_offsets": [0, 8]}}') + bytes(8),
        headed(tensors(a=(0, 0, 0)).replace(b"F32", b"F33")),
        headed(b"{" + tensors(a=(0, 0, 0))[1:-1] + b"," + tensors(a=(0, 0, 0))[1:]),
        headed(b'{"\xff": {}}'),
    ],
)
def test_a_hostile_header_is_refused(content: bytes, tmp_path: Path) -> None:
    with pytest.raises(ComponentFileError, match="header is damaged"):
        read_header(Memory({"x.safetensors": content}), "x.safetensors")


def test_a_lying_length_is_refused_before_it_is_read(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(headed(b"{}", 2**62))
    with pytest.raises(ComponentFileError, match="header is damaged"):
        read_layout(path)


def test_a_header_over_the_limit_of_the_format_is_not_read() -> None:
    asked: list[int] = []

    def read(start: int, length: int) -> bytes:
        asked.append(length)
        return (100_000_001).to_bytes(8, "little")

    with pytest.raises(HeaderError, match="header is damaged"):
        parse_header(read, 2**40, "x.safetensors")
    assert asked == [8]


@given(st.integers(0, 107), st.integers(0, 255))
def test_a_changed_byte_of_a_file_never_raises_another_error(index: int, value: int) -> None:
    content = bytearray(published(SD2)[UNET])
    content[index % len(content)] = value
    problems(published(SD2) | {UNET: bytes(content)}, SD2)


def test_the_training_job_refuses_with_the_same_words(tmp_path: Path) -> None:
    from sm_train.entrypoints.models.builder import build_components

    for path, content in without(published("tiny-sd2"), "tokenizer").items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_bytes(content)
    [_, problem] = problems(without(published("tiny-sd2"), "tokenizer"), "tiny-sd2") * 2
    with pytest.raises(JobConfigError) as caught:
        build_components(config("tiny-sd2"), 64, components=tmp_path, previous=None)
    assert str(caught.value) == f"model.components: {problem}"


@pytest.mark.slow
def test_accepted_vocabulary_of_clip_is_loaded_without_further_packages(tmp_path: Path) -> None:
    """In a process without sentencepiece, tiktoken and protobuf, as a job may be."""
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    vocabulary = {"<|startoftext|>": 0, "<|endoftext|>": 1, "a</w>": 2}
    (folder / "vocab.json").write_text(json.dumps(vocabulary))
    (folder / "merges.txt").write_text("#version: 0.2\n")
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "CLIPTokenizer"}')
    program = (
        "import sys\n"
        "for name in ('sentencepiece', 'tiktoken', 'google.protobuf'): sys.modules[name] = None\n"
        "from transformers import AutoTokenizer\n"
        "tokenizer = AutoTokenizer.from_pretrained(sys.argv[1], local_files_only=True)\n"
        "print(tokenizer('a')['input_ids'])\n"
    )
    command = [sys.executable, "-c", program, str(folder)]
    loaded = subprocess.run(command, capture_output=True, text=True, check=False)
    assert loaded.stdout == "[0, 2, 1]\n", loaded.stderr[-500:]
