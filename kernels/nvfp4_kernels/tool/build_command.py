"""``python -m nvfp4_kernels build``: a model's kernels, compiled before a server starts."""

import time
from collections import defaultdict
from concurrent.futures.process import BrokenProcessPool
from enum import StrEnum
from pathlib import Path
from typing import Annotated, NamedTuple

import typer
from rich.markup import escape
from rich.table import Table

from nvfp4_kernels.checks import InvalidArgument
from nvfp4_kernels.devices import (
    FAMILIES,
    SM_COUNTS,
    UnknownArchitecture,
    parse_arch,
    spellings,
    target_of,
)
from nvfp4_kernels.formats.terms import MAX_TERMS
from nvfp4_kernels.precompile.attention_sm90 import decode_kernels
from nvfp4_kernels.precompile.attention_sm100 import (
    CACHES,
    PAGE_SIZE,
    attention_kernels,
    hands_over,
)
from nvfp4_kernels.precompile.experts import experts_kernels
from nvfp4_kernels.precompile.experts_layer import Experts
from nvfp4_kernels.precompile.linear_sm90 import weight_only_kernels
from nvfp4_kernels.precompile.linear_sm100 import ACTIVATIONS, block_scaled_kernels
from nvfp4_kernels.precompile.model import quantizing_mlps
from nvfp4_kernels.precompile.norm_rotary_sm90 import norm_rotary_kernels
from nvfp4_kernels.precompile.norm_sm100 import norm_kernels
from nvfp4_kernels.precompile.rotary_store import rotary_store_kernels
from nvfp4_kernels.precompile.spec import KernelSpec
from nvfp4_kernels.runtime.compile import CACHE_VARIABLE, check_folder
from nvfp4_kernels.tool.build import Built, build_all
from nvfp4_kernels.tool.config_file import UnusableModel, load_config
from nvfp4_kernels.tool.console import console, progress_bar, refusals
from nvfp4_kernels.tool.destination import make_folder
from nvfp4_kernels.tool.mixture import Mixture, read_mixture
from nvfp4_kernels.tool.model import dense_model, explicit, number_of_experts
from nvfp4_kernels.tool.options import (
    CPUS,
    DtypeName,
    DtypeOption,
    JobsOption,
    TensorParallelOption,
    dtype_of,
)
from nvfp4_kernels.tool.quantized_inputs import EITHER, Inputs, quantized_inputs
from nvfp4_kernels.tool.toolchain import NoCompiler, check_compiler


class CacheName(StrEnum):
    """Data type of the KV cache."""

    auto = "auto"
    fp8 = "fp8"
    both = "both"


class ActivationName(StrEnum):
    """Scaling of activations."""

    static = "static"
    per_token = "per-token"
    both = "both"


