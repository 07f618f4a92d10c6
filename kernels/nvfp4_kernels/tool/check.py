"""Check and timing of the kernels on a GPU: the list of tasks and the report."""

import json
import platform
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from itertools import product as pairs
from pathlib import Path
from typing import Any

import torch

from nvfp4_kernels.devices import FAMILIES, driver_version
from nvfp4_kernels.tool.attention_case import attention_cases
from nvfp4_kernels.tool.doubts import doubts
from nvfp4_kernels.tool.fp8_rows_case import Fp8RowsCase, TimedFp8Rows
from nvfp4_kernels.tool.fused_attention_case import fused_attention_cases
from nvfp4_kernels.tool.grouped_case import grouped_cases
from nvfp4_kernels.tool.indexer_case import indexer_cases
from nvfp4_kernels.tool.product_case import ProductCase
from nvfp4_kernels.tool.quantize_case import FORMS, QuantizeCase
from nvfp4_kernels.tool.rotary_store_case import rotary_store_cases, rotary_store_timings
from nvfp4_kernels.tool.routed_case import routed_cases
from nvfp4_kernels.tool.shapes import CONTEST, LLAMA_8B, TOKENS, model_shapes
from nvfp4_kernels.tool.sparse_attention_case import sparse_attention_cases
from nvfp4_kernels.tool.task import Outcome, Runner, Task
from nvfp4_kernels.tool.timed import TimedProduct, TimedQuantize
from nvfp4_kernels.tool.timed_attention import attention_timings
from nvfp4_kernels.tool.timed_scoring import scoring_timings

CONTEST_SECTION, LLAMA_SECTION = "contest shapes", "Llama 3 8B"
QUANTIZE_SECTION, ATTENTION_SECTION, INDEXER_SECTION = "quantise", "attention", "indexer"
QUICK_TOKENS = (1, 64, 1024)
# Families whose ops are among the tasks.
_FAMILIES = ("sm_90", "sm_100")
_WANTED = (
    "sm_100 or sm_103 (B200, GB200, B300, GB300), or sm_90 (H100, H200), of whose ops those that "
    "write E4M3 alone are among its tasks; elsewhere 'report' says what can be told without one"
)


class WrongDevice(RuntimeError):
    """This machine has no GPU, or the first GPU cannot run the checked kernels."""


@dataclass(frozen=True)
class Device:
    """GPU that a report describes, with the versions of the driver and packages, and the host."""

    name: str
    arch: str
    sms: int
    memory_gb: float
    driver: str
    cuda: str
    torch: str
    compiler: str
    host: str


def this_device() -> Device:
    """Describe the first CUDA device.

    Raises:
        WrongDevice: no CUDA device, or a device of another family than sm_90 and sm_100.
    """
    if not torch.cuda.is_available():
        raise WrongDevice(f"check: this machine has no CUDA device, must have one of {_WANTED}")
    properties = torch.cuda.get_device_properties(0)
    arch = f"sm_{properties.major}{properties.minor}"
    if FAMILIES.get(arch) not in _FAMILIES:
        raise WrongDevice(
            f"check: this machine's GPU is {properties.name} ({arch}), must be one of {_WANTED}"
        )
    return Device(
        name=properties.name,
        arch=arch,
        sms=properties.multi_processor_count,
        memory_gb=properties.total_memory / 1e9,
        driver=_driver(),
        cuda=str(torch.version.cuda),
        torch=torch.__version__,
        compiler=version("nvidia-cutlass-dsl"),
        host=f"{platform.system()} {platform.machine()}",
    )


def _driver() -> str:
    number = driver_version()
    return f"CUDA {number // 1000}.{number % 1000 // 10}"


def tasks_of(arch: str, quick: bool) -> list[Task]:
    """Checks and timings for a GPU of ``arch``."""
    listed = {"sm_90": (fp8_correctness, fp8_timings), "sm_100": (correctness, timings)}
    return [task for tasks in listed[FAMILIES[arch]] for task in tasks(quick)]


def fp8_correctness(quick: bool) -> list[Task]:
    """Checks of the ops that write E4M3, on sm_90."""
    rows = [(1, 64), (131, 208)] if quick else [(1, 64), (131, 208), (3, 4096), (2048, 14336)]
    dtypes = (torch.bfloat16, torch.float16)
    return [Fp8RowsCase(*form, m, k, dtype) for form, (m, k), dtype in pairs(FORMS, rows, dtypes)]


def fp8_timings(quick: bool) -> list[Task]:
    """Timings of the ops that write E4M3, on sm_90."""
    tokens = QUICK_TOKENS if quick else TOKENS
    widths = sorted({layer.k for layer in LLAMA_8B.layers})
    return [
        TimedFp8Rows(QUANTIZE_SECTION, *form, m, k) for form, k, m in pairs(FORMS, widths, tokens)
    ]


