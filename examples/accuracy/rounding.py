"""Making of a 16-bit checkpoint whose weights are rounded to NVFP4 and back.

Any engine serves the checkpoint with 16-bit matmuls, so that the loss is the format's alone,
independent of our files and our kernels.
"""

import json
from pathlib import Path

from nvfp4_kernels.formats.scale_search import quantize_with_rule
from vllm_fp4_plugin.quantizer.destination import copy_companions
from vllm_fp4_plugin.quantizer.errors import QuantizerError
from vllm_fp4_plugin.quantizer.linears import build_model, select_linears
from vllm_fp4_plugin.quantizer.source import open_source
from vllm_fp4_plugin.quantizer.tensor_file import TensorWriter

_SHARD_BYTES = 5_000_000_000


def round_checkpoint(source_folder: Path, target: Path) -> None:
    """Write ``target``, tensor by tensor; the linears that the quantising tool selects are rounded.

    Raises:
        QuantizerError: the quantising tool does not accept the checkpoint, or the checkpoint stacks
            its experts.
    """
    source = open_source(source_folder)
    selected = select_linears(build_model(source), source, ()).quantized
    for name, weight in selected.items():
        if weight.expert is not None:
            raise QuantizerError(
                f"{name}: lies in the stack {weight.tensor}, must be a tensor of its own; save the "
                "checkpoint expert by expert"
            )
    chosen = {f"{name}.weight" for name in selected}
    target.mkdir()
    copy_companions(source_folder, target)
    (target / "config.json").write_text(json.dumps(source.config, indent=2) + "\n")
    writer = TensorWriter(target, source.specs, _SHARD_BYTES)
    for name in source.specs:
        tensor = source.load(name)
        if name in chosen:
            tensor = quantize_with_rule(tensor, "absmax").dequantize(tensor.dtype)
        writer.write(name, tensor)
    writer.finish()
