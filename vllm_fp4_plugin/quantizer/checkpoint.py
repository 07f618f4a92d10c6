"""Quantise a Hugging Face checkpoint to NVFP4."""

import logging
from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any, cast

import torch
from rich.console import Console
from rich.progress import Progress
from torch import Tensor

from nvfp4_kernels.formats.nvfp4 import Convention
from nvfp4_kernels.formats.scale_search import SCALE_RULES, ScaleRule
from vllm_fp4_plugin.checkpoint.model_source import whole_directory
from vllm_fp4_plugin.formats import FORMATS, UnsupportedCheckpoint
from vllm_fp4_plugin.ignore import InvalidPattern, check_pattern
from vllm_fp4_plugin.quantizer import calibration
from vllm_fp4_plugin.quantizer.calibration_text import read_sequences
from vllm_fp4_plugin.quantizer.config_files import write_configs
from vllm_fp4_plugin.quantizer.conversion import Conversion
from vllm_fp4_plugin.quantizer.destination import (
    atomic_folder,
    check_destination,
    check_room,
    copy_companions,
)
from vllm_fp4_plugin.quantizer.errors import QuantizerError
from vllm_fp4_plugin.quantizer.linears import Selection, build_model, select_linears
from vllm_fp4_plugin.quantizer.source import Source, open_source
from vllm_fp4_plugin.quantizer.summary import Summary, mean_by_type
from vllm_fp4_plugin.quantizer.weights import WeightQuantizer

_SEQ_LEN, _SEQUENCES = 512, 128


def quantize_checkpoint(
    src: str | Path,
    dst: str | Path,
    *,
    format: str = "modelopt",
    scales: str = "absmax",
    calibrate: str | Path | None = None,
    ignore: Sequence[str] = (),
    lm_head: bool = False,
    kv_cache_scheme: str | None = None,
    calibration_tokens: int | None = None,
    seq_len: int | None = None,
    shared_fused_scale: bool = False,
    shared_gate_up_scale: bool = False,
    max_shard_bytes: int = 5_000_000_000,
    dry_run: bool = False,
    console: Console | None = None,
) -> Summary:
    """Write an NVFP4 copy of a decoder's checkpoint, dense or a mixture of experts.

    Peak memory is near the size of the largest tensor; with ``calibrate``, plus the activations of
    8192 tokens. Calibration sends every token to every expert.

    Args:
        src: folder of a Hugging Face checkpoint in bfloat16, float16 or float32 safetensors, or
            name on the hub of a checkpoint that is completely in the cache.
        dst: folder to write; must not exist, and is created with its parents. The folder appears
            complete or not at all.
        format: ``modelopt`` or ``compressed-tensors``.
        scales: rule for block scales: ``absmax``, ``sweep`` or ``four-over-six``, see
            ``scale_search.quantize_with_rule``.
        calibrate: text file, or ``.jsonl`` file with a ``text`` per line, to measure the inputs'
            global scales on; None: the checkpoint is weight-only.
        ignore: linears to leave unquantised, in addition to those that are never quantised (see
            ``select_linears``): names, ``*`` wildcards or ``re:<regex>``.
        lm_head: also quantise the linear that computes the logits.
        kv_cache_scheme: ``fp8`` to also measure scales for an FP8 key/value cache; None: no scales.
        calibration_tokens: number of tokens to measure on, fewer if the text is shorter; by default
            65536, or ``seq_len`` if larger.
        seq_len: tokens per sequence; by default 512, or the model's maximum if smaller.
        shared_fused_scale: give the weights of linears that engines fuse (q/k/v, gate/up, MLA's
            first projections of q and k/v) one global scale.
        shared_gate_up_scale: give the weights of gate and up one global scale, also in experts.
        max_shard_bytes: maximum bytes of the tensors in a file, unless one tensor is larger.
        dry_run: check everything, and quantise a part of one weight to estimate the total time,
            but write nothing.
        console: console for progress; None for silence.

    Raises:
        QuantizerError: an argument or the checkpoint is not accepted.
    """
    dst = Path(dst)
    _check_choice("format", format, FORMATS)
    _check_choice("scales", scales, SCALE_RULES)
    _check_patterns(ignore)
    src = _find_source(str(src))
    check_destination(src, dst)
    source = open_source(src)
    given = {"calibration_tokens": calibration_tokens, "seq_len": seq_len}
    if calibrate is None:
        _refuse_without_text(kv_cache_scheme=kv_cache_scheme, **given)
    if seq_len is None:
        seq_len = _default_seq_len(source.config)
    if calibration_tokens is None:
        calibration_tokens = max(_SEQUENCES * _SEQ_LEN, seq_len)
    _check_calibration(kv_cache_scheme, calibration_tokens, seq_len)
    model = build_model(source)
    selection = select_linears(model, source, ignore, lm_head=lm_head)
    target = FORMATS[cast(Convention, format)]

    with Progress(console=console, disable=console is None) as progress:
        ranges, tokens = None, 0
        if calibrate is not None:
            sequences = _read_sequences(Path(calibrate), source, calibration_tokens, seq_len)
            tokens = sequences.numel()
            if dry_run:  # placeholder: the values do not change the sizes
                ranges = calibration.Ranges(dict.fromkeys(selection.quantized, torch.ones(())))
            else:
                record_kv = kv_cache_scheme is not None
                ranges = _calibrate(model, source, selection, sequences, record_kv, progress)
        sharing = selection.gate_up if shared_gate_up_scale else {}
        sharing = selection.fused if shared_fused_scale else sharing
        quantizer = WeightQuantizer(
            source, selection.quantized, target.name, cast(ScaleRule, scales), sharing,
            selection.fused,
        )  # fmt: skip
        conversion = Conversion(source, selection.quantized, target, quantizer, ranges)
        summary = Summary(
            dst=dst,
            quantized=len(selection.quantized),
            kept=len(selection.kept),
            bytes_before=sum(spec.nbytes for spec in source.specs.values()),
            bytes_after=conversion.nbytes,
            bits_per_weight=conversion.bits_per_weight,
            mean_relative_mse=None,
            calibration_tokens=tokens,
        )
        if dry_run:
            check_room(dst, conversion.nbytes)
            return replace(summary, estimated_seconds=quantizer.estimated_seconds())
        say = console.print if console is not None else logging.getLogger(__name__).warning
        with atomic_folder(dst, conversion.nbytes, say) as folder:
            copy_companions(src, folder)
            write_configs(
                folder,
                source.config,
                target,
                ignore=selection.ignore,
                weight_only=ranges is None,
                fp8_kv=kv_cache_scheme is not None,
            )
            task = progress.add_task("Quantising", total=len(source.specs))
            errors = conversion.write(folder, max_shard_bytes, lambda: progress.advance(task))
    return replace(
        summary,
        mean_relative_mse=fmean(errors.values()),
        relative_mse_by_type=mean_by_type(errors),
    )


