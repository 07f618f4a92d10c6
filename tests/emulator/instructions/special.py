"""Special registers (PTX ISA, Special Registers)."""

from typing import TYPE_CHECKING

import numpy as np

from tests.emulator.findings import UnknownInstruction

if TYPE_CHECKING:
    from tests.emulator.codegen import Emitter

_AXES = "xyz"
_LANE = np.arange(32, dtype=np.uint32)
_LANE_CONSTANTS = {
    "%laneid": _LANE,
    "%lanemask_eq": np.uint32(1) << _LANE,
    "%lanemask_lt": (np.uint32(1) << _LANE) - np.uint32(1),
    "%lanemask_le": (np.uint32(2) << _LANE) - np.uint32(1),
    "%lanemask_gt": ~((np.uint32(2) << _LANE) - np.uint32(1)),
    "%lanemask_ge": ~((np.uint32(1) << _LANE) - np.uint32(1)),
}
_SCALARS = {
    "%warpid": "w.index",
    "%nwarpid": "64",
    "%smid": "w.launch.sm_of(w.cta)",
    "%nsmid": "w.gpu.limits.sms",
    "%gridid": "0",
    "%clock": "(w.launch.clock(w) & 0xffffffff)",
    "%clock64": "w.launch.clock(w)",
    "%globaltimer": "w.launch.clock(w)",
    "%globaltimer_lo": "(w.launch.clock(w) & 0xffffffff)",
    "%dynamic_smem_size": "w.launch.dynamic_shared",
    # The total is the allocated size, in units of 128 bytes; the aggregate counts the system's part
    # without rounding (both seen on an H200).
    "%total_smem_size": "(-(-w.launch.shared_bytes // 128) * 128)",
    "%aggr_smem_size": "(w.launch.shared_bytes + (w.cta.shared.base & 0xffffff))",
    "%cluster_ctarank": "w.cta.rank",
    "%cluster_nctarank": "len(w.cta.cluster.ctas)",
    "%is_explicit_cluster": "(len(w.cta.cluster.ctas) > 1)",
}
_VECTORS = {
    "%ntid": "w.launch.block[{axis}]",
    "%ctaid": "w.cta.position[{axis}]",
    "%nctaid": "w.launch.grid[{axis}]",
    "%clusterid": "w.cta.cluster.position[{axis}]",
    "%nclusterid": "(w.launch.grid[{axis}] // w.launch.cluster[{axis}])",
    "%cluster_ctaid": "(w.cta.position[{axis}] % w.launch.cluster[{axis}])",
    "%cluster_nctaid": "w.launch.cluster[{axis}]",
}


def special(e: "Emitter", name: str) -> tuple[str, str]:
    """Expression and numpy type code ("" if uniform) of a special register."""
    if name in _LANE_CONSTANTS:
        return e.constant(_LANE_CONSTANTS[name], name), "u4"
    if name in _SCALARS:
        return _SCALARS[name], ""
    stem, _, axis = name.partition(".")
    if axis in _AXES and axis:
        index = _AXES.index(axis)
        if stem in _VECTORS:
            return _VECTORS[stem].format(axis=index), ""
        if stem == "%tid":
            variable = f"tid_{axis}"
            e.specials.add(f"{variable} = w.thread_index({index})")
            if axis != "x" and e.program.block[0] % 32 == 0:
                return f"int({variable}[0])", ""
            return variable, "u4"
    raise UnknownInstruction(f"special register {name} is not modelled")
