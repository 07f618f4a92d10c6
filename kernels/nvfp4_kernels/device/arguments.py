"""Bundles of launch arguments: a ``NamedTuple`` for each kernel, of pointers and host integers."""

from collections.abc import Collection, Mapping
from typing import Any, TypeVar, get_args, get_type_hints

import cutlass.cute as cute
from cutlass.cute.runtime import make_ptr

Arguments = TypeVar("Arguments", bound=tuple[Any, ...])

ALIGNMENT = 16  # bytes: what TMA asks of a pointer, and of a thread's widest load


def example(
    bundle: type[Arguments],
    types: Mapping[str, Any],
    alignment: int | Mapping[str, int] = ALIGNMENT,
    within: str = "",
) -> Arguments:
    """Example of a bundle for ``cute.compile``: a null pointer or a zero in every field.

    Args:
        bundle: a ``NamedTuple`` whose fields are pointers, numbers, tuples of them, or bundles.
        types: element type of each pointer field, by the field's name; of a field of a bundle
            within, by ``"bundle.field"`` where another one has its name too.
        alignment: bytes that all pointers are multiples of, or those of some by the field's name,
            the others being multiples of ``ALIGNMENT``.
        within: name of the bundle and a dot, in one that holds it.
    """

    def one(name: str, hint: Any) -> Any:
        if hint is cute.Pointer:
            align = alignment
            if not isinstance(align, int):
                align = align.get(within + name, align.get(name, ALIGNMENT))
            kind = types[within + name] if within + name in types else types[name]
            return make_ptr(kind, align, cute.AddressSpace.gmem, assumed_align=align)
        if hasattr(hint, "_fields"):
            return example(hint, types, alignment, f"{name}.")
        if get_args(hint):
            return tuple(one(name, each) for each in get_args(hint))
        return hint(0)

    return bundle(*(one(name, hint) for name, hint in get_type_hints(bundle).items()))


def without_unread(bundle: Arguments, unread: Collection[str], within: str = "") -> Arguments:
    """A bundle for a kernel, with None for the fields, its bundles' too, that it does not read.

    A field is named as in ``example``.

    Every pointer and number of a bundle is a parameter of the kernel, which each launch copies; a
    None is none.
    """

    def read(name: str, value: Any) -> Any:
        if name in unread or within + name in unread:
            return None
        return without_unread(value, unread, f"{name}.") if hasattr(value, "_fields") else value

    names = get_type_hints(type(bundle))
    return type(bundle)(*(read(*field) for field in zip(names, bundle, strict=True)))