def _find_source(src: str) -> Path:
    try:
        return whole_directory(src)
    except UnsupportedCheckpoint as error:
        raise QuantizerError(f"src: {error}") from error


def _check_choice(name: str, value: str, accepted: Collection[str]) -> None:
    if value not in accepted:
        raise QuantizerError(f"{name}: is {value!r}, must be one of {', '.join(accepted)}")


def _check_patterns(ignore: Sequence[str]) -> None:
    for pattern in ignore:
        try:
            check_pattern("ignore", pattern)
        except InvalidPattern as error:
            raise QuantizerError(str(error)) from error


def _default_seq_len(config: dict[str, Any]) -> int:
    longest = config.get("max_position_embeddings")
    if longest is None:
        return _SEQ_LEN
    if not isinstance(longest, int) or longest < 1:
        raise QuantizerError(
            f"src: max_position_embeddings is {longest!r}, must be a positive number; mend "
            "config.json"
        )
    return min(_SEQ_LEN, longest)


def _refuse_without_text(**options: object) -> None:
    """Raise if an option for calibration is given without a calibration text."""
    for name, value in options.items():
        if value is not None:
            raise QuantizerError(
                f"{name}: is {value}, but without a text nothing is measured; give --calibrate as "
                "well, or leave it out"
            )


def _check_calibration(kv_cache_scheme: str | None, tokens: int, seq_len: int) -> None:
    if kv_cache_scheme is not None:
        _check_choice("kv_cache_scheme", kv_cache_scheme, ["fp8"])
    if seq_len < 2:
        raise QuantizerError(f"seq_len: is {seq_len}, must be at least 2; raise --seq-len")
    if tokens < seq_len:
        raise QuantizerError(
            f"calibration_tokens: is {tokens}, must be at least seq_len, {seq_len}; raise "
            "--calibration-tokens or lower --seq-len"
        )


def _read_sequences(file: Path, source: Source, tokens: int, seq_len: int) -> Tensor:
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(source.folder, local_files_only=True)
    except Exception as error:  # a damaged file raises a bare exception
        raise QuantizerError(
            f"src: {source.folder} holds no tokenizer that transformers can load ({error}); "
            "add its files, or leave out --calibrate"
        ) from error
    return read_sequences(file, tokenizer, tokens, seq_len)


def _calibrate(
    model: Any,
    source: Source,
    selection: Selection,
    sequences: Tensor,
    record_kv: bool,
    progress: Progress,
) -> calibration.Ranges:
    total = calibration.batch_count(sequences) * len(selection.quantized)
    task = progress.add_task("Calibrating", total=total)
    ranges = calibration.calibrate(
        model,
        source,
        selection,
        sequences,
        record_kv=record_kv,
        on_linear=lambda: progress.advance(task),
    )
    # Engines quantise the input of a fused matrix only once.
    inputs = {n: max(ranges.inputs[m] for m in selection.fused[n]) for n in selection.quantized}
    return calibration.Ranges(inputs, ranges.keys, ranges.values)
