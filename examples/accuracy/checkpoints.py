"""Folders that variants are served from: the user's checkpoint, or files made from it."""

import hashlib
import json
from pathlib import Path
from typing import Any

from examples.accuracy.rounding import round_checkpoint
from examples.accuracy.variants import Variant
from examples.quantize import quantize
from examples.stages import StageCache, hash_files, plugin_sources
from vllm_fp4_plugin.quantizer.errors import QuantizerError


def fingerprint(checkpoint: Path) -> str:
    """Fingerprint of a checkpoint from its files' names, sizes and modification times."""
    files = sorted(file for file in checkpoint.rglob("*") if file.is_file())
    stats = [(str(file.relative_to(checkpoint)), file.stat()) for file in files]
    described = [(name, stat.st_size, stat.st_mtime_ns) for name, stat in stats]
    return hashlib.sha256(json.dumps(described).encode()).hexdigest()


def read_sixteen_bit(checkpoint: Path) -> dict[str, Any]:
    """Text config of a 16-bit checkpoint from which variants can be made.

    Raises:
        ValueError: the checkpoint is not supported.
    """
    from vllm_fp4_plugin.quantizer.source import open_source

    try:
        config = open_source(checkpoint).config
    except QuantizerError as error:
        raise ValueError(f"model: {str(error).removeprefix('src: ')}") from error
    return config.get("text_config", config)


def checkpoint_of(
    variant: Variant, model: Path, calibration: Path | None, cache: StageCache
) -> tuple[Path, str]:
    """Folder to serve a variant from, made if missing, and a hash that changes with its files.

    Args:
        variant: variant to serve.
        model: folder of the 16-bit checkpoint.
        calibration: text for variants that need calibration.
        cache: cache of the made folders.

    Raises:
        QuantizeError, QuantizerError: the checkpoint cannot be made.
        ValueError: the variant needs a calibration text, and there is none.
    """
    if variant.input_format is not None:
        stage = cache.stage(
            "files-rounded",
            {"model": fingerprint(model)},
            [Path(__file__).with_name("rounding.py"), *plugin_sources()],
            lambda folder: round_checkpoint(model, folder / "checkpoint"),
        )
        return stage.folder / "checkpoint", stage.content
    if variant.tool is None:
        folder = variant.checkpoint or model
        return folder, fingerprint(folder)
    options = list(variant.tool)
    if variant.calibrated:
        if calibration is None:
            raise ValueError(
                f"--calibrate: is not given, {variant.name} needs it; give a text like those the "
                "model will serve"
            )
        options += ["--calibrate", str(calibration)]
    inputs = {
        "model": fingerprint(model),
        "options": [*variant.tool],
        "calibration": hash_files([calibration]) if variant.calibrated and calibration else "",
    }  # fmt: skip
    words = (word.lstrip("-") for word in variant.tool if word not in ("--format", "--scales"))
    label = "-".join(["files", *words])
    stage = cache.stage(
        label if variant.calibrated else f"{label}-w4a16",
        inputs,
        [Path(quantize.__code__.co_filename), *plugin_sources()],
        lambda folder: quantize(model, folder / "checkpoint", options),
    )
    return stage.folder / "checkpoint", stage.content
