"""Small model of the demo, trained briefly: a model to measure on any machine."""

from dataclasses import dataclass
from pathlib import Path

from examples.demo import display
from examples.demo.corpus import Corpus, read_corpus
from examples.demo.pipeline import make_model, make_text
from examples.demo.train import TrainSettings
from examples.stages import StageCache

_DOCUMENT_CHARACTERS = 8000  # per held-out file, so that no long file outweighs the others


@dataclass(frozen=True)
class SmallModel:
    """Files of the small model: 16-bit checkpoint, calibration text, and text to measure on."""

    checkpoint: Path
    calibration: Path
    held_out: Path


def make_small_model(folder: Path, train_seconds: float, fresh: bool) -> SmallModel:
    """Train the small model, or reuse the trained model in ``folder``."""
    corpus = read_corpus()
    cache = StageCache(folder / "model", fresh)
    text = make_text(cache, corpus)
    model = make_model(cache, text, TrainSettings(seconds=train_seconds))
    display.stage(model)
    held_out = folder / "held_out.txt"
    held_out.write_text(held_out_text(corpus), encoding="utf-8")
    return SmallModel(model.folder / "checkpoint", text.folder / "calibration.txt", held_out)


def held_out_text(corpus: Corpus) -> str:
    """Beginnings of all held-out files, as one text."""
    return "\n\n".join(d.text[:_DOCUMENT_CHARACTERS] for d in corpus.held_out)
