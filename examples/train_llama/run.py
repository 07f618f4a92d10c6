"""One training run: text, tokenizer, model, and the written files."""

import json
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from examples.atomic_write import write_atomically
from examples.demo import display
from examples.demo.corpus import Document, bounded, calibration_text, read_corpus
from examples.demo.export import save_checkpoint
from examples.demo.tokenizer import encode_documents, train_tokenizer
from examples.demo.train import (
    MAX_POSITIONS,
    Progress,
    TrainSettings,
    keep_freed_memory,
    train,
)
from examples.devices import device_name
from examples.paths import check_folder
from examples.train_llama.held_out import held_out_perplexity
from examples.versions import commit, installed, machine

DISTRIBUTIONS = ("torch", "triton", "transformers", "tokenizers")
TOKENIZER_CHARACTERS = 30_000_000  # more text takes longer and changes few merges
HELD_OUT_CHARACTERS = 2_000_000
CURVE_POINTS = 200


def run(
    out: Path, roots: Sequence[Path], characters: int, vocabulary: int, settings: TrainSettings
) -> Path:
    """Train a model and write it.

    Args:
        out: folder that gets ``bf16/``, ``calibration.txt``, ``held_out.txt``, ``training.json``.
        roots: folders of Python sources.
        characters: maximum number of characters of text.
        vocabulary: number of ids of the tokenizer.
        settings: sizes, budget, device and rates.

    Returns:
        The path of ``training.json``.

    Raises:
        ValueError: ``out`` holds a model already or is not a folder, or there is too little text.
    """
    checkpoint = out / "bf16"
    if checkpoint.exists():
        raise ValueError(f"out: {checkpoint} exists; choose another folder or remove it")
    check_folder(out, "out")
    seconds: dict[str, float] = {}
    with _timed(seconds, "reading text"):
        corpus = read_corpus(roots, characters)
    display.corpus(corpus)
    out.mkdir(parents=True, exist_ok=True)
    held_out = bounded(corpus.held_out, HELD_OUT_CHARACTERS) or list(corpus.held_out[:1])
    texts = {"calibration.txt": calibration_text(corpus), "held_out.txt": _joined(held_out)}
    for name, text in texts.items():
        (out / name).write_text(text, encoding="utf-8")
    with _timed(seconds, "training the tokenizer"):
        learnt = [d.text for d in bounded(corpus.train, TOKENIZER_CHARACTERS) or corpus.train[:1]]
        tokenizer = train_tokenizer(learnt, vocabulary, MAX_POSITIONS)
    with _timed(seconds, "tokenising"):
        tokens = encode_documents(tokenizer, [document.text for document in corpus.train])
        held_out_tokens = encode_documents(tokenizer, [document.text for document in held_out])

    curve: list[dict[str, float]] = []
    training = time.monotonic()
    if settings.device == "cpu":
        keep_freed_memory()
    with display.training() as show:

        def on_step(progress: Progress) -> None:
            show(progress)
            if progress.done * CURVE_POINTS >= len(curve):
                curve.append({"tokens": progress.tokens, "loss": progress.loss})

        model, last = train(settings, tokens, tokenizer, on_step)
    seconds["training, compiling included"] = time.monotonic() - training
    parameters = model.num_parameters()
    display.trained(parameters, last)
    memory = torch.cuda.max_memory_allocated() if settings.device == "cuda" else None
    save_checkpoint(model, tokenizer, checkpoint)
    with _timed(seconds, "measuring on held-out text"):
        length = min(settings.sequence, MAX_POSITIONS)
        found, measured = held_out_perplexity(checkpoint, held_out_tokens, length, settings.device)
    display.console.print(f"perplexity {found:.3f} over {measured:,} held-out tokens")

    record: dict[str, Any] = {
        "finished": datetime.now(UTC).isoformat(timespec="seconds"),
        "settings": asdict(settings),
        "parameters": parameters,
        "vocabulary": len(tokenizer),
        "text": {
            "roots": [str(root) for root in roots],
            "digest": corpus.digest,
            "files": len(corpus.train),
            "characters": sum(len(document.text) for document in corpus.train),
            "tokens": len(tokens),
        },
        "steps": last.steps,
        "tokens_seen": last.tokens,
        "tokens_per_second": last.tokens_per_second,
        "loss": last.loss,
        "loss_curve": curve,
        "held_out": {"perplexity": found, "tokens": measured},
        "seconds": seconds,
        "peak_device_bytes": memory,
        "device": device_name(settings.device),
        "machine": machine(),
        "versions": installed(*DISTRIBUTIONS),
        "commit": commit(),
    }
    file = out / "training.json"
    write_atomically(file, json.dumps(record, indent=2) + "\n")
    return file


def _joined(documents: Sequence[Document]) -> str:
    return "\n\n".join(document.text for document in documents)


@contextmanager
def _timed(seconds: dict[str, float], what: str) -> Iterator[None]:
    start = time.monotonic()
    with display.working(what):
        yield
    seconds[what] = time.monotonic() - start
