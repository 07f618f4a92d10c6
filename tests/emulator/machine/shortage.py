"""Report on tensor memory in a deadlock: which CTAs hold the awaited columns, and the remedy."""

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from tests.emulator.memory.columns import find_columns
from tests.emulator.tcgen05.tensor_memory_layout import COLUMNS

if TYPE_CHECKING:
    from tests.emulator.machine.cta import Cluster, Cta
    from tests.emulator.memory.tensor import TensorMemory


def shortages(clusters: "Iterable[Cluster]") -> list[str]:
    """Report lines: one for each CTA that waits in tcgen05.alloc, and one for each remedy."""
    lines: list[str] = []
    for cluster in clusters:
        for cta in cluster.ctas:
            if cta.tensor.wanted:
                lines += _shortage(cta.tensor, [peer.tensor for peer in _group(cta.tensor)])
    return list(dict.fromkeys(lines))


def _group(asking: "TensorMemory") -> "list[Cta]":
    """CTAs that allocate together with the CTA of ``asking``."""
    cta = asking.cta
    if cta.launch.cta_group == 1:
        return [cta]
    rank = cta.rank & ~1
    return cta.cluster.ctas[rank : rank + 2]


def _shortage(asking: "TensorMemory", together: "list[TensorMemory]") -> "Iterator[str]":
    for own in together:
        table = own.table
        held = ", ".join(
            f"[{start}, {start + columns}) by {holder.cta.name}{_state(holder)}"
            for start, (columns, holder) in sorted(table.holders.items())
        )
        yield (
            f"{asking.cta.name} wants {asking.wanted} columns of tensor memory; of {COLUMNS} of "
            f"{own.cta.name}'s SM are held: {held or 'none'}"
        )
        others = {id(h): h for _, h in table.holders.values() if h not in together}
        if not table.may_allocate(own) and table.permit is not None:
            holder = table.permit
            yield f"{holder.cta.name} keeps the permit to allocate"
            others[id(holder)] = holder
        for holder in others.values():
            yield f"remedy: {_remedy(own, holder)}"
        if not others:
            yield "remedy: allocate once, no more columns than there are"


def _state(holder: "TensorMemory") -> str:
    if not holder.cta.alive:
        return ", which has exited"
    return f", which wants {holder.wanted} more" if holder.wanted else ""


def _remedy(asking: "TensorMemory", holder: "TensorMemory") -> str:
    mine, theirs = asking.cta.launch, holder.cta.launch
    if not holder.cta.alive:
        return f"tcgen05.dealloc before {holder.cta.name} exits"
    if asking.table.permit is holder and find_columns([asking.table], asking.wanted) is not None:
        return (
            f"in {theirs.program.kernel.name}, execute tcgen05.relinquish_alloc_permit after the "
            "last allocation"
        )
    if theirs.link.number > mine.link.number:
        name, later = mine.program.kernel.name, theirs.program.kernel.name
        return (
            f"in {name}, allocate before griddepcontrol.launch_dependents: {later} starts after "
            f"that, may allocate first and hold it until {name} has ended; or in {later}, allocate "
            "after griddepcontrol.wait"
        )
    if holder.wanted:
        return "allocate once all that a CTA needs: each holds what the other one waits for"
    return f"let {holder.cta.name} end without waiting for {asking.cta.name}"
