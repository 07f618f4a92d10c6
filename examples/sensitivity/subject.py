"""Model under study, with its text and the scales of its inputs, calibrated once."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.utils.logging import disable_progress_bar

from examples.load_tokenizer import load_tokenizer
from examples.perplexity import choose_windows
from examples.sensitivity.groups import Group, find_groups
from nvfp4_kernels.formats.nvfp4 import global_scale_of
from vllm_fp4_plugin.quantizer.calibration import calibrate
from vllm_fp4_plugin.quantizer.calibration_text import read_sequences
from vllm_fp4_plugin.quantizer.linears import Selection, build_model, select_linears
from vllm_fp4_plugin.quantizer.source import Source, open_source

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
CALIBRATION_LENGTH = 512  # tokens run as one sequence, as in the quantising tool


@dataclass(frozen=True)
class Subject:
    """A 16-bit model and the text to measure it on.

    Attributes:
        name: last two parts of the checkpoint's path.
        model: model in the requested compute dtype.
        groups: layers of the model.
        input_scales: float32 ``()`` for each linear, calibrated as by the quantising tool; empty
            where inputs stay in 16 bits.
        windows: int64 ``(windows, tokens)`` of the text.
    """

    name: str
    model: Any
    groups: list[Group]
    input_scales: dict[str, Tensor]
    windows: Tensor


def open_subject(
    folder: Path,
    text: Path,
    calibration: Path | None,
    *,
    calibration_tokens: int,
    windows: int,
    window_length: int,
    device: str,
    dtype: str,
) -> Subject:
    """Load a checkpoint, calibrate it, and tokenise the text.

    Args:
        folder: folder of a dense decoder in 16 or 32 bits.
        text: UTF-8 text to measure on.
        calibration: text for the inputs' scales; None leaves inputs in 16 bits.
        calibration_tokens: maximum number of calibration tokens, raised to one sequence.
        windows: number of windows, spread evenly over the text.
        window_length: number of tokens in each window.
        device: device of the model.
        dtype: compute dtype, a key of ``DTYPES``; float32 keeps rounding out of the differences.

    Raises:
        ValueError: the checkpoint or a text is not accepted.
    """
    if dtype not in DTYPES:
        raise ValueError(f"dtype: is {dtype!r}, must be {' or '.join(DTYPES)}")
    source = open_source(folder)
    tokenizer = load_tokenizer(folder)
    positions = source.config.get("max_position_embeddings") or window_length
    if window_length > positions:
        raise ValueError(
            f"window_length: is {window_length}, the model takes at most {positions}; "
            "lower --window-length"
        )
    chosen = choose_windows(_tokens(text, tokenizer), windows, window_length)
    empty = build_model(source)
    selection = select_linears(empty, source, ignore=[])
    if selection.experts:
        raise ValueError(
            f"model: {folder} is a mixture of experts ({selection.experts[0].name}), must be a "
            "dense decoder; give another model"
        )
    input_scales = {}
    if calibration is not None:
        length = min(CALIBRATION_LENGTH, positions)
        sequences = read_sequences(calibration, tokenizer, max(calibration_tokens, length), length)
        input_scales = _input_scales(empty, source, selection, sequences, device)
    groups = find_groups(source, selection, weight_only=calibration is None)
    disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=DTYPES[dtype]).to(device).eval()
    model.requires_grad_(False)
    return Subject(
        "/".join(folder.parts[-2:]),
        model,
        groups,
        input_scales,
        torch.from_numpy(chosen).to(device),
    )


def _tokens(text: Path, tokenizer: Any) -> np.ndarray:
    if not text.is_file():
        raise ValueError(f"text: {text} is not a file; give a UTF-8 text")
    try:
        content = text.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"text: {text} is not UTF-8 ({error}); convert it") from error
    return np.array(tokenizer(content, verbose=False).input_ids, dtype=np.int64)


def _input_scales(
    empty: Any, source: Source, selection: Selection, sequences: Tensor, device: str
) -> dict[str, Tensor]:
    ranges = calibrate(empty, source, selection, sequences, record_kv=False, on_linear=lambda: None)
    largest = {n: max(ranges.inputs[m] for m in selection.fused[n]) for n in selection.quantized}
    return {name: global_scale_of(amax).to(device) for name, amax in largest.items()}
