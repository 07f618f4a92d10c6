"""Replay of a recorded call on other tensors."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from nvfp4_kernels.runtime import compile as compiler
from nvfp4_kernels.runtime.recording import Recording

_Results = int | None | tuple["_Results", ...]


class Template:
    """Arguments of a launch, with addresses left open.

    Args:
        arguments: arguments of ``compile.launch``.
        recording: recording of the call with the launch.

    Attributes:
        words: arguments at this level of nesting, 0 for open addresses.
        addresses: position, tensor index and byte offset of each open address.
        parts: position and template of each nested tuple that has open addresses.

    Raises:
        KeyError: a tensor is neither an argument nor an allocation of the call.
    """

    def __init__(self, arguments: tuple[Any, ...], recording: Recording) -> None:
        self.words: list[Any] = []
        self.addresses: list[tuple[int, int, int]] = []
        self.parts: list[tuple[int, Template]] = []
        for place, each in enumerate(arguments):
            word = 0 if each is None else each
            if isinstance(each, Tensor):
                source = recording.source(each)
                if source is None:
                    raise KeyError(place)
                self.addresses.append((place, *source))
                word = 0  # the tensor is not kept
            elif isinstance(each, tuple):
                part = Template(each, recording)
                word = tuple(part.words)
                if part.addresses or part.parts:
                    self.parts.append((place, part))
            self.words.append(word)

    def filled(self, pointers: list[int]) -> tuple[Any, ...]:
        """Arguments of compiled host code, with the open addresses filled in."""
        words = self.words.copy()
        for place, tensor, offset in self.addresses:
            words[place] = pointers[tensor] + offset
        for place, part in self.parts:
            words[place] = part.filled(pointers)
        return tuple(words)

    def tensors(self) -> list[int]:
        """Indices of the tensors whose addresses are open, in order of the arguments."""
        found = [(place, [tensor]) for place, tensor, _ in self.addresses]
        found += [(place, part.tensors()) for place, part in self.parts]
        return [tensor for _, tensors in sorted(found) for tensor in tensors]


class Launch:
    """Launch of a recorded call.

    Args:
        kernel: launched kernel.
        arguments: arguments of the launch.
        recording: recording of the call.

    Attributes:
        kernel: the kernel.

    Raises:
        KeyError: the kernel uses memory that is neither an argument nor an allocation of the call.
    """

    def __init__(self, kernel: Any, arguments: tuple[Any, ...], recording: Recording) -> None:
        self.kernel = kernel
        self._template = Template(arguments, recording)
        self._tensors = self._template.tensors()
        self._hosts: dict[str, Callable[..., None]] = {}  # by target, few

    def start(self, held: list[Any], pointers: list[int]) -> None:
        """Launch the kernel with a call's tensors ``held`` and their addresses ``pointers``."""
        if compiler.watchers:
            tensors = [held[index] for index in self._tensors]
            for watch in compiler.watchers:
                watch(tensors)
        words = self._template.filled(pointers)
        compiler.start(self._host, words, held[self._tensors[0]].device)

    def _host(self, target: str) -> Callable[..., None]:
        host = self._hosts.get(target)
        if host is None:
            host = self._hosts[target] = compiler.compiled(self.kernel, target)
        return host


class Replay:
    """Allocations, launches and results of a recorded call, to be repeated.

    Args:
        recording: recording of the call.
        results: for each result, index of its argument or allocation; None if the result is None.

    Raises:
        KeyError: see ``Launch``.
    """

    def __init__(self, recording: Recording, results: _Results) -> None:
        self._memory: list[tuple[Any, Any, Any]] = [
            (tuple(x.shape), x.stride(), {"dtype": x.dtype, "device": x.device})
            for x in (a.tensor if a.result is None else a.result for a in recording.allocations)
        ]
        self._launches = [Launch(*each, recording) for each in recording.launches]
        self._results = results

    @classmethod
    def of(cls, recording: Recording, result: Any) -> "Replay | None":
        """Replay of a call that returned ``result``; None: the call cannot be replayed."""
        if recording.obstacle or not recording.launches:
            return None
        try:
            return cls(recording, _results(recording, result))
        except KeyError:
            return None

    def run(self, given: tuple[Any, ...], pointers: list[int]) -> Any:
        """Repeat the recorded call.

        Args:
            given: arguments of a call with the same key.
            pointers: addresses of the arguments; addresses of allocations are appended.

        Returns:
            The result of the call, made of ``given`` and of new allocations.
        """
        held = [*given]
        for shape, stride, like in self._memory:
            x = torch.empty_strided(shape, stride, **like)
            pointers.append(x.data_ptr())
            held.append(x)
        for launch in self._launches:
            launch.start(held, pointers)
        return _taken(self._results, held)


def _results(recording: Recording, result: Any) -> _Results:
    """Indices of results among arguments and allocations.

    Raises:
        KeyError: a result is neither an argument nor an allocation.
    """
    if result is None:
        return None
    if isinstance(result, Tensor):
        index = recording.returned(result)
        if index is None:
            raise KeyError
        return index
    if type(result) not in (tuple, list):
        raise KeyError
    return tuple(_results(recording, each) for each in result)


def _taken(results: _Results, held: list[Any]) -> Any:
    if type(results) is int:
        return held[results]
    if isinstance(results, tuple):
        return tuple([_taken(each, held) for each in results])
    return None
