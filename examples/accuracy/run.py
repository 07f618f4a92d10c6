"""One comparison, from options to results."""

import json
import shutil
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from examples.accuracy import display
from examples.accuracy.checkpoints import read_sixteen_bit
from examples.accuracy.harness import HarnessError, unknown_tasks
from examples.accuracy.measure import Comparison
from examples.accuracy.results import Results
from examples.accuracy.serving import DISTRIBUTIONS, Bench, Settings
from examples.accuracy.tasks import NAMES, make_tasks
from examples.accuracy.text import read_windows
from examples.accuracy.variants import DEFAULT_CPU, DEFAULT_GPU, Variant, parse_variants
from examples.paths import check_folder
from examples.stages import StageCache
from examples.versions import check_vllm, commit, installed, machine

_BEGINNING = 1 << 20  # characters


@dataclass(frozen=True)
class Options:
    """Options of a comparison.

    Attributes:
        model: folder of the 16-bit checkpoint.
        variants: names, and the user's own checkpoints, see ``parse_variants``; empty: the defaults
            for a GPU or a CPU.
        text: file of the text to measure on.
        calibrate: file of the text on which the scales of activations are calibrated.
        tasks: tasks of lm-evaluation-harness.
        task_limit: samples of each task; None: all.
        local_tasks: folder written by `python -m examples.accuracy.tasks`; None: our tasks are made
            from the standard library.
        out: folder for results, logs and all intermediate files.
        windows, window_length: windows of the text, and tokens in each.
        server_options: further options of ``vllm serve``, for every variant.
        server_time_limit: seconds until a server must be ready.
        fresh: whether to make and measure everything anew.
    """

    model: Path
    variants: tuple[str, ...]
    text: Path
    calibrate: Path | None
    tasks: tuple[str, ...]
    task_limit: int | None
    local_tasks: Path | None
    out: Path
    windows: int = 32
    window_length: int = 512
    server_options: tuple[str, ...] = ()
    server_time_limit: float = 1800
    fresh: bool = False


def run(options: Options) -> Results:
    """Measure all variants; return the results, which are also written to ``results.json``.

    Raises:
        ValueError: an option is unusable.
    """
    check_vllm()
    gpu, device = _device()
    variants = parse_variants(
        options.variants or (DEFAULT_GPU if gpu else DEFAULT_CPU),
        "FLASH_ATTN" if gpu else "CPU_ATTN",
    )
    config = read_sixteen_bit(options.model)
    _check_lengths(options, config)
    _check_calibration(options, variants)
    check_folder(options.out, "--out")
    windows = read_windows(options.text, options.model, options.windows, options.window_length)
    check_tasks(options.tasks, options.local_tasks)
    options.out.mkdir(parents=True, exist_ok=True)
    _check_disk(options, config)
    about = {
        "model": str(options.model),
        "windows": options.windows,
        "window_length": options.window_length,
        "device": device,
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": machine(),
        "versions": installed(*DISTRIBUTIONS),
        "commit": commit(),
        "options": json.loads(json.dumps(asdict(options), default=str)),
    }
    results = Results(about)
    batched = str(max(2048, options.window_length + 1))
    settings = Settings(
        windows=windows,
        tasks=options.tasks,
        task_limit=options.task_limit,
        made_tasks=_local_tasks(options),
        server_options=("--max-num-batched-tokens", batched, *options.server_options),
        server_time_limit=options.server_time_limit,
    )
    stages = StageCache(options.out / "made", options.fresh)
    file = options.out / "results.json"
    with display.measuring(len(windows)) as on_state:
        bench = Bench(stages, options.out / "logs", options.model, settings, on_state)
        Comparison(options.model, options.calibrate, bench, gpu, results, file).measure(variants)
    return results


def _device() -> tuple[bool, str]:
    """Whether the machine has a GPU, and the name of the GPU or of the processor."""
    import torch

    if torch.cuda.is_available():
        return True, torch.cuda.get_device_name()
    return False, machine()["cpu"]


def _local_tasks(options: Options) -> Path | None:
    """Folder of local tasks: as given, else new if any local task is requested, else None."""
    if not set(options.tasks) & set(NAMES) or options.local_tasks is not None:
        return options.local_tasks
    folder = options.out / "tasks"
    make_tasks(folder)
    return folder


def _check_calibration(options: Options, variants: tuple[Variant, ...]) -> None:
    needing = [v.name for v in variants if v.tool is not None and v.calibrated]
    if needing and options.calibrate is None:
        raise ValueError(
            f"--calibrate: is not given, {', '.join(needing)} need it; give a text like those "
            "the model will serve"
        )
    if options.calibrate is not None:
        _check_text(options.calibrate)


def _check_text(file: Path) -> None:
    """Check the first Mi characters of a calibration text; the quantiser rarely reads more."""
    try:
        with file.open(encoding="utf-8") as stream:
            empty = not stream.read(_BEGINNING).strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(
            f"--calibrate: {file} cannot be read ({error}); give a UTF-8 text like those the model "
            "will serve"
        ) from error
    if empty:
        raise ValueError(
            f"--calibrate: {file} is empty; give a text like those the model will serve"
        )


def check_tasks(tasks: tuple[str, ...], made: Path | None) -> None:
    """Check that tasks are ours, lm-evaluation-harness's own, or in the folder ``made``.

    Raises:
        ValueError: lm-evaluation-harness is missing, or a task is unknown.
    """
    if not tasks:
        return
    try:
        unknown = unknown_tasks(tasks, made)
    except HarnessError as error:
        raise ValueError(f"--tasks: {error}; or measure without: --tasks ''") from error
    if unknown:
        raise ValueError(
            f"--tasks: {', '.join(unknown)} are no tasks of lm-evaluation-harness, must be among "
            f"{', '.join(NAMES)} and those that `lm-eval ls tasks` lists"
        )


def _check_lengths(options: Options, config: dict[str, Any]) -> None:
    """Check that the model has room for a window and the token that a server draws after it."""
    longest = config.get("max_position_embeddings")
    if longest is not None and options.window_length >= longest:
        raise ValueError(
            f"--window-length: is {options.window_length}, must be below {longest}, the model's "
            "max_position_embeddings"
        )


def _check_disk(options: Options, config: dict[str, Any]) -> None:
    """Check that the disk has room for the reference's logits, in 16 bits each."""
    needed = 2 * options.windows * options.window_length * config.get("vocab_size", 0)
    free = shutil.disk_usage(options.out).free
    if needed > free:
        raise ValueError(
            f"--out: {options.out} has {free / 1e9:.1f} GB free, the 16-bit model's logits take "
            f"{needed / 1e9:.1f}; ask for fewer --windows, or choose another disk"
        )
