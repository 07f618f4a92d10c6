"""Verification that a checkpoint's files hold all tensors of the model, and valid scales."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from vllm_fp4_plugin.checkpoint import files as checkpoint_files
from vllm_fp4_plugin.checkpoint import values as checkpoint_values
from vllm_fp4_plugin.engine import meta_model
from vllm_fp4_plugin.formats import UnsupportedCheckpoint


@dataclass(frozen=True)
class Verified:
    """Content of a complete checkpoint.

    Attributes:
        directory: directory of the checkpoint.
        tensors, files: number of tensors, and of safetensors files.
        format: exporter's format; None, like nvfp4_layers and global_scales, if the checkpoint is
            not quantised.
        nvfp4_layers: number of NVFP4 layers.
        global_scales: number of global scales, all within bounds.
        values_checked: whether the tensors' values were read and found valid, see
            ``checkpoint.values.check_values``.
    """

    directory: Path
    tensors: int
    files: int
    format: str | None = None
    nvfp4_layers: int | None = None
    global_scales: int | None = None
    values_checked: bool = False

    def lines(self) -> list[str]:
        """Lines that the command prints."""
        files = _count(self.files, "file")
        lines = [f"{self.directory}: complete, {self.tensors:,} tensors in {files}"]
        if self.nvfp4_layers is not None and self.global_scales is not None:
            lines.append(
                f"{self.format}: {_count(self.nvfp4_layers, 'NVFP4 layer')}, "
                f"{_count(self.global_scales, 'global scale')} within bounds"
            )
        if self.values_checked:
            lines.append("values: finite" + (", block scales positive" if self.format else ""))
        return lines

    def json(self) -> dict[str, Any]:
        """Content as a JSON object; ``verify --help`` names the fields."""
        return asdict(self) | {"directory": str(self.directory)}


def verified(directory: Path, *, values: bool = False, **engine_args: Any) -> Verified:
    """Verify that a checkpoint holds exactly the tensors that its model needs, and valid scales.

    The files are judged, not whether this machine's device can serve the model.

    Args:
        directory: directory of the checkpoint.
        values: whether to read and check values too, see ``checkpoint.values.check_values``.
        engine_args: arguments of ``meta_model.built``.

    Raises:
        ValueError: a tensor is missing, unknown to the model or invalid; the message names it.
    """
    headers = checkpoint_files.read_headers(directory)
    if not headers:
        raise UnsupportedCheckpoint(
            f"{directory}: holds no safetensors files; save the model in that format"
        )
    from vllm_fp4_plugin.checkpoint.dry_load import dry_load  # which imports vLLM
    from vllm_fp4_plugin.device import for_no_device

    with for_no_device(), meta_model.built(str(directory), **engine_args) as (model, config):
        dry_load(model, directory, headers)
        checkpoint = config.quant_config.checkpoint
    found: dict[str, Any] = {}
    if checkpoint is not None:
        layers = checkpoint_files.quantised_modules(headers, checkpoint.names)
        scales = checkpoint_values.global_scales(headers, checkpoint)
        found["format"] = checkpoint.format.name
        found |= {"nvfp4_layers": len(layers), "global_scales": len(scales)}
    if values:
        checkpoint_values.check_values(headers, checkpoint)
    files = {header.file for header in headers.values()}
    return Verified(directory, len(headers), len(files), **found, values_checked=values)


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
