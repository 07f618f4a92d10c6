"""Parts of Nemotron's vision models around the text model: tower, projector and image features.

transformers has no class for these models: the hub's checkpoints include the code of their config,
and vLLM has its own model, whose smallest tower is made here.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional

from tests import tiny_llama

PREFIX = "language_model."
IMAGE, START, END = "<image>", "<img>", "</img>"
SIDE = 64  # pixels of a tile: 4 tokens of 2 × 2 patches

_PATCH, _GRID = 16, SIDE // 16
_TOWER, _WIDTH, _HEADS, _LAYERS, _MLP = "vit_small_patch16_224", 384, 6, 12, 1536
_HIDDEN, _PROJECTOR = 128, 256
_REGISTERS = 8  # the tokens of two teachers among them
_MEAN, _STD = [0.48, 0.46, 0.41], [0.27, 0.26, 0.28]
_RADIO = "vision_model.radio_model"
_CLASS = "NemotronH_VL_Config"
_CODE = f"""
from transformers import NemotronHConfig, PretrainedConfig


class {_CLASS}(PretrainedConfig):
    model_type = "ARCHITECTURE"
    is_composition = True

    def __init__(self, vision_config=None, llm_config=None, **kwargs):
        super().__init__(**kwargs)
        self.vision_config = PretrainedConfig(**(vision_config or {{}}))
        self.llm_config = NemotronHConfig(**(llm_config or {{}}))
