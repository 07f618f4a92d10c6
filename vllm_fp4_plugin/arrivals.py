"""Tensors of a checkpoint that arrive in a model: what a refusal calls them, and their file."""

from collections.abc import Iterable, Iterator
from types import TracebackType
from typing import NamedTuple, Self

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from vllm_fp4_plugin import checkpoint_files


class Checkpoint(NamedTuple):
    """Checkpoint that tensors come from.

    Attributes:
        source: its directory, or its name on the hub.
        revision: branch, tag or commit of the latter.
        cache: directory of the hub's cache; None: the hub's own.
    """

    source: str
    revision: str | None = None
    cache: str | None = None

    def file_of(self, tensor: str) -> str:
        """File that a tensor is in; the checkpoint, if it is in none that is here."""
        directory = checkpoint_files.local_directory(*self)
        headers = {} if directory is None else checkpoint_files.read_headers(directory)
        return str(headers[tensor].file) if tensor in headers else self.source


class Source(NamedTuple):
    """Tensor of a checkpoint.

    Attributes:
        checkpoint: what it is of.
        name: its name there.
        shape: its shape there.
    """

    checkpoint: Checkpoint
    name: str
    shape: tuple[int, ...]

    @property
    def file(self) -> str:
        """File that the tensor is in; the checkpoint, if its files are not here."""
        return self.checkpoint.file_of(self.name)

    def __str__(self) -> str:
        return f"{self.file}: {self.name}"


class Arrivals:
    """Record of the tensors that a model is given, while it is entered.

    Args:
        checkpoint: what they come from.

    Attributes:
        last: tensor that the model asked for last; None: there is none, or the model has them all.
        names: all that came.
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint
        self.last: Source | None = None
        self.names: list[str] = []
        # A reference keeps the identity of a storage from being another's, not its memory.
        self._by_storage: dict[int, tuple[StorageWeakRef, Source | None]] = {}

    def __enter__(self) -> Self:
        _UNDER_WAY.append(self)
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        _UNDER_WAY.remove(self)

    def follow(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Yield tensors, and note each before the model has it."""
        for name, tensor in weights:
            source = Source(self._checkpoint, name, tuple(tensor.shape))
            reference = StorageWeakRef(tensor.untyped_storage())
            is_shared = reference.cdata in self._by_storage
            self._by_storage[reference.cdata] = reference, None if is_shared else source
            self.names.append(name)
            self.last = source
            yield name, tensor
        self.last = None  # a model that gathers them first is at none of them from here on

    def seen_by(self, tensor: Tensor) -> Source | None:
        """Tensor of the checkpoint that a tensor is a view of."""
        _, source = self._by_storage.get(tensor.untyped_storage()._cdata, (None, None))
        return source


_UNDER_WAY: list[Arrivals] = []


def source_of(tensor: Tensor) -> Source | None:
    """Tensor of the checkpoint that a layer is given: seen by ``tensor``, or the last that came."""
    if not _UNDER_WAY:
        return None
    return _UNDER_WAY[-1].seen_by(tensor) or _UNDER_WAY[-1].last
