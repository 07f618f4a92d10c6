"""Weights of a model that vLLM has built: sizes as in the device's memory, and heads in 16 bits."""

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn
from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.layers.linear import LinearBase
from vllm.model_executor.layers.quantization.kv_cache import BaseKVCacheMethod
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    UnquantizedEmbeddingMethod,
    VocabParallelEmbedding,
)

from vllm_fp4_plugin.checkpoint.kinds_stored import EXPERTS
from vllm_fp4_plugin.checkpoint.weight_account import (
    EMBEDDINGS,
    HEAD,
    LINEAR,
    NORMS,
    OTHERS,
    WeightAccount,
)
from vllm_fp4_plugin.linear import lm_head
from vllm_fp4_plugin.report import LayerRecord, Report

_KINDS: dict[str, tuple[type[nn.Module], ...]] = {
    EXPERTS: (RoutedExperts,),
    HEAD: (ParallelLMHead,),  # which is an embedding by its class
    EMBEDDINGS: (VocabParallelEmbedding, nn.Embedding),
    LINEAR: (LinearBase, nn.Linear),
}


def of_model(model: nn.Module, report: Report) -> WeightAccount:
    """Account of the weights of a model on the meta device, for one rank.

    Args:
        model: model that ``meta_model.built`` yields.
        report: report of the layers, which has the bytes of layers that are packed after loading.
    """
    records = {record.name: record for record in report.layers if record.weight_bytes}
    account, counted = WeightAccount(), set[int]()
    for path, module in model.named_modules():
        if isinstance(getattr(module, "quant_method", None), BaseKVCacheMethod):
            continue  # whose scales become numbers
        tensors = {n: t for n, t in _tensors(module).items() if id(t) not in counted}
        counted |= set(map(id, tensors.values()))
        if tensors:
            account.add(_kind(module), path, *_size(tensors, _record(module, path, records)))
    return account


def heads(model: nn.Module, vocab_size: int) -> Iterator[LayerRecord]:
    """Yield a record of each head in 16 bits, which vLLM multiplies, with the head's weights.

    Args:
        model: model that ``meta_model.built`` yields, in that context.
        vocab_size: number of tokens in the model's vocabulary.
    """
    modules = dict(model.named_modules(remove_duplicate=False))
    found = {path: each for path, each in modules.items() if isinstance(each, ParallelLMHead)}
    embeddings = {
        path: each
        for path, each in modules.items()
        if isinstance(each, VocabParallelEmbedding) and path not in found
    }
    paths = {id(each.weight): path for path, each in embeddings.items() if hasattr(each, "weight")}
    for path, head in found.items():
        if isinstance(head.quant_method, UnquantizedEmbeddingMethod):
            yield _head(path, head, paths.get(id(head.weight), ""))
    if not found and lm_head.is_tied():  # some models multiply by the embedding itself
        for path, each in embeddings.items():
            if each.org_vocab_size == vocab_size:
                yield _head("lm_head", each, path)
                return


def _head(name: str, module: VocabParallelEmbedding, embedding: str) -> LayerRecord:
    return LayerRecord.head(name, str(module.weight.dtype).removeprefix("torch."), embedding)


def _tensors(module: nn.Module) -> dict[str, Tensor]:
    """Parameters and persistent buffers of a module itself, by name; not of its submodules."""
    buffers = {
        name: buffer
        for name, buffer in module.named_buffers(recurse=False)
        if name not in module._non_persistent_buffers_set
    }
    return {**dict(module.named_parameters(recurse=False)), **buffers}


def _record(module: Any, path: str, records: dict[str, LayerRecord]) -> LayerRecord | None:
    """Remove a module's record, found by vLLM's name or by path, and return it; None: no record."""
    names = (getattr(module, name, None) for name in ("layer_name", "prefix"))
    found = (name for name in (*names, path) if name in records)
    name = next(found, None)
    return None if name is None else records.pop(name)


def _size(tensors: dict[str, Tensor], record: LayerRecord | None) -> tuple[int, int]:
    """Number of weights, without biases, and bytes, with biases; by the record if there is one."""
    if record is None:
        weights = (t.numel() for name, t in tensors.items() if "bias" not in name)
        return sum(weights), sum(t.nbytes for t in tensors.values())
    beside = sum(t.nbytes for name, t in tensors.items() if "bias" in name)
    return record.elements, record.weight_bytes + beside


def _kind(module: nn.Module) -> str:
    for kind, classes in _KINDS.items():
        if isinstance(module, classes):
            return kind
    is_norm = any("Norm" in each.__name__ for each in type(module).__mro__)
    return NORMS if is_norm else OTHERS
