"""Checkpoints in ModelOpt's format with faults that tools and engines have produced."""

import re
import shutil
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


def swizzle_scales(right: Path, broken: Path) -> Path:
    """Write block scales in the tensor core's layout into a checkpoint whose layout is linear."""
    tensors = _copy(right, broken)
    for name, scales in tensors.items():
        if name.endswith(".weight_scale"):
            order = blocked_order(*scales.shape)
            tensors[name] = scales.view(torch.uint8).flatten()[order].view(scales.dtype)
            tensors[name] = tensors[name].view(scales.shape)
    return _save(tensors, broken)


def blocked_order(rows: int, columns: int) -> Tensor:
    """Indices that reorder linear scales into the blocked layout, without the padding."""
    row, column = torch.arange(rows)[:, None], torch.arange(columns)
    tile = row // 128 * -(-columns // 4) + column // 4
    place = (tile * 32 + row % 32) * 16 + row % 128 // 32 * 4 + column % 4
    return place.flatten().argsort()


def share_largest_scale(right: Path, broken: Path) -> Path:
    """Give fused projections the largest of their global scales, but leave the codes unchanged."""
    tensors = _copy(right, broken)
    for group in FUSED:
        first = re.compile(rf"(.*\.){group[0]}\.weight_scale_2")
        for parent in [m[1] for name in tensors if (m := first.fullmatch(name))]:
            names = [f"{parent}{projection}.weight_scale_2" for projection in group]
            largest = torch.stack([tensors[name] for name in names]).max()
            tensors |= {name: largest.clone() for name in names}
    return _save(tensors, broken)


def _copy(right: Path, broken: Path) -> dict[str, Tensor]:
    shutil.copytree(right, broken)
    with safe_open(broken / "model.safetensors", framework="pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


def _save(tensors: dict[str, Tensor], folder: Path) -> Path:
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder
