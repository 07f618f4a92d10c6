"""``python -m nvfp4_kernels report``: what kernels are made of, and how fast they could be."""

import json
from concurrent.futures.process import BrokenProcessPool
from itertools import product
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from nvfp4_kernels.attention.merge.tile import MergeTile
from nvfp4_kernels.attention.sm100.tile import AttentionTile, Variant
from nvfp4_kernels.checks import InvalidArgument
from nvfp4_kernels.devices import (
    SM_COUNTS,
    UnknownArchitecture,
    members,
    parse_arch,
    spellings,
    target_of,
)
from nvfp4_kernels.gemm.sm100.tile import EpilogueConfig, Tile
from nvfp4_kernels.indexer.sm100.tile import ScoreTile
from nvfp4_kernels.indexer.sm100.variant import Variant as ScoreVariant
from nvfp4_kernels.precompile.attention_sm100 import attention_kernels
from nvfp4_kernels.precompile.linear_sm100 import quantize_kernels
from nvfp4_kernels.precompile.spec import KernelSpec
from nvfp4_kernels.tool.binary import UnreadableBinary
from nvfp4_kernels.tool.config_file import UnusableModel
from nvfp4_kernels.tool.console import console, progress_bar, refusals
from nvfp4_kernels.tool.destination import check_file
from nvfp4_kernels.tool.instructions import SHOWN, NoDisassembler, find_nvdisasm
from nvfp4_kernels.tool.limits import FLOPS, MEMORY_BANDWIDTH
from nvfp4_kernels.tool.model import read_model
from nvfp4_kernels.tool.options import (
    CPUS,
    DtypeName,
    DtypeOption,
    JobsOption,
    TensorParallelOption,
    dtype_of,
)
from nvfp4_kernels.tool.report import (
    Choice,
    choose,
    describe,
    describe_attention,
    kernel_json,
    measure_all,
)
from nvfp4_kernels.tool.scoring import (
    ScoreChoice,
    choose_scorer,
    deepseek_shapes,
    describe_scorer,
)
from nvfp4_kernels.tool.shapes import CONTEST, TOKENS, given_shape, model_shapes
from nvfp4_kernels.tool.static import Static
from nvfp4_kernels.tool.toolchain import NoCompiler, check_compiler

ARCHS = members("sm_100")  # kernels of others are not reported on


def report(
    shape: Annotated[
        list[str], typer.Option(help="M,N,K or M,N,K,L, instead of the contest's shapes.")
    ] = [],  # noqa: B006  typer wants a list
    gate_up: Annotated[
        bool, typer.Option("--gate-up", help="The shapes are gate and up projections, fused.")
    ] = False,
    model: Annotated[
        Path | None, typer.Option(help="config.json of a model: its layers, at several M.")
    ] = None,
    tensor_parallel: TensorParallelOption = 1,
    dtype: DtypeOption = None,
    indexer: Annotated[
        bool, typer.Option("--indexer", help="The indexer's scoring, too, in DeepSeek's shapes.")
    ] = False,
    arch: Annotated[str, typer.Option(help=f"GPU to compile for: {spellings(ARCHS)}.")] = "sm_100a",
    sms: Annotated[
        int | None, typer.Option(min=1, help="Its multiprocessors, if not a B200's or a GB300's.")
    ] = None,
    jobs: JobsOption = CPUS,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write everything there, too.")
    ] = None,
) -> None:
    """Compile the kernels that products get, and say what they are made of; no GPU is needed.

    Ends with status 1 if any kernel spills registers.
    """
    screen = console()
    kinds = (UnusableModel, UnknownArchitecture, UnreadableBinary, InvalidArgument, NoCompiler)
    with refusals(*kinds, OSError, BrokenProcessPool):
        arch = parse_arch("--arch", arch, ARCHS)
        sms = sms or SM_COUNTS[arch]
        _refuse_options_of_nothing(shape, gate_up, model, tensor_parallel, dtype)
        if json_file:
            check_file("--json", json_file)
        shapes = [given_shape(text, gate_up, dtype_of(dtype)) for text in shape]
        others: list[KernelSpec] = []
        if model is not None:
            chosen = read_model(model, tensor_parallel=tensor_parallel, dtype=dtype_of(dtype))
            shapes += model_shapes(chosen)
            for layer, per_token in product(chosen.layers, (False, True)):
                others += quantize_kernels(chosen.dtype, layer.k, max(TOKENS), per_token)
            if chosen.attention is not None:
                others += attention_kernels(chosen.attention, chosen.dtype, sms=sms)
        choices = [choose(each, sms) for each in shapes or CONTEST]
        scorers = [choose_scorer(each, sms) for each in deepseek_shapes()] if indexer else []
        others += [choice.spec for choice in scorers]
        check_compiler()
        nvdisasm = _nvdisasm(screen)
        specs = list(dict.fromkeys([*(choice.spec for choice in choices), *others]))
        found: dict[KernelSpec, Static] = {}
        with refusals(NoDisassembler), progress_bar() as bar:
            task = bar.add_task("kernels", total=len(specs))
            for spec, static in measure_all(specs, target_of(arch), nvdisasm, jobs):
                found[spec] = static
                bar.advance(task)
        numbers = {spec: number for number, spec in enumerate(specs, 1)}
    screen.print(_products(choices, numbers))
    if scorers:
        screen.print(_scores(scorers, numbers))
    screen.print(
        f"Speed of light: {MEMORY_BANDWIDTH / 1e12:.0f} TB/s, {FLOPS / 1e15:.2f} PFLOP/s. Tiles "
        "are chosen by the estimates, which are no measurements."
    )
    screen.print(_kernels(found, numbers))
    if json_file:
        everything = {
            "products": [choice.json(numbers[choice.spec]) for choice in choices],
            "scores": [choice.json(numbers[choice.spec]) for choice in scorers],
            "kernels": [kernel_json(spec, found[spec]) for spec in specs],
        }
        with refusals(OSError):
            json_file.write_text(json.dumps(everything, indent=1))
    spilling = [str(numbers[spec]) for spec in specs if found[spec].spills]
    if spilling:
        screen.print(f"[red]Registers are spilled by kernel {', '.join(spilling)}.[/]")
        raise typer.Exit(1)


