"""Checkpoint tensors received by a model, with their names and files for error messages."""

import math
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from vllm_fp4_plugin.checkpoint import files as checkpoint_files

_COPIES = (torch.ops.aten.clone, torch.ops.aten._to_copy)


class Checkpoint(NamedTuple):
    """Checkpoint that tensors are loaded from.

    Attributes:
        source: directory, or name on the hub.
        revision: branch, tag or commit on the hub.
        cache: directory of the hub's cache; None: the default directory.
    """

    source: str
    revision: str | None = None
    cache: str | None = None

    def file_of(self, tensor: str) -> str:
        """Path of the file that holds a tensor; ``source`` if no local file holds the tensor."""
        directory = checkpoint_files.local_directory(*self)
        headers = {} if directory is None else checkpoint_files.read_headers(directory)
        return str(headers[tensor].file) if tensor in headers else self.source


class Source(NamedTuple):
    """Tensor of a checkpoint.

    Attributes:
        checkpoint: checkpoint that holds the tensor.
        name: name in the checkpoint.
        shape: shape in the checkpoint.
    """

    checkpoint: Checkpoint
    name: str
    shape: tuple[int, ...]

    @property
    def file(self) -> str:
        """Path of the file that holds the tensor; ``checkpoint.source`` if no local file does."""
        return self.checkpoint.file_of(self.name)

    def __str__(self) -> str:
        return f"{self.file}: {self.name}"


class Arrivals(TorchDispatchMode):
    """Dispatch mode that records the tensors a model receives, and the tensors made from them.

    Args:
        checkpoint: checkpoint that the tensors come from.

    Attributes:
        last: tensor that the model requested last; None before the first and after the last tensor.
        names: names of all tensors requested so far.
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        super().__init__()
        self._checkpoint = checkpoint
        self.last: Source | None = None
        self.names: list[str] = []
        # The weak reference stops the id of a storage from being reused, without keeping its
        # memory.
        self._by_storage: dict[int, tuple[StorageWeakRef, Source | None]] = {}
        self._made: dict[int, tuple[StorageWeakRef, Source]] = {}
        self._read: dict[Source, tuple[int, tuple[int, ...]]] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Whether torch must disable dynamo around each call: no, as a load is never compiled."""
        return False

    def __enter__(self) -> Self:
        _UNDER_WAY.append(self)
        super().__enter__()
        return self

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)
        _UNDER_WAY.remove(self)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and not func._schema.is_mutable:
            given = [self.seen_by(tensor) for tensor in args if isinstance(tensor, Tensor)]
            sources = {source for source in given if source is not None}
            if len(sources) == 1 and self.seen_by(result) is None:
                self._note_made(result, sources.pop(), is_copy=func.overloadpacket in _COPIES)
        return result

    def _note_made(self, tensor: Tensor, source: Source, *, is_copy: bool) -> None:
        reference = StorageWeakRef(tensor.untyped_storage())
        if is_copy and tensor.shape == source.shape:
            self._by_storage[reference.cdata] = reference, source
        else:
            self._made[reference.cdata] = reference, source

    def follow(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Yield ``weights``; record each tensor before the model receives it."""
        for name, tensor in weights:
            source = Source(self._checkpoint, name, tuple(tensor.shape))
            reference = StorageWeakRef(tensor.untyped_storage())
            is_shared = reference.cdata in self._by_storage
            self._by_storage[reference.cdata] = reference, None if is_shared else source
            self.names.append(name)
            self.last = source
            yield name, tensor
        self.last = None  # a model that gathers all tensors first loads an unknown one from here on

    def note_read(self, given: Tensor) -> None:
        """Record a copy from ``given``: a checkpoint tensor, its clone, or a view of either."""
        _, source = self._by_storage.get(given.untyped_storage()._cdata, (None, None))
        if source is not None:
            count, _ = self._read.get(source, (0, ()))
            self._read[source] = count + given.numel(), tuple(given.shape)

    def read_in_part(self) -> Iterator[tuple[Source, tuple[int, ...]]]:
        """Yield the tensors that a model copied only in part, with the shape of the last copy."""
        for source, (count, shape) in self._read.items():
            if 0 < count < math.prod(source.shape):
                yield source, shape

    def seen_by(self, tensor: Tensor) -> Source | None:
        """Checkpoint tensor that ``tensor`` views or is computed from; None: unknown or several."""
        storage = tensor.untyped_storage()._cdata
        _, source = self._by_storage.get(storage) or self._made.get(storage) or (None, None)
        return source


_UNDER_WAY: list[Arrivals] = []


def source_of(tensor: Tensor) -> Source | None:
    """Checkpoint tensor that ``tensor`` comes from; None outside a load.

    If the origin is unknown, the checkpoint tensor that the model requested last.
    """
    if not _UNDER_WAY:
        return None
    return _UNDER_WAY[-1].seen_by(tensor) or _UNDER_WAY[-1].last
