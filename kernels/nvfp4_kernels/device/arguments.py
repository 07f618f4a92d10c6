"""Bundles of launch arguments: a ``NamedTuple`` for each kernel, of pointers and host integers."""

from collections.abc import Mapping
from typing import Any, TypeVar, get_args, get_type_hints

import cutlass.cute as cute
from cutlass.cute.runtime import make_ptr

Arguments = TypeVar("Arguments", bound=tuple[Any, ...])

ALIGNMENT = 16  # bytes: what TMA asks of a pointer, and of a thread's widest load


def example(
    bundle: type[Arguments],
    types: Mapping[str, Any],
    alignment: int | Mapping[str, int] = ALIGNMENT,
) -> Arguments:
    """Example of a bundle for ``cute.compile``: a null pointer or a zero in every field.

    Args:
        bundle: a ``NamedTuple`` whose fields are pointers, numbers, tuples of them, or bundles.
        types: element type of each pointer field, by the field's name.
        alignment: of all pointers, in bytes; or of some, by the field's name, the rest having 16.
    """

    def one(name: str, hint: Any) -> Any:
        if hint is cute.Pointer:
            gmem, given = cute.AddressSpace.gmem, alignment
            align = given if isinstance(given, int) else given.get(name, ALIGNMENT)
            return make_ptr(types[name], align, gmem, assumed_align=align)
        if hasattr(hint, "_fields"):
            return example(hint, types, alignment)
        if get_args(hint):
            return tuple(one(name, each) for each in get_args(hint))
        return hint(0)

    return bundle(*(one(name, hint) for name, hint in get_type_hints(bundle).items()))
