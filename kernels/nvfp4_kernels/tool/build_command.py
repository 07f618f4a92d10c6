"""``python -m nvfp4_kernels build``: a model's kernels, compiled before a server starts."""

import time
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Annotated

import typer

from nvfp4_kernels.devices import (
    FAMILIES,
    SM_COUNTS,
    UnknownArchitecture,
    parse_arch,
    spellings,
    target_of,
)
from nvfp4_kernels.precompile.model import PAGE_SIZE
from nvfp4_kernels.settings import CACHE_VARIABLE, MAX_TERMS
from nvfp4_kernels.tool.config_file import UnusableModel
from nvfp4_kernels.tool.console import progress_bar, refusals
from nvfp4_kernels.tool.options import (
    CPUS,
    ActivationName,
    CacheName,
    DtypeOption,
    JobsOption,
    TensorParallelOption,
)


def build(
    *,
    out: Annotated[
        Path, typer.Option(help=f"Folder to keep them in; point {CACHE_VARIABLE} at it to serve.")
    ],
    model: Annotated[
        Path | None, typer.Argument(help="config.json of a model, or the directory it is in.")
    ] = None,
    linear: Annotated[
        list[str], typer.Option(metavar="N,K", help="Linear layer, instead of a model.")
    ] = [],  # noqa: B006  typer wants a list
    gate_up: Annotated[
        list[str],
        typer.Option(metavar="N,K", help="Fused gate and up projection, instead of a model."),
    ] = [],  # noqa: B006
    arch: Annotated[
        str,
        typer.Option(
            help=f"GPU to compile for, none is needed: {spellings()}; sm_100 is compiled for "
            "sm_100a, and so are the others."
        ),
    ] = "sm_100a",
    sms: Annotated[
        int | None,
        typer.Option(min=1, help="Its multiprocessors, if not a B200's, a GB300's or an H200's."),
    ] = None,
    tensor_parallel: TensorParallelOption = 1,
    expert_parallel: Annotated[
        int,
        typer.Option(
            min=1,
            help="GPUs that whole experts are divided among, with vLLM's --enable-expert-parallel: "
            "tensor times data parallel size.",
        ),
    ] = 1,
    max_tokens: Annotated[
        int, typer.Option(min=1, help="Tokens in a batch, at the most: max_num_batched_tokens.")
    ] = 8192,
    activation: Annotated[
        ActivationName | None,
        typer.Option(
            help="How inputs are scaled: static, per-token or both on sm_100; on sm_90 the "
            "server's option activation, fp8 or else 16-bit; else as the model says, or both."
        ),
    ] = None,
    terms: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=MAX_TERMS,
            help="NVFP4 values that add up to each input, on sm_100; else 3 where weights alone "
            "are quantised, or 1.",
        ),
    ] = None,
    dtype: DtypeOption = None,
    kv_cache: Annotated[
        CacheName | None,
        typer.Option(help="What it holds; else both, on sm_90 the model's dtype."),
    ] = None,
    block_size: Annotated[
        int | None,
        typer.Option(
            min=16,
            max=128,
            help=f"Tokens of a page of it, as vLLM's --block-size; else {PAGE_SIZE}.",
        ),
    ] = None,
    fuse_mlp: Annotated[bool, typer.Option(help="Gate and up projection as one kernel.")] = True,
    batch_invariant: Annotated[
        bool, typer.Option(help="Kernels for a server with VLLM_BATCH_INVARIANT instead.")
    ] = False,
    jobs: JobsOption = CPUS,
) -> None:
    """Compile every kernel that a model's layers need, for any batch.

    The kernels are those of linear layers, norms, rotary embeddings, attention and experts. On
    sm_90, attention has kernels for decoding only, and vLLM runs prefills. Kernels that are already
    in --out are kept. The exit status is 1 if a kernel could not be compiled.
    """
    from nvfp4_kernels.checks import InvalidArgument
    from nvfp4_kernels.runtime.compile import check_folder
    from nvfp4_kernels.tool import wanted
    from nvfp4_kernels.tool.build import build_all
    from nvfp4_kernels.tool.build_table import print_built
    from nvfp4_kernels.tool.destination import make_folder
    from nvfp4_kernels.tool.toolchain import NoCompiler, check_compiler

    kinds = (UnusableModel, UnknownArchitecture, InvalidArgument, NoCompiler, OSError)
    with refusals(*kinds, BrokenProcessPool):
        arch = parse_arch("--arch", arch)
        parallel = wanted.Parallel(tensor_parallel, expert_parallel)
        mixture, inputs = wanted.which_model(model, linear, gate_up, parallel, dtype, fuse_mlp)
        page_size = wanted.page_size_of(block_size)
        started = time.monotonic()
        asked = wanted.Wanted(
            mixture, max_tokens, sms or SM_COUNTS[arch], page_size, inputs, activation,
            terms, kv_cache, batch_invariant,
        )  # fmt: skip
        if batch_invariant:
            wanted.check_batch_invariant(asked)
        specs = wanted.KERNELS[FAMILIES[arch]](asked)
        check_compiler()
        make_folder("--out", out)
        check_folder("--out", out)
        with progress_bar() as bar:
            task = bar.add_task("kernels", total=len(specs))
            done = []
            for built in build_all(list(specs), out, target_of(arch), jobs):
                done.append(built)
                bar.advance(task)
        print_built(mixture, specs, done, out, time.monotonic() - started)
    if any(b.error for b in done):
        raise typer.Exit(1)