"""


def surrounding(architecture: str) -> Callable[[Path], None]:
    """Make the function that turns a text model's checkpoint (``PREFIX``) into the whole model's.

    Args:
        architecture: class of the whole model, and the type of its config; vLLM serves several
            architectures with one class.
    """

    def surround(directory: Path) -> None:
        file = directory / "model.safetensors"
        save_file(load_file(file) | _tower(), file, metadata={"format": "pt"})
        file = directory / "config.json"
        config = _config(json.loads(file.read_text()), architecture)
        file.write_text(json.dumps(config, indent=2))
        code = _CODE.replace("ARCHITECTURE", architecture)
        (directory / "configuration.py").write_text(code)
        tokenizer = tiny_llama.tokenizer()
        tokenizer.add_special_tokens({"additional_special_tokens": [IMAGE, START, END]})
        tokenizer.save_pretrained(directory)

    return surround


def _config(text: dict[str, Any], architecture: str) -> dict[str, Any]:
    return {
        "model_type": architecture,
        "architectures": [architecture],
        "auto_map": {"AutoConfig": f"configuration.{_CLASS}"},
        "quantization_config": text.pop("quantization_config"),
        "llm_config": text | {"architectures": ["NemotronHForCausalLM"]},
        "vision_config": {
            "args": {
                "model": _TOWER,
                "cpe_max_size": SIDE,
                "register_multiple": _REGISTERS,
                "teachers": [{"name": "clip"}, {"name": "siglip"}],
                "cls_token_per_teacher": True,
            },
            "patch_size": _PATCH,
            "preferred_resolution": [SIDE, SIDE],
        },
        "vit_hidden_size": _WIDTH,
        "projector_hidden_size": _PROJECTOR,
        "force_image_size": SIDE,
        "patch_size": _PATCH,
        "downsample_ratio": 0.5,
        "ps_version": "v2",
        "image_tag_type": "internvl",
        "template": "nemotron_nano",
        "use_thumbnail": True,
        "norm_mean": _MEAN,
        "norm_std": _STD,
        "torch_dtype": "bfloat16",
    }


def _tower() -> dict[str, Tensor]:
    """Tensors of tower and projector, with weights that preserve activation magnitudes."""
    random = torch.Generator().manual_seed(1)
    tensors: dict[str, Tensor] = {}

    def linear(name: str, rows: int, columns: int, *, bias: bool = True) -> None:
        weight = torch.randn(rows, columns, generator=random) * columns**-0.5
        tensors[f"{name}.weight"] = weight.bfloat16()
        if bias:
            tensors[f"{name}.bias"] = torch.zeros(rows, dtype=torch.bfloat16)

    def norm(name: str) -> None:
        tensors[f"{name}.weight"] = torch.ones(_WIDTH, dtype=torch.bfloat16)
        tensors[f"{name}.bias"] = torch.zeros(_WIDTH, dtype=torch.bfloat16)

    patches = f"{_RADIO}.model.patch_generator"
    linear(f"{patches}.embedder", _WIDTH, 3 * _PATCH**2, bias=False)
    for name, shape in (("pos_embed", (1, _GRID**2)), ("cls_token.token", (_REGISTERS,))):
        value = torch.randn(*shape, _WIDTH, generator=random)
        tensors[f"{patches}.{name}"] = value.bfloat16()
    for layer in range(_LAYERS):
        block = f"{_RADIO}.model.blocks.{layer}"
        norm(f"{block}.norm1")
        linear(f"{block}.attn.qkv", 3 * _WIDTH, _WIDTH)
        linear(f"{block}.attn.proj", _WIDTH, _WIDTH)
        norm(f"{block}.norm2")
        linear(f"{block}.mlp.fc1", _MLP, _WIDTH)
        linear(f"{block}.mlp.fc2", _WIDTH, _MLP)
    tensors[f"{_RADIO}.input_conditioner.norm_mean"] = torch.full((3, 1, 1), 0.45)
    tensors[f"{_RADIO}.input_conditioner.norm_std"] = torch.full((3, 1, 1), 0.27)
    tensors[f"{_RADIO}.summary_idxs"] = torch.tensor([0, 1])
    tensors["mlp1.0.weight"] = torch.ones(4 * _WIDTH, dtype=torch.bfloat16)
    linear("mlp1.1", _PROJECTOR, 4 * _WIDTH, bias=False)
    linear("mlp1.3", _HIDDEN, _PROJECTOR, bias=False)
    return tensors


def features(directory: Path, pixels: Tensor) -> Tensor:
    """Embeddings of the tokens of an image of one tile, in float32.

    Args:
        directory: directory of the checkpoint.
        pixels: uint8 ``(SIDE, SIDE, 3)``.
    """
    stored = load_file(directory / "model.safetensors")
    tensors = {name: stored[name].float() for name in _tower()}

    def linear(name: str, x: Tensor) -> Tensor:
        return functional.linear(x, tensors[f"{name}.weight"], tensors.get(f"{name}.bias"))

    def norm(name: str, x: Tensor) -> Tensor:
        parameters = tensors[f"{name}.weight"], tensors[f"{name}.bias"]
        return functional.layer_norm(x, (_WIDTH,), *parameters, eps=1e-6)

    x = (pixels / 255 - torch.tensor(_MEAN)) / torch.tensor(_STD)
    x = x.unflatten(1, (_GRID, _PATCH)).unflatten(0, (_GRID, _PATCH)).permute(0, 2, 4, 1, 3)
    patches = f"{_RADIO}.model.patch_generator"
    x = linear(f"{patches}.embedder", x.reshape(_GRID**2, -1)) + tensors[f"{patches}.pos_embed"][0]
    x = torch.cat([tensors[f"{patches}.cls_token.token"], x])
    for layer in range(_LAYERS):
        block = f"{_RADIO}.model.blocks.{layer}"
        qkv = linear(f"{block}.attn.qkv", norm(f"{block}.norm1", x))
        q, k, v = qkv.unflatten(1, (3, _HEADS, -1)).permute(1, 2, 0, 3)
        attended = functional.scaled_dot_product_attention(q, k, v).transpose(0, 1).flatten(1)
        x = x + linear(f"{block}.attn.proj", attended)
        hidden = functional.gelu(linear(f"{block}.mlp.fc1", norm(f"{block}.norm2", x)))
        x = x + linear(f"{block}.mlp.fc2", hidden)
    # Two by two patches become one token.
    x = x[_REGISTERS:].view(_GRID // 2, 2, _GRID // 2, 2, -1).transpose(1, 2).reshape(_GRID, -1)
    x = functional.rms_norm(x, x.shape[-1:], tensors["mlp1.0.weight"], 1e-5)
    return linear("mlp1.3", linear("mlp1.1", x).relu().square())