def correctness(quick: bool) -> list[Task]:
    """Checks of the main ops on exact and random values, up to models' sizes; hardware cases."""
    tasks: list[Task] = []
    sizes = [(1, 64, 64), (7, 300, 1312), (130, 203, 96), (300, 264, 1568), (600, 520, 832)]
    if not quick:
        sizes += [(16, 6144, 4096), (33, 4096, 14336), (128, 7168, 2048), (1024, 6144, 4096)]
        sizes += [(4096, 4096, 4096), (513, 28672, 4096)]
    for (m, n, k), exact in pairs(sizes, (True, False)):
        tasks.append(ProductCase("gemv" if m <= 32 else "gemm", m, n, k, exact=exact))
        tasks.append(ProductCase("silu_mul_gemm", m, n, k, exact=exact))
        tasks.append(
            ProductCase(
                "gemm", m, n, k, exact=exact, shards=3, row_scale=True, bias=True,
                out_dtype=torch.float16,
            )
        )  # fmt: skip
    tasks += [ProductCase("gemv", 1, 512, 1024, batch=3, exact=e) for e in (True, False)]
    tasks.append(ProductCase("gemm", 200, 208, 832, batch=2, out_dtype=torch.float32))
    tasks += [
        ProductCase("silu_mul_gemm", m, 208, 832, row_scale=r, quantized=True)
        for m, r in pairs((5, 140, 300), (False, True))
    ]
    rows = [(1, 64), (131, 208)] if quick else [(1, 64), (131, 208), (3, 4096), (2048, 14336)]
    tasks += [QuantizeCase(*form, m, k) for form, (m, k) in pairs(FORMS, rows)]
    tasks += [*routed_cases(quick), *grouped_cases(quick)]
    tasks += rotary_store_cases(quick)
    tasks += [*attention_cases(quick), *fused_attention_cases(quick)]
    tasks += [*sparse_attention_cases(quick), *indexer_cases(quick)]
    return tasks + doubts()


def timings(quick: bool) -> list[Task]:
    """Timings of GEMMs (contest, Llama 3 8B), quantisation, rotary store, attention, indexer."""
    tokens = QUICK_TOKENS if quick else TOKENS
    tasks: list[Task] = [TimedProduct(CONTEST_SECTION, s) for s in CONTEST]
    tasks += [TimedProduct(LLAMA_SECTION, s) for s in model_shapes(LLAMA_8B, tokens)]
    widths = sorted({layer.k for layer in LLAMA_8B.layers})
    tasks += [TimedQuantize(QUANTIZE_SECTION, m, k) for k, m in pairs(widths, tokens)]
    tasks += rotary_store_timings(ATTENTION_SECTION, quick)
    tasks += attention_timings(ATTENTION_SECTION, quick)
    return tasks + scoring_timings(INDEXER_SECTION, quick)


def run_all(
    tasks: Sequence[Task], run: Runner, done: Callable[[Outcome], None] = lambda _: None
) -> list[Outcome]:
    """Run tasks and return an outcome for each; after an interrupt, "not run" for the remaining.

    Args:
        tasks: tasks, run in this order.
        run: function that runs a task and returns its outcome, even on failure.
        done: callback for each outcome.
    """
    outcomes: list[Outcome] = []
    try:
        for task in tasks:
            outcomes.append(run(task))
            done(outcomes[-1])
    except KeyboardInterrupt:
        outcomes += [
            Outcome(t.section, t.name, "not run: interrupted") for t in tasks[len(outcomes) :]
        ]
    return outcomes


def write(path: Path, device: Device, outcomes: Sequence[Outcome]) -> list[Path]:
    """Write the report as Markdown to ``path``, and as JSON to its folder; return both paths."""
    beside = path.with_suffix(".json")
    beside.write_text(json.dumps(document(device, outcomes), indent=1))
    path.write_text(markdown(device, outcomes))
    return [path, beside]


def document(device: Device, outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """Report as JSON data."""
    return {"device": asdict(device), "outcomes": [asdict(o) for o in outcomes]}


def markdown(device: Device, outcomes: Sequence[Outcome]) -> str:
    """Report as Markdown."""
    failed = [o for o in outcomes if o.error]
    lines = [f"# NVFP4 kernels on {device.name}", ""]
    lines += [f"{len(outcomes) - len(failed)} of {len(outcomes)} tasks went well.", ""]
    lines += _rows(("", ""), [(key, str(value)) for key, value in asdict(device).items()])
    if failed:
        lines += ["## What failed", ""]
        lines += _rows(("section", "task", "why"), [(o.section, o.name, o.error) for o in failed])
    for section in dict.fromkeys(o.section for o in outcomes):
        lines += [f"## {section}", ""]
        lines += _section([o for o in outcomes if o.section == section])
    return "\n".join(lines)


def _section(outcomes: Sequence[Outcome]) -> list[str]:
    names = list(dict.fromkeys(name for o in outcomes for name in o.figures))
    rows = [
        (o.name, "failed" if o.error else "ok", *(_shown(o.figures.get(name)) for name in names))
        for o in outcomes
    ]
    return _rows(("task", "result", *names), rows)


def _shown(figure: float | str | None) -> str:
    if figure is None:
        return ""
    return figure if isinstance(figure, str) else f"{figure:.4g}"


def _rows(header: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    def line(cells: Sequence[str]) -> str:
        clean = (" ".join(cell.replace("|", "\\|").split()) for cell in cells)
        return f"| {' | '.join(clean)} |"

    return [line(header), line(["---"] * len(header)), *map(line, rows), ""]
