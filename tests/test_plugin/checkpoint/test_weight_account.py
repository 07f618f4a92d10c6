"""Weights counted by kind: by name in a checkpoint, by class in a built model."""

from pathlib import Path

import pytest
import torch
from torch import nn

from vllm_fp4_plugin.checkpoint import weight_account
from vllm_fp4_plugin.checkpoint.files import TensorHeader
from vllm_fp4_plugin.report import LayerRecord, Report

FILE = Path("model.safetensors")


def headers(**of: tuple[str, tuple[int, ...]]) -> dict[str, TensorHeader]:
    return {name: TensorHeader(dtype, shape, FILE) for name, (dtype, shape) in of.items()}


@pytest.mark.parametrize(
    ("name", "shape", "kind"),
    [
        ("model.layers.0.mlp.experts.3.up_proj.weight", (64, 32), "experts"),
        ("model.layers.0.mlp.experts.gate_up_proj", (8, 64, 32), "experts"),
        ("model.layers.0.mlp.shared_experts.up_proj.weight", (64, 32), "linear layers"),
        ("model.layers.0.mlp.gate.weight", (8, 32), "linear layers"),
        ("model.layers.0.self_attn.q_norm.weight", (16,), "norms"),
        ("transformer.h.0.ln_1.weight", (32,), "norms"),
        ("transformer.wte.weight", (320, 32), "embeddings"),
        ("model.embed_tokens.weight", (320, 32), "embeddings"),
        ("output.weight", (320, 32), "head"),
        ("lm_head.weight", (320, 32), "head"),
        ("visual.patch_embed.proj.weight", (32, 3, 14, 14), "others"),
        ("model.layers.0.mixer.A_log", (8,), "others"),
        ("model.layers.0.layer_scalar", (1,), "others"),
    ],
)
def test_a_name_tells_the_kind(name: str, shape: tuple[int, ...], kind: str) -> None:
    account = weight_account.of_files(headers(**{name: ("BF16", shape)}))
    assert list(account.parts) == [kind]
    assert account.nbytes == 2 * torch.Size(shape).numel()


def test_scales_and_biases_take_bytes_and_are_no_weights() -> None:
    account = weight_account.of_files(
        headers(
            **{
                "o_proj.weight": ("U8", (64, 16)),
                "o_proj.weight_scale": ("F8_E4M3", (64, 2)),
                "o_proj.weight_scale_2": ("F32", ()),
                "o_proj.bias": ("BF16", (64,)),
                "down_proj.weight_scale": ("F8_E8M0", (64, 1)),
            }
        )
    )
    assert account.elements == 64 * 32
    assert account.nbytes == 64 * 16 + 64 * 2 + 4 + 2 * 64 + 64


def test_a_weight_that_modules_share_counts_once() -> None:
    from vllm_fp4_plugin.commands import built_weights

    model = nn.Module()
    with torch.device("meta"):
        model.embed = nn.Embedding(320, 32)
        model.head = nn.Linear(32, 320, bias=False)
        model.proj = nn.Linear(32, 64)
        model.norm = nn.RMSNorm(32)
    model.head.weight = model.embed.weight
    model.register_buffer("scalar", torch.ones(1, device="meta"))
    model.register_buffer("cache", torch.ones(99, device="meta"), persistent=False)
    report = Report([LayerRecord("proj", "nvfp4", "W4A16", "", 32 * 64, 1156)])
    account = built_weights.of_model(model, report)
    assert {kind: part.nbytes for kind, part in account.parts.items()} == {
        "embeddings": 4 * 320 * 32,
        "linear layers": 1156 + 4 * 64,  # as it is packed, and its bias
        "norms": 4 * 32,
        "others": 4,
    }