def _refuse_options_of_nothing(
    shape: list[str],
    gate_up: bool,
    model: Path | None,
    tensor_parallel: int,
    dtype: DtypeName | None,
) -> None:
    """Refuse options that change nothing in the report."""
    if gate_up and not shape:
        raise UnusableModel("--gate-up: goes with --shape; name one")
    if tensor_parallel != 1 and model is None:
        raise UnusableModel("--tensor-parallel: goes with --model; give --shape one GPU's sizes")
    if dtype is not None and not shape and model is None:
        raise UnusableModel(
            f"--dtype: is {str(dtype)!r}, goes with --shape or --model; the contest's shapes are "
            "float16"
        )


def _nvdisasm(screen: Console) -> Path | None:
    try:
        return find_nvdisasm()
    except NoDisassembler as error:
        screen.print(f"[yellow]{escape(str(error))}[/]")
        return None


def _products(choices: list[Choice], numbers: dict[KernelSpec, int]) -> Table:
    table = Table(title="Products", title_justify="left")
    for column in ("op", "M×N×K×L", "kernel", "tile"):
        table.add_column(column)
    for column in ("MB", "GFLOP", "SOL µs", "published", "estimate", "share of SOL"):
        table.add_column(column, justify="right")
    for each in choices:
        light = each.work.speed_of_light
        published = each.shape.published
        table.add_row(
            each.shape.name, each.shape.sizes, str(numbers[each.spec]), describe(each.tile),
            f"{each.work.nbytes / 1e6:.2f}", f"{each.work.flops / 1e9:.2f}", f"{1e6 * light:.2f}",
            f"{published:.2f}" if published else "–", f"{1e6 * each.estimate:.2f}",
            f"{light / each.estimate:.0%}",
        )  # fmt: skip
    return table


def _scores(choices: list[ScoreChoice], numbers: dict[KernelSpec, int]) -> Table:
    table = Table(title="Scores of the indexer", title_justify="left")
    for column in ("shape", "format", "queries", "keys", "kernel", "splits"):
        table.add_column(column)
    for column in ("MB", "GFLOP", "SOL µs", "relu µs", "estimate", "share"):
        table.add_column(column, justify="right")
    for each in choices:
        shape, light = each.shape, each.shape.work.speed_of_light
        least = max(light, shape.relu_seconds())
        table.add_row(
            shape.name, shape.fmt, f"{shape.sequences} × {shape.queries}", str(shape.keys),
            str(numbers[each.spec]), str(each.splits), f"{shape.work.nbytes / 1e6:.2f}",
            f"{shape.work.flops / 1e9:.2f}", f"{1e6 * light:.2f}",
            f"{1e6 * shape.relu_seconds():.2f}", f"{1e6 * each.estimate:.2f}",
            f"{least / each.estimate:.0%}",
        )  # fmt: skip
    return table


def _kernels(found: dict[KernelSpec, Static], numbers: dict[KernelSpec, int]) -> Table:
    table = Table(title="Kernels", title_justify="left")
    for column in ("", "op", "configuration", "stages", "TMEM"):
        table.add_column(column)
    for column in ("registers", "spilled", "shared", "code", *SHOWN):
        table.add_column(column, justify="right")
    for spec, static in found.items():
        mix = [str(static.instructions.get(name, 0)) for name in SHOWN]
        table.add_row(
            str(numbers[spec]), spec.op, *_configuration(spec), str(static.registers),
            f"{static.local_bytes} B", f"{static.shared_bytes / 1024:.0f} KB",
            f"{static.code_bytes / 1024:.0f} KB", *(mix if static.instructions else "–" * len(mix)),
        )  # fmt: skip
    return table


def _configuration(spec: KernelSpec) -> tuple[str, str, str]:
    """Description, stages and columns of tensor memory; a dash where a kernel has none."""
    tile, *others = spec.fields
    if isinstance(tile, MergeTile):
        words = f"D {tile.head_dim}, {tile.dtype} to {tile.out_dtype}, {tile.prefetch} ahead"
        return words, "–", "–"
    output = others[0]
    if isinstance(tile, AttentionTile) and isinstance(output, Variant):
        return describe_attention(tile, output), str(tile.stages), str(tile.tensor_columns)
    if isinstance(tile, ScoreTile) and isinstance(output, ScoreVariant):
        return describe_scorer(tile, output), str(tile.stages), str(tile.tensor_columns)
    if isinstance(tile, Tile) and isinstance(output, EpilogueConfig):
        stages = tile.depth(output.shared_bytes(tile))
        words = f"{describe(tile)}, {output.dtype} {output.store}"
        return words, str(stages), str(tile.tensor_columns)
    dtype, per_token, rows, _ = spec.fields
    words = f"{rows.slots} rows × {rows.threads} threads × {rows.steps} blocks, {dtype}"
    return words + (" per token" if per_token else ""), "–", "–"
