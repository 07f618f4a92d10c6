"""Bundles of launch arguments: one ``NamedTuple`` of pointers and numbers per kernel."""

from collections.abc import Collection, Mapping
from typing import Any, TypeVar, get_args, get_type_hints

import cutlass.cute as cute
from cutlass.cute.runtime import make_ptr

Arguments = TypeVar("Arguments", bound=tuple[Any, ...])

ALIGNMENT = 16  # bytes: alignment for TMA, and for a thread's widest load


def example(
    bundle: type[Arguments],
    types: Mapping[str, Any],
    alignment: int | Mapping[str, int] = ALIGNMENT,
    within: str = "",
) -> Arguments:
    """Example of a bundle for ``cute.compile``: null pointers and zeros.

    Args:
        bundle: a ``NamedTuple`` whose fields are pointers, numbers, tuples of them, or bundles.
        types: element type of each pointer field, by field name; for a nested bundle's field whose
            name is ambiguous, by ``"bundle.field"``.
        alignment: alignment of all pointers in bytes, or a mapping from field names to alignments,
            with ``ALIGNMENT`` for all other fields.
        within: prefix in ``types`` and ``alignment`` for a nested bundle: field name and a dot.
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
    """Copy of ``bundle`` in which fields named in ``unread``, also of nested bundles, are None.

    Field names are as in ``example``. Every pointer and number of a bundle is a kernel parameter,
    copied by each launch; None takes no parameter.
    """

    def read(name: str, value: Any) -> Any:
        if name in unread or within + name in unread:
            return None
        return without_unread(value, unread, f"{name}.") if hasattr(value, "_fields") else value

    names = get_type_hints(type(bundle))
    return type(bundle)(*(read(*field) for field in zip(names, bundle, strict=True)))
