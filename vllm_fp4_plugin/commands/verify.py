"""``python -m vllm_fp4_plugin verify``: whether a checkpoint holds all tensors of its model."""

from typing import Annotated

import typer

from nvfp4_kernels.tool.options import JsonOption
from vllm_fp4_plugin.commands import command_line
from vllm_fp4_plugin.engine import vllm_installation


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
        bool,
        typer.Option("--values", help="Read every tensor of floats too, and check its values."),
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Check that a checkpoint holds the tensors that its model needs, no others, and valid scales.

    Reads only the files' headers and the global scales, unless --values is given: seconds for a
    model of any size. The exit status is 1 for a checkpoint that would be refused.
    Whether this machine's device can serve the model is for report to tell.

    Fields of --json: directory; tensors and files, their numbers; format, the exporter's;
    nvfp4_layers and global_scales, their numbers; these three are null for a checkpoint that is not
    quantised; values_checked, whether values were read and checked.
    """
    requested = command_line.parse_additional_config(additional_config)
    with command_line.nothing_printed(), command_line.refusals(model):
        from vllm_fp4_plugin.checkpoint import model_source
        from vllm_fp4_plugin.commands.verification import verified

        vllm_installation.check(to_plan=True)
        found = verified(
            model_source.whole_directory(model),
            values=values,
            additional_config=requested,
            dtype=dtype,
            trust_remote_code=trust_remote_code,
        )
    if as_json:
        command_line.print_json(found.json())
        return
    console = command_line.output()
    for line in found.lines():
        console.print(line, markup=False)
