"""``python -m nvfp4_kernels report``: resources of kernels, and lower bounds on GEMM times."""

from concurrent.futures.process import BrokenProcessPool
from itertools import product
from pathlib import Path
from typing import Annotated

import typer

from nvfp4_kernels.devices import (
    SM_COUNTS,
    UnknownArchitecture,
    members,
    parse_arch,
    spellings,
    target_of,
)
from nvfp4_kernels.tool.config_file import UnusableModel
from nvfp4_kernels.tool.console import nothing_printed, print_json, progress_bar, refusals, say
from nvfp4_kernels.tool.options import (
    CPUS,
    DtypeName,
    DtypeOption,
    JobsOption,
    JsonOption,
    TensorParallelOption,
    dtype_of,
)

ARCHS = members("sm_100")  # kernels of others are not reported on


def report(
    shape: Annotated[
        list[str],
        typer.Option(metavar="M,N,K[,L]", help="Product, instead of the contest's shapes."),
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
    as_json: JsonOption = False,
) -> None:
    """Compile kernels of GEMMs, attention and scoring; print their resources. No GPU is needed.

    The exit status is 1 if any kernel spills registers.

    Fields of --json: products and scores, lists of sizes, work (bytes, flops), times in
    microseconds (speed_of_light_us, relu_us, estimate_us, published_us) and kernel, the
    number of an entry of kernels, from 1; kernels, a list of op, configuration, description,
    stages, tensor_columns and figures (registers, local_bytes, shared_bytes, threads, code_bytes,
    instructions, spills); limits, the bytes_per_second and flops_per_second of the speed of light.
    """
    from nvfp4_kernels.checks import InvalidArgument
    from nvfp4_kernels.precompile.attention_sm100 import attention_kernels
    from nvfp4_kernels.precompile.linear_sm100 import quantize_kernels
    from nvfp4_kernels.tool.binary import UnreadableBinary
    from nvfp4_kernels.tool.instructions import NoDisassembler
    from nvfp4_kernels.tool.model import read_model
    from nvfp4_kernels.tool.report import Found, choose, measure_all
    from nvfp4_kernels.tool.report_tables import print_report
    from nvfp4_kernels.tool.scoring import choose_scorer, deepseek_shapes
    from nvfp4_kernels.tool.shapes import CONTEST, TOKENS, given_shape, model_shapes
    from nvfp4_kernels.tool.toolchain import NoCompiler, check_compiler

    kinds = (UnusableModel, UnknownArchitecture, UnreadableBinary, InvalidArgument, NoCompiler)
    with nothing_printed(), refusals(*kinds, NoDisassembler, OSError, BrokenProcessPool):
        arch = parse_arch("--arch", arch, ARCHS)
        sms = sms or SM_COUNTS[arch]
        _refuse_options_of_nothing(shape, gate_up, model, tensor_parallel, dtype)
        shapes = [given_shape(text, gate_up, dtype_of(dtype)) for text in shape]
        others = []
        if model is not None:
            chosen = read_model(model, tensor_parallel=tensor_parallel, dtype=dtype_of(dtype))
            shapes += model_shapes(chosen)
            for layer, per_token in product(chosen.layers, (False, True)):
                others += quantize_kernels(chosen.dtype, layer.k, max(TOKENS), per_token, 1, sms)
            if chosen.attention is not None:
                others += attention_kernels(chosen.attention, chosen.dtype, sms=sms)
        choices = [choose(each, sms) for each in shapes or CONTEST]
        scorers = [choose_scorer(each, sms) for each in deepseek_shapes()] if indexer else []
        others += [choice.spec for choice in scorers]
        check_compiler()
        nvdisasm = _nvdisasm()
        specs = list(dict.fromkeys([*(choice.spec for choice in choices), *others]))
        found = Found(choices, scorers)
        with progress_bar() as bar:
            task = bar.add_task("kernels", total=len(specs))
            for spec, static in measure_all(specs, target_of(arch), nvdisasm, jobs):
                found.kernels[spec] = static
                bar.advance(task)
    if as_json:
        print_json(found.json())
    else:
        print_report(found)
    if found.spilling():
        raise typer.Exit(1)


def _refuse_options_of_nothing(
    shape: list[str],
    gate_up: bool,
    model: Path | None,
    tensor_parallel: int,
    dtype: DtypeName | None,
) -> None:
    """Refuse options that have no effect on the report."""
    if gate_up and not shape:
        raise UnusableModel("--gate-up: goes with --shape; name one")
    if tensor_parallel != 1 and model is None:
        raise UnusableModel("--tensor-parallel: goes with --model; give --shape one GPU's sizes")
    if dtype is not None and not shape and model is None:
        raise UnusableModel(
            f"--dtype: is {str(dtype)!r}, goes with --shape or --model; the contest's shapes are "
            "float16"
        )


def _nvdisasm() -> Path | None:
    from nvfp4_kernels.tool.instructions import NoDisassembler, find_nvdisasm

    try:
        return find_nvdisasm()
    except NoDisassembler as error:
        say(str(error))
        return None
