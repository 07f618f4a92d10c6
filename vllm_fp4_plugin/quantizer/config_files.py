"""Writer of ``config.json``, and of a format's further files."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vllm_fp4_plugin.formats import Format


def write_configs(
    folder: Path,
    config: dict[str, Any],
    format: Format,
    *,
    ignore: Sequence[str],
    weight_only: bool,
    fp8_kv: bool,
) -> None:
    """Write ``config.json`` with the quantization config, and the format's further files.

    Args:
        folder: folder of the quantised checkpoint.
        config: the source's ``config.json``.
        format: format to write.
        ignore: names of the linears that were not quantised.
        weight_only: whether inputs stay in 16 bits.
        fp8_kv: whether scales of an FP8 key/value cache are stored.
    """
    quantization = format.config(ignore, weight_only=weight_only, fp8_kv=fp8_kv)
    _write_json(folder / "config.json", config | {"quantization_config": quantization})
    further = format.further_files(ignore, weight_only=weight_only, fp8_kv=fp8_kv)
    for name, content in further.items():
        _write_json(folder / name, content)


def _write_json(file: Path, content: dict[str, Any]) -> None:
    file.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
