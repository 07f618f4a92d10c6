"""Plans of the families: the kernels that a tiny checkpoint of each family gets, by device."""

import json
import re
from pathlib import Path
from typing import Any

from nvfp4_kernels.dispatch import NoKernelError
from tests import devices
from tests.catalogue import checkpoint
from tests.catalogue.family import Family
from vllm_fp4_plugin.commands.known_checkpoints import ARCHS, Cell, Row
from vllm_fp4_plugin.commands.model_report import model_report, stored_report
from vllm_fp4_plugin.commands.verification import verified
from vllm_fp4_plugin.engine import refusal as refused
from vllm_fp4_plugin.report import Report

_BY_VLLM = re.compile(r"(\w+) \(vLLM")
# Errors that say another device is needed.
_ON_CPU = re.compile(r"on CPU\b|by the CPU attention|requires a CUDA")
_PATHS = re.compile(r"/\S+/")


def plan(family: Family, directory: Path, archs: tuple[str, ...] = ARCHS) -> Row:
    """Plan a family's tiny checkpoint for each architecture.

    Args:
        family: family to plan.
        directory: directory of the checkpoint, which is written if missing.
        archs: architectures, spelled as for ``report --arch``.
    """
    if not (directory / "config.json").exists():
        checkpoint.write(family, directory)
    config = json.loads((directory / "config.json").read_text())
    cells = {arch: _cell(family, directory, arch) for arch in archs}
    refusal = _refusal_of_load(family, directory)
    if refusal:
        cells = {arch: Cell("refused", refusal) for arch in archs}
    [architecture] = config["architectures"]
    return Row(
        family.name,
        family.checkpoints,
        architecture,
        config["model_type"],
        family.format,
        family.ran,
        family.note,
        cells,
        {},
    )


def _cell(family: Family, directory: Path, arch: str) -> Cell:
    try:
        layers = _report(family, directory, arch)
    except Exception as error:  # the plan is what became of it
        said = _message(error) or type(error).__name__
        if isinstance(error, NoKernelError):
            return Cell("refused", said)
        is_ours = bool(refused.cause(error))
        expected = filter(None, (family.by_headers, family.on_cpu if arch == "cpu" else ""))
        is_expected = any(part in said for part in expected)
        if is_ours and family.by_headers:
            return _by_headers(directory, arch)
        if _ON_CPU.search(said) and not is_ours and not is_expected:
            if arch == "cpu":
                return Cell("refused", f"vLLM: {said}")
            return _by_headers(directory, arch)
        if not family.by_headers:
            if not isinstance(error, ValueError | NotImplementedError):
                raise  # what is wrong is the tiny checkpoint
            return Cell("refused", f"vLLM: {said}" if _is_theirs(error) else said)
        if not is_expected:
            raise
        if family.only_gpu and arch == "cpu":
            return Cell("refused", f"vLLM: {family.on_cpu or said}")
        return _by_headers(directory, arch)
    if family.by_headers:
        raise AssertionError(f"{family.name}: is built for {arch}, so needs no plan by headers")
    return Cell(*_served(layers))


def _is_theirs(error: Exception) -> bool:
    """Whether ``error`` is a refusal by vLLM's model; the plugin refuses by config-check errors."""
    return isinstance(error, NotImplementedError)


def _report(family: Family, directory: Path, arch: str) -> Report:
    with_code = family.surround is not None
    devices.bind_cutlass()
    return model_report(str(directory), arch=arch, trust_remote_code=with_code)


def _refusal_of_load(family: Family, directory: Path) -> str:
    """Reason why the checkpoint would not load on any device; empty if it would load.

    Only models that this machine can build are checked.
    """
    if family.by_headers:
        return ""
    try:
        _report(family, directory, "cpu")
    except (ValueError, NotImplementedError):
        return ""
    except RuntimeError as error:
        if _ON_CPU.search(str(error)):
            return ""
        raise
    try:
        verified(directory, trust_remote_code=family.surround is not None)
    except Exception as error:  # the plan is what became of it
        return _message(error)
    return ""


def _by_headers(directory: Path, arch: str) -> Cell:
    try:
        layers = stored_report(str(directory), arch)
    except ValueError as error:
        return Cell("refused", _message(error), by_headers=True)
    return Cell(*_served(layers), by_headers=True)


def _served(layers: Report) -> tuple[Any, str]:
    """Verdict on a served model, and a description of the parts that vLLM's methods run."""
    theirs: dict[str, None] = {}
    ours: dict[str, None] = {}
    attention: dict[str, None] = {}
    for record in layers.layers:
        kind = _BY_VLLM.match(record.kernel)
        if "KV cache" in record.arithmetic:
            attention |= dict.fromkeys(["ours" if record.kernel.startswith("nvfp4_") else "vLLM's"])
        elif record.kernel.startswith("nvfp4_grouped"):
            ours |= dict.fromkeys(["experts ours"])
        elif kind and kind[1] != "unquantized":
            theirs |= dict.fromkeys([f"{kind[1]} {_noun(record.name)}"])
    parts = [*ours, *([f"{', '.join(theirs)} by vLLM"] if theirs else [])]
    if attention:
        parts.append(f"attention {' and '.join(attention)}")
    return ("delegated" if theirs else "served"), "; ".join(parts)


def _noun(layer: str) -> str:
    last = layer.rpartition(".")[2]
    return "experts" if last == "experts" else "lm_head" if last == "lm_head" else "linears"


def _message(error: Any) -> str:
    """Message of an error, without this machine's directories."""
    details = error.errors() if hasattr(error, "errors") else ()
    causes = [detail["ctx"]["error"] for detail in details if "error" in detail.get("ctx", {})]
    said = "; ".join(map(str, causes)) or str(error)
    return _PATHS.sub("", said.partition("; there is ")[0]).strip()