def build(
    out: Annotated[
        Path, typer.Option(help=f"Folder to keep them in; point {CACHE_VARIABLE} at it to serve.")
    ],
    model: Annotated[
        Path | None, typer.Argument(help="config.json of a model, or the directory it is in.")
    ] = None,
    linear: Annotated[
        list[str], typer.Option(help="N,K of a linear layer, instead of a model.")
    ] = [],  # noqa: B006  typer wants a list
    gate_up: Annotated[
        list[str], typer.Option(help="N,K of a fused gate and up projection, instead of a model.")
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
        typer.Option(help="How inputs are scaled, on sm_100; else as the model says, or both."),
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
        typer.Option(help="What it holds, on sm_100: the model's dtype, FP8; else both."),
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

    Of linear and attention layers and experts; on sm_90 of attention what decodes: prefills are
    vLLM's.
    What is there already stays as it is. Ends with status 1 if any kernel could not be compiled.
    """
    kinds = (UnusableModel, UnknownArchitecture, InvalidArgument, NoCompiler, OSError)
    with refusals(*kinds, BrokenProcessPool):
        arch = parse_arch("--arch", arch)
        parallel = _Parallel(tensor_parallel, expert_parallel)
        mixture, inputs = _which_model(model, linear, gate_up, parallel, dtype, fuse_mlp)
        page_size = _page_size(block_size)
        started = time.monotonic()
        wanted = _Wanted(
            mixture, max_tokens, sms or SM_COUNTS[arch], page_size, inputs, activation,
            terms, kv_cache, batch_invariant,
        )  # fmt: skip
        if batch_invariant:
            _check_batch_invariant(wanted)
        specs = _KERNELS[FAMILIES[arch]](wanted)
        check_compiler()
        make_folder("--out", out)
        check_folder("--out", out)
        with progress_bar() as bar:
            task = bar.add_task("kernels", total=len(specs))
            done = []
            for built in build_all(list(specs), out, target_of(arch), jobs):
                done.append(built)
                bar.advance(task)
        _print(mixture, specs, done, out, time.monotonic() - started)
    if any(b.error for b in done):
        raise typer.Exit(1)


def _page_size(block_size: int | None) -> int:
    page_size = PAGE_SIZE if block_size is None else block_size
    if page_size & (page_size - 1):
        raise UnusableModel(
            f"--block-size: is {page_size}, must be a power of two; choose 16, 32, 64 or 128"
        )
    return page_size


class _Parallel(NamedTuple):
    """GPUs that share layers, and those that whole experts are divided among."""

    tensor: int
    expert: int


class _Wanted(NamedTuple):
    """Model and batches that kernels are compiled for; None: not said."""

    mixture: Mixture
    max_tokens: int
    sms: int
    page_size: int
    of_model: tuple[Inputs, ...]
    activation: ActivationName | None
    terms: int | None
    kv_cache: CacheName | None
    batch_invariant: bool = False


def _check_batch_invariant(wanted: _Wanted) -> None:
    """Check that a server with batch invariance would not refuse the model.

    Raises:
        UnusableModel: it has experts, or inputs of several terms.
    """
    if wanted.mixture.experts:
        raise UnusableModel(
            "--batch-invariant: goes with dense models, this one has experts, which a server with "
            "VLLM_BATCH_INVARIANT refuses; leave it out"
        )
    terms = max(inputs.terms for inputs in _inputs(wanted))
    if terms > 1:
        raise UnusableModel(
            f"--batch-invariant: goes with inputs of one term, these have {terms}, whose layout "
            "depends on the number of tokens; give --terms 1"
        )


def _sm90_kernels(wanted: _Wanted) -> dict[KernelSpec, list[str]]:
    """Kernels of linear layers, experts, attention where it decodes, and what runs between them.

    Raises:
        UnusableModel: options are given that no kernel depends on: activations stay as they are,
            and FP8 caches are vLLM's own.
    """
    given = {
        "--activation": wanted.activation,
        "--terms": wanted.terms,
        "--kv-cache": wanted.kv_cache,
    }
    for option, value in given.items():
        if value is not None:
            raise UnusableModel(
                f"{option}: is {str(value)!r}, must not be given for sm_90, where no "
                "kernel depends on it; leave it out"
            )
    model, sms = wanted.mixture.dense, wanted.sms
    specs = weight_only_kernels(
        model, max_tokens=wanted.max_tokens, batch_invariant=wanted.batch_invariant, sms=sms
    )
    if wanted.batch_invariant:
        return specs  # all else is vLLM's
    if model.attention is not None:
        specs |= norm_rotary_kernels(model.hidden, model.attention, model.dtype)
        specs |= decode_kernels(model.attention, model.dtype, page_size=wanted.page_size, sms=sms)
    for experts in wanted.mixture.experts:
        served = experts.served("sm_90", "16-bit", 1)
        specs |= _experts_kernels(served, "sm_90", wanted)
    return specs


def _sm100_kernels(wanted: _Wanted) -> dict[KernelSpec, list[str]]:
    """Kernels of linear layers and experts, of their inputs, of norms and around attention."""
    model, sms, tokens = wanted.mixture.dense, wanted.sms, wanted.max_tokens
    specs: dict[KernelSpec, list[str]] = {}
    for activation, terms in _inputs(wanted):
        static = activation == "static"
        layers = quantizing_mlps(model, terms) if static and model.hidden else model
        specs |= block_scaled_kernels(
            layers, max_tokens=tokens, activations=(activation,), terms=terms,
            batch_invariant=wanted.batch_invariant, sms=sms,
        )  # fmt: skip
        if model.hidden:
            specs |= norm_kernels(
                model.dtype, model.dtype, model.hidden, max_tokens=tokens, per_token=not static,
                terms=terms, batch_invariant=wanted.batch_invariant, sms=sms,
            )  # fmt: skip
        for experts in wanted.mixture.experts:
            served = experts.served("sm_100", activation, terms)
            specs |= _experts_kernels(served, "sm_100", wanted)
    if model.attention is not None:
        caches = tuple(c for c in CACHES if wanted.kv_cache in (c, CacheName.both, None))
        specs |= rotary_store_kernels(
            model.attention, model.dtype, max_tokens=tokens, caches=caches,
            page_size=wanted.page_size, sms=sms,
        )  # fmt: skip
        for quantized in {hands_over(model.attention, *inputs) for inputs in _inputs(wanted)}:
            specs |= attention_kernels(
                model.attention, model.dtype, caches=caches, page_size=wanted.page_size, sms=sms,
                quantized=quantized, rotates=True, batch_invariant=wanted.batch_invariant,
            )  # fmt: skip
    return specs


def _experts_kernels(experts: Experts, family: str, wanted: _Wanted) -> dict[KernelSpec, list[str]]:
    """Kernels of a layer of experts, with what each is for."""
    specs = experts_kernels(experts, family, max_tokens=wanted.max_tokens, sms=wanted.sms)
    return {spec: [f"experts' {part}" for part in parts] for spec, parts in specs.items()}


def _inputs(wanted: _Wanted) -> list[Inputs]:
    """Quantisation of inputs: as the options say, and where they do not, as the model does."""
    given = tuple(a for a in ACTIVATIONS if wanted.activation in (a, ActivationName.both))
    found = [
        Inputs(activation, wanted.terms or inputs.terms)
        for inputs in wanted.of_model
        for activation in (given or (inputs.activation,))
    ]
    return list(dict.fromkeys(found))


# By architecture family.
_KERNELS = {"sm_90": _sm90_kernels, "sm_100": _sm100_kernels}


def _which_model(
    model: Path | None,
    linear: list[str],
    gate_up: list[str],
    parallel: _Parallel,
    dtype: DtypeName | None,
    fuse_mlp: bool,
) -> tuple[Mixture, tuple[Inputs, ...]]:
    """The model, or the sizes, that the command is given, and how inputs are quantised."""
    if (model is None) == (not linear and not gate_up):
        raise UnusableModel(
            "MODEL: give a model's config.json, or sizes with --linear N,K and --gate-up N,K; one "
            "of the two"
        )
    if model is None:
        for option, gpus in zip(("--tensor-parallel", "--expert-parallel"), parallel, strict=True):
            if gpus != 1:
                raise UnusableModel(
                    f"{option}: goes with a model; give --linear and --gate-up one GPU's sizes"
                )
        return Mixture(explicit(linear, gate_up, dtype_of(dtype)), (), ""), EITHER
    config = load_config(model)
    inputs = quantized_inputs(config.quantization)
    if number_of_experts(config):
        return read_mixture(
            config, tensor_parallel=parallel.tensor, expert_parallel=parallel.expert,
            dtype=dtype_of(dtype), fuse_mlp=fuse_mlp,
        ), inputs  # fmt: skip
    if parallel.expert != 1:
        raise UnusableModel(
            f"--expert-parallel: is {parallel.expert}, must be 1 for {config.name}, which has no "
            "experts; leave it out"
        )
    dense = dense_model(
        config, tensor_parallel=parallel.tensor, dtype=dtype_of(dtype), fuse_mlp=fuse_mlp
    )
    return Mixture(dense, (), ""), inputs


def _print(
    mixture: Mixture,
    specs: dict[KernelSpec, list[str]],
    done: list[Built],
    out: Path,
    seconds: float,
) -> None:
    groups: dict[tuple[str, str], list[Built]] = defaultdict(list)
    for built in sorted(done, key=lambda b: list(specs).index(b.spec)):
        groups[built.spec.op, ", ".join(specs[built.spec])].append(built)
    model = mixture.dense
    table = Table(title=f"Kernels of {escape(model.name)}, {model.dtype}", title_justify="left")
    table.add_column("kernel")
    table.add_column("layers", overflow="fold")
    for column in ("configurations", "there already", "compiled", "failed", "s", "MB"):
        table.add_column(column, justify="right")
    for (op, layers), builts in groups.items():
        table.add_row(op, layers, *_figures(builts))
    table.add_section()
    table.add_row("all", "", *_figures(done))
    screen = console()
    screen.print(table)
    for built in done:
        if built.error:
            screen.print(f"[red]{escape(str(built.spec.kernel()))}: {escape(built.error)}[/]")
    if all(b.seconds == 0 and not b.error for b in done):
        screen.print(f"Everything was there already ({seconds:.1f} s).")
    else:
        screen.print(f"{seconds:.1f} s in all.")
    if mixture.left_out:
        screen.print(f"Not among them: {escape(mixture.left_out)}; they compile on first use.")
    screen.print(f"Serve with {CACHE_VARIABLE}={escape(str(out.resolve()))}", soft_wrap=True)


def _figures(builts: list[Built]) -> list[str]:
    there = sum(b.seconds == 0 and not b.error for b in builts)
    failed = sum(bool(b.error) for b in builts)
    seconds, nbytes = sum(b.seconds for b in builts), sum(b.nbytes for b in builts)
    counts = [len(builts), there, len(builts) - there - failed, failed]
    return [*map(str, counts), f"{seconds:.1f}", f"{nbytes / 1e6:.2f}"]
