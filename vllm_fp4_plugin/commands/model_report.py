"""Reports of models, either built without weights or planned from their files' headers."""

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

from vllm_fp4_plugin.checkpoint import files as checkpoint_files
from vllm_fp4_plugin.checkpoint import model_source
from vllm_fp4_plugin.checkpoint.files import TensorHeader
from vllm_fp4_plugin.commands import command_line
from vllm_fp4_plugin.engine import meta_model, refusal
from vllm_fp4_plugin.report import Report


def model_report(model: str, *, arch: str = "", **engine_args: Any) -> Report:
    """Report of a model that vLLM builds without weights: its layers' kernels, and its weights.

    Args:
        model: checkpoint directory or hub name; if its files are local, a dry load checks them.
        arch: architecture to plan for; empty: this machine's device.
        engine_args: arguments of ``meta_model.built``.

    Raises:
        ValueError: the checkpoint is refused, or lacks a tensor.
    """
    from vllm_fp4_plugin.checkpoint.dry_load import dry_load  # which imports vLLM

    directory = checkpoint_files.local_directory(model)
    headers = {} if directory is None else checkpoint_files.read_headers(directory)
    with meta_model.built(model, arch=arch, **engine_args) as (built, config):
        startup = config.quant_config.startup
        from vllm_fp4_plugin.commands import built_weights  # which imports vLLM

        report: Report = startup.report
        report.weights = built_weights.of_model(built, report)
        for record in built_weights.heads(built, config.model_config.get_vocab_size()):
            report.add(record)
        if directory is not None and headers:
            dry_load(built, directory, headers)
    report.notes = startup.idle_patterns()
    return report


def stored_report(
    model: str, arch: str = "", additional_config: dict[str, Any] | None = None
) -> Report:
    """Report of a checkpoint on this machine, planned from its headers; see ``headers_report``."""
    from vllm_fp4_plugin.commands.report_by_headers import headers_report
    from vllm_fp4_plugin.device import planned_for
    from vllm_fp4_plugin.options import Options

    options = Options.of(SimpleNamespace(additional_config=additional_config))
    with planned_for(arch):
        return headers_report(model_source.whole_directory(model), options)


def report_here(model: str, *, arch: str = "", **args: Any) -> Report:
    """Call ``model_report``; where vLLM cannot build the model here, raise with a remedy."""
    try:
        return model_report(model, arch=arch, **args)
    except (NotImplementedError, ValueError) as error:
        from vllm_fp4_plugin.device import current_device  # which imports vLLM

        # vLLM raises ValueError too for what only another device has.
        is_of_here = arch in ("", current_device().type) or bool(refusal.cause(error))
        if isinstance(error, ValueError) and is_of_here:
            raise
        raise NotImplementedError(
            f"{model}: vLLM cannot build it on this machine ({command_line.message(error)}); plan "
            "it with --by-headers"
        ) from error


def headers_here(model: str) -> Mapping[str, TensorHeader]:
    """Headers of a model's files; {} unless all files are on this machine."""
    directory = checkpoint_files.local_directory(model)
    return {} if directory is None else checkpoint_files.read_headers(directory)
