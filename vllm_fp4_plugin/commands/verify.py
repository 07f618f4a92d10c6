"""``python -m vllm_fp4_plugin verify``: whether a checkpoint holds all that its model needs."""

from pathlib import Path
from typing import Annotated, Any

import typer

from vllm_fp4_plugin.checkpoint import files as checkpoint_files
from vllm_fp4_plugin.checkpoint import values as checkpoint_values
from vllm_fp4_plugin.commands import command_line, model_source
from vllm_fp4_plugin.engine import meta_model, vllm_installation
from vllm_fp4_plugin.formats import UnsupportedCheckpoint


def verify(
    model: Annotated[
        str, typer.Argument(help="Checkpoint directory, or name on the hub that is downloaded.")
    ],
    additional_config: Annotated[
        str, typer.Option(help="JSON, as for vllm serve; options of ours under nvfp4_tc.")
    ] = "{}",
    dtype: Annotated[str, typer.Option(help="As for vllm serve.")] = "auto",
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="As for vllm serve.")
    ] = False,
    values: Annotated[
        bool, typer.Option("--values", help="Read every tensor too, and check what it holds.")
    ] = False,
) -> None:
    """Check that a checkpoint holds all that its model needs, nothing else, and sound scales.

    Reads the files' headers and the global scales alone, unless asked for the values: seconds for
    a model of any size. The exit status is 1 for a checkpoint that would be refused.
    """
    given = command_line.parse_additional_config(additional_config)
    with command_line.refusals(model):
        vllm_installation.check(to_plan=True)
        lines = verified(
            model_source.whole_directory(model),
            values=values,
            additional_config=given,
            dtype=dtype,
            trust_remote_code=trust_remote_code,
        )
    console = command_line.output()
    for line in lines:
        console.print(line, markup=False, highlight=False)


def verified(directory: Path, *, values: bool = False, **engine_args: Any) -> list[str]:
    """Verify a checkpoint; see ``verify``.

    Args:
        directory: where it is.
        values: read every tensor.
        engine_args: as for ``meta_model.built``.

    Returns:
        Lines of what was found to be there.

    Raises:
        ValueError: naming what is missing or wrong.
    """
    headers = checkpoint_files.read_headers(directory)
    if not headers:
        raise UnsupportedCheckpoint(
            f"{directory}: holds no safetensors files; save the model in that format"
        )
    from vllm_fp4_plugin.checkpoint.dry_load import rehearse  # which imports vLLM

    with meta_model.built(str(directory), **engine_args) as (model, config):
        rehearse(model, directory, headers)
        checkpoint = config.quant_config.checkpoint
    files = {header.file for header in headers.values()}
    lines = [f"{directory}: complete, {len(headers):,} tensors in {_count(len(files), 'file')}"]
    if checkpoint is not None:
        layers = checkpoint_files.quantised_modules(headers, checkpoint.names)
        scales = checkpoint_values.global_scales(headers, checkpoint)
        lines.append(
            f"{checkpoint.format.name}: {_count(len(layers), 'NVFP4 layer')}, "
            f"{_count(len(scales), 'global scale')} within bounds"
        )
    if values:
        checkpoint_values.check_values(headers, checkpoint)
        lines.append("values: finite" + (", block scales positive" if checkpoint else ""))
    return lines


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
