"""The modelled time of a whole decoder layer on a B200, launch by launch.

    python -m tests.modelled.decoder_layer                          decode of a Llama 8B
    python -m tests.modelled.decoder_layer --model qwen3-30b --tokens 1 --variant today unfused
    python -m tests.modelled.decoder_layer --tokens 1 --rows        where the time goes
    python -m tests.modelled.decoder_layer --tokens 1 --timeline layer.json   for ui.perfetto.dev

Kernels of this repository are traced (``tests/emulator/timing``), others priced (``prices``).
Layers follow one another; a layer's time is from the end of the preceding layer to its own end.
Nothing here was measured on a B200.
"""

import argparse
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.emulator.timing import B200_TIMING, ChainTiming, OpaqueLink, chain
from tests.modelled import layer_timeline, prices
from tests.modelled.decoder_models import MODELS
from tests.modelled.decoder_sm100 import DecoderSm100
from tests.modelled.launches import VARIANTS, Step
from tests.modelled.layer import layers
from tests.modelled.traces import Traced, Tracer

TOKENS = (1, 8, 16, 64, 256)
KEYS = 1024
LAYERS = 2  # in a chain: the first has no predecessor to overlap
WHOLE_CHIP = 1  # tokens up to which all GPCs are simulated: few CTAs of a grid have work then
VLLM = "vllm"

Launches = Sequence[tuple[Step, Traced | OpaqueLink]]


@dataclass(frozen=True)
class Row:
    """Part of one launch in a layer's time.

    Attributes:
        step: the launch.
        us: µs from the end of the preceding launch to the end of this launch.
        gap: part of ``us`` until the launch may read its predecessor's results.
        early: µs that the launch was open before that moment.
        hbm_bytes: bytes that the launch reads from HBM.
    """

    step: Step
    us: float
    gap: float
    early: float
    hbm_bytes: float

    @property
    def least(self) -> float:
        """Microseconds to move the launch's bytes at HBM's bandwidth."""
        return self.hbm_bytes / prices.BANDWIDTH


@dataclass(frozen=True)
class Layer:
    """Modelled time of a layer.

    Attributes:
        rows: one row for each launch, in order.
        timing: timing of the chain that ends with these launches.
    """

    rows: list[Row]
    timing: ChainTiming

    @property
    def us(self) -> float:
        """Microseconds from the end of the preceding layer to the end of this layer."""
        return sum(row.us for row in self.rows)


def timed(launches: Launches, whole_chip: bool) -> Layer:
    """Time of a layer that follows another layer.

    Args:
        launches: launches of the layer.
        whole_chip: whether to simulate all GPCs, rather than one GPC if the whole chip is too
            costly.
    """
    given = layers([each for _, each in launches], LAYERS)
    timing = chain(given, gpcs=len(B200_TIMING.gpc_sizes()) if whole_chip else None)
    rows = []
    last = timing.links[-len(launches) - 1 :]
    for (step, _), before, link in zip(launches, last[:-1], last[1:], strict=True):
        gap = link.begun - before.ended
        early = link.begun - link.opened
        rows.append(Row(step, link.ended - before.ended, gap, early, link.hbm_bytes))
    return Layer(rows, timing)


def variant(decoder: DecoderSm100, name: str) -> Layer:
    """Time of a layer in one of ``VARIANTS``, or in vLLM's default."""
    whole_chip = decoder.tokens <= WHOLE_CHIP
    if name == VLLM:
        return timed(decoder.vllms(), whole_chip)
    return timed(decoder.ours(VARIANTS[name]), whole_chip)


def timeline(layer: Layer, path: Path) -> None:
    """Write a layer's timeline to a file."""
    about = [
        {
            "label": row.step.name,
            "by": row.step.by,
            "time": row.step.source,
            "us after the launch before": round(row.us, 2),
            "us of it before it may begin": round(row.gap, 2),
            "us that its bytes from HBM take": round(row.least, 2),
        }
        for row in layer.rows
    ]
    layer_timeline.write(layer.timing, about, B200_TIMING.clock, path)


def said(layer: Layer) -> str:
    """Breakdown of the time, one line per launch."""
    lines = []
    for row in layer.rows:
        by = row.step.by if row.step.source == "traced" else f"{row.step.by}, {row.step.source}"
        lines.append(
            f"    {row.step.name:32} {by:18} {row.us:6.2f} µs, gap {row.gap:5.2f}, "
            f"least {row.least:5.2f}, open {row.early:5.2f} before"
        )
    return "\n".join(lines)


def main() -> None:
    """Print a line for each number of tokens and variant."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", choices=MODELS, default="llama-8b")
    parser.add_argument("--tokens", type=int, nargs="+", default=TOKENS)
    parser.add_argument("--keys", type=int, default=KEYS, help="of each sequence")
    names = (*VARIANTS, VLLM)
    parser.add_argument("--variant", choices=names, nargs="+", default=["today"])
    parser.add_argument("--known-keys", type=int, help="that attention is told of; the model's")
    parser.add_argument("--rows", action="store_true", help="a line for each launch")
    parser.add_argument("--timeline", type=Path, help="of the last layer, for ui.perfetto.dev")
    given = parser.parse_args()
    tracer, model = Tracer("sm_100"), MODELS[given.model]
    for tokens in given.tokens:
        known = given.known_keys or model.max_keys
        decoder = DecoderSm100(tracer, model, tokens, given.keys, known)
        for name in given.variant:
            start = time.monotonic()
            layer = variant(decoder, name)
            parts = decoder.attention_config[1]
            print(
                f"{given.model}, {tokens} tokens, {name}: {layer.us:.1f} µs, "
                f"{len(layer.rows)} launches, keys in {parts}; "
                f"whole model {tokens / model.step_us(layer.us) * 1e6:.0f} tokens/s; "
                f"{len(layer.timing.gpcs)} GPCs [{time.monotonic() - start:.0f} s]",
                flush=True,
            )
            if given.rows:
                print(said(layer), flush=True)
            if given.timeline:
                timeline(layer, given.timeline)


if __name__ == "__main__":
    main()
