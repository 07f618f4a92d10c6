"""Instruction descriptors of tcgen05.mma, with the types and shapes of each kind.

PTX ISA 9.7.16.2.1 (Table 39, shapes), 9.7.16.4.2 (Tables 42-44, the 32 bits), 9.7.16.10.1 (Tables
51-52, transpose and negate) and 9.7.16.10.7.1 (Tables 56-57, block scales).
"""

from dataclasses import dataclass
from functools import lru_cache

from tests.emulator.findings import IllegalInstruction, UnknownInstruction
from tests.emulator.tcgen05.formats import Element, ScaleFormat

_F8F6F4 = {0: Element.E4M3, 1: Element.E5M2, 3: Element.E2M3, 4: Element.E3M2, 5: Element.E2M1}


# Compared by identity: there is one of each.
@dataclass(frozen=True, slots=True, eq=False)
class Kind:
    """Formats and modifiers that a ``.kind`` accepts, independent of the instruction descriptor.

    Attributes:
        name: name in PTX, without ``kind::``.
        k: depth of one dense instruction.
        operands: element format by descriptor code.
        accumulators: accumulator format by descriptor code.
        transpose, negate: whether the transpose and negate bits may be set.
        scale_input_d: whether the accumulator may be scaled.
        scale_vectors: scales per row by qualifier; empty without block scaling.
        padded: whether sub-byte operands lie in groups of 16 elements padded to 16 bytes.
    """

    name: str
    k: int
    operands: dict[int, Element]
    accumulators: dict[int, Element]
    transpose: bool = True
    negate: bool = True
    scale_input_d: bool = False
    scale_vectors: dict[str | None, int] | None = None
    padded: bool = False

    @property
    def block_scaled(self) -> bool:
        """Whether A and B have block scales."""
        return self.scale_vectors is not None


_F32 = {1: Element.F32}
_F16_F32 = {0: Element.F16, 1: Element.F32}
KINDS = {
    kind.name: kind
    for kind in (
        Kind("f16", 16, {0: Element.F16, 1: Element.BF16}, _F16_F32, scale_input_d=True),
        Kind("tf32", 8, {2: Element.TF32}, _F32, scale_input_d=True),
        Kind("f8f6f4", 32, _F8F6F4, _F16_F32, padded=True),
        Kind("i8", 32, {0: Element.U8, 1: Element.S8}, {2: Element.S32}, negate=False),
        Kind(
            "mxf8f6f4",
            32,
            _F8F6F4,
            _F32,
            scale_vectors={None: 1, "scale_vec::1X": 1, "block32": 1},
            padded=True,
        ),
        Kind(
            "mxf4",
            64,
            {1: Element.E2M1},
            _F32,
            transpose=False,
            scale_vectors={None: 2, "scale_vec::2X": 2, "block32": 2},
        ),
        Kind(
            "mxf4nvf4",
            64,
            {1: Element.E2M1},
            _F32,
            transpose=False,
            scale_vectors={"scale_vec::2X": 2, "block32": 2, "scale_vec::4X": 4, "block16": 4},
        ),
    )
}


# Compared by identity, as a cheap cache key; decode_instruction creates each value once.
@dataclass(frozen=True, slots=True, eq=False)
class MmaInstruction:
    """A legal tcgen05.mma: D[m, n] (+)= A[m, k] @ B[n, k].T.

    Attributes:
        kind: kind of the MMA.
        cta_group: number of CTAs taking part, 1 or 2; m and n count the whole pair.
        weight_stationary: whether the instruction has the ``.ws`` form.
        scales: block scales per row of A and of B; 0 without block scaling.
        scale_id_a, scale_id_b: first used byte of a scale word.
        max_shift: largest column shift of B (``.ws`` only).
    """

    kind: Kind
    cta_group: int
    weight_stationary: bool
    m: int
    n: int
    a: Element
    b: Element
    d: Element
    negate_a: bool = False
    negate_b: bool = False
    transpose_a: bool = False
    transpose_b: bool = False
    saturate: bool = False
    scales: int = 0
    scale_format: ScaleFormat = ScaleFormat.UE8M0
    scale_id_a: int = 0
    scale_id_b: int = 0
    max_shift: int = 0

    @property
    def k(self) -> int:
        """Depth of the instruction."""
        return self.kind.k

    @property
    def a_rows(self) -> int:
        """Number of rows of A that each CTA holds."""
        return self.m // self.cta_group

    @property
    def b_rows(self) -> int:
        """Number of rows of B (columns of D) that each CTA loads; both of a pair use all n."""
        return self.n // self.cta_group


def _names(values: object) -> str:
    return ", ".join(str(value) for value in values)  # type: ignore[attr-defined]


def _shapes(kind: Kind, cta_group: int, weight_stationary: bool) -> tuple[tuple[int, ...], range]:
    """Legal M, and legal N as a range (PTX ISA 9.7.16.2.1, Table 39)."""
    if weight_stationary:
        return (32, 64, 128), range(64, 257, 64)
    if cta_group == 2:
        step = 32 if kind.name == "i8" else 16
        return (128, 256), range(step, 257, step)
    return ((128,) if kind.block_scaled else (64, 128)), range(8, 257, 8)


def _check_shape(instruction: MmaInstruction) -> None:
    kind, m, n = instruction.kind, instruction.m, instruction.n
    ms, ns = _shapes(kind, instruction.cta_group, instruction.weight_stationary)
    form = f"kind::{kind.name}{'.ws' if instruction.weight_stationary else ''}"
    where = f"{form} with cta_group::{instruction.cta_group} (PTX ISA 9.7.16.2.1, Table 39)"
    if m not in ms:
        raise IllegalInstruction(f"M = {m}: accepted are {_names(ms)} for {where}")
    if n not in ns or (instruction.weight_stationary and n == 192):
        accepted = (
            "64, 128, 256" if instruction.weight_stationary else f"{ns[0]} to 256 by {ns.step}"
        )
        raise IllegalInstruction(f"N = {n}: accepted are {accepted} for {where}")
    if kind.name == "i8" and instruction.cta_group == 1 and n > 32 and n % 16:
        raise IllegalInstruction(f"N = {n}: accepted above 32 are multiples of 16 for {where}")
    eight_bit = instruction.b.bits <= 8
    step = 16 * instruction.cta_group
    if instruction.transpose_b and eight_bit and n % step:
        raise IllegalInstruction(
            f"N = {n} with an N-major B of 8-bit type: accepted are multiples of {step} for"
            f" cta_group::{instruction.cta_group} (PTX ISA 9.7.16.10.1, Table 52)"
        )


def _element(formats: dict[int, Element], code: int, which: str, kind: Kind) -> Element:
    if code not in formats:
        accepted = ", ".join(f"{c} ({f.ptx_name})" for c, f in formats.items())
        raise IllegalInstruction(
            f"instruction descriptor: {which} type {code}, accepted are {accepted} for"
            f" kind::{kind.name} (PTX ISA 9.7.16.4.2)"
        )
    return formats[code]


def _check_zero(word: int, mask: int, what: str, why: str) -> None:
    if word & mask:
        raise IllegalInstruction(
            f"instruction descriptor {word:#010x}: {what} must be 0 {why} (PTX ISA 9.7.16.4.2)"
        )


def _scale_count(kind: Kind, scale_vector: str | None) -> int:
    if kind.scale_vectors is None:
        if scale_vector is not None:
            raise IllegalInstruction(
                f"kind::{kind.name} takes no .{scale_vector} (PTX ISA 9.7.16.10.7.1)"
            )
        return 0
    if scale_vector not in kind.scale_vectors:
        accepted = ", ".join(f".{name}" for name in kind.scale_vectors if name)
        given = f".{scale_vector}" if scale_vector else "no scale vector size"
        raise IllegalInstruction(
            f"kind::{kind.name} with {given}: accepted are {accepted}"
            " (PTX ISA 9.7.16.10.7.1, Table 57)"
        )
    return kind.scale_vectors[scale_vector]


def _check_scales(kind: Kind, scales: int, scale: ScaleFormat, ids: tuple[int, int]) -> None:
    if scale is ScaleFormat.UE4M3 and not (kind.name == "mxf4nvf4" and scales == 4):
        raise IllegalInstruction(
            f"kind::{kind.name} with {scales} scales a row: scale format UE4M3, accepted is UE8M0"
            " (PTX ISA 9.7.16.10.7.1, Table 57)"
        )
    accepted = {1: (0, 1, 2, 3), 2: (0, 2), 4: (0,)}[scales]
    for which, scale_id in zip("AB", ids, strict=True):
        if scale_id not in accepted:
            raise IllegalInstruction(
                f"scale factor {which} ID {scale_id}: accepted are {_names(accepted)} with {scales}"
                " scales a row (PTX ISA 9.7.16.10.7.2)"
            )


def _decode_plain(word: int, kind: Kind, cta_group: int, ws: bool) -> MmaInstruction:
    _check_zero(word, 1 << 6 | 1 << 23 | 1 << 29, "reserved bits 6, 23 and 29", "for every kind")
    if kind.name != "i8":
        _check_zero(word, 1 << 3, "saturate (bit 3)", "except for kind::i8")
    if not ws:
        _check_zero(word, 0b11 << 30, "maximum shift (bits 30-31)", "except for .ws")
    d = _element(kind.accumulators, word >> 4 & 0b11, "D", kind)
    a = _element(kind.operands, word >> 7 & 0b111, "A", kind)
    b = _element(kind.operands, word >> 10 & 0b111, "B", kind)
    if d is Element.F16 and Element.BF16 in (a, b):
        raise IllegalInstruction(
            "instruction descriptor: D of type f16 needs A and B of type f16, not bf16"
            " (PTX ISA 9.7.16.2.1, Table 39)"
        )
    shift = word >> 30 & 0b11
    return MmaInstruction(
        kind=kind,
        cta_group=cta_group,
        weight_stationary=ws,
        m=(word >> 24 & 0b11111) << 4,
        n=(word >> 17 & 0b111111) << 3,
        a=a,
        b=b,
        d=d,
        negate_a=bool(word >> 13 & 1),
        negate_b=bool(word >> 14 & 1),
        transpose_a=bool(word >> 15 & 1),
        transpose_b=bool(word >> 16 & 1),
        saturate=bool(word >> 3 & 1),
        max_shift=4 << shift if shift else 0,
    )


def _decode_block_scaled(word: int, kind: Kind, cta_group: int, scales: int) -> MmaInstruction:
    _check_zero(
        word, 1 << 3 | 1 << 6 | 0b111 << 24, "reserved bits 3, 6 and 24-26", "with block scales"
    )
    if word >> 31:
        if kind.k == 64:
            raise IllegalInstruction(
                f"instruction descriptor {word:#010x}: K = 96 (bit 31) needs sm_103a"
                " (PTX ISA 9.7.16.2.1.1)"
            )
        _check_zero(word, 1 << 31, "reserved bit 31", f"for kind::{kind.name}")
    scale = ScaleFormat(word >> 23 & 1)
    ids = word >> 29 & 0b11, word >> 4 & 0b11
    _check_scales(kind, scales, scale, ids)
    return MmaInstruction(
        kind=kind,
        cta_group=cta_group,
        weight_stationary=False,
        m=(word >> 27 & 0b11) << 7,
        n=(word >> 17 & 0b111111) << 3,
        a=_element(kind.operands, word >> 7 & 0b111, "A", kind),
        # Four-bit kinds have two bits for B's type; bit 12 belongs to sparse A.
        b=_element(kind.operands, word >> 10 & (0b11 if kind.k == 64 else 0b111), "B", kind),
        d=Element.F32,
        negate_a=bool(word >> 13 & 1),
        negate_b=bool(word >> 14 & 1),
        transpose_a=bool(word >> 15 & 1),
        transpose_b=bool(word >> 16 & 1),
        scales=scales,
        scale_format=scale,
        scale_id_a=ids[0],
        scale_id_b=ids[1],
    )


@lru_cache(maxsize=1024)
def decode_instruction(
    word: int,
    kind: str,
    *,
    cta_group: int,
    weight_stationary: bool = False,
    scale_vector: str | None = None,
) -> MmaInstruction:
    """Decode an instruction descriptor and check it against the tables.

    Args:
        word: the 32-bit descriptor.
        kind: ``.kind`` without ``kind::``.
        cta_group: 1 or 2.
        weight_stationary: whether the instruction has the ``.ws`` form.
        scale_vector: ``scale_vec::1X`` ... ``block32``, or None where PTX has no such qualifier.

    Raises:
        UnknownInstruction: an unknown kind, or a sparse MMA.
        IllegalInstruction: a combination that the PTX ISA's tables do not list.
    """
    if kind not in KINDS:
        raise UnknownInstruction(f"tcgen05.mma kind::{kind}: known are {_names(KINDS)}")
    what = KINDS[kind]
    if weight_stationary and (cta_group == 2 or what.block_scaled):
        raise IllegalInstruction(
            f"tcgen05.mma.ws with kind::{kind} and cta_group::{cta_group}: .ws takes cta_group::1"
            " and no block scales (PTX ISA 9.7.16.2.1, Table 39)"
        )
    if word >> 2 & 1:
        raise UnknownInstruction(
            f"instruction descriptor {word:#010x} is for sparse A (bit 2); only dense A is modelled"
        )
    _check_zero(word, 0b11, "the sparsity selector (bits 0-1)", "with dense A")
    scales = _scale_count(what, scale_vector)
    instruction = (
        _decode_block_scaled(word, what, cta_group, scales)
        if what.block_scaled
        else _decode_plain(word, what, cta_group, weight_stationary)
    )
    if not what.transpose and (instruction.transpose_a or instruction.transpose_b):
        raise IllegalInstruction(
            f"instruction descriptor {word:#010x}: kind::{kind} takes K-major A and B only"
            " (PTX ISA 9.7.16.10.1, Table 51)"
        )
    if not what.negate and (instruction.negate_a or instruction.negate_b):
        raise IllegalInstruction(
            f"instruction descriptor {word:#010x}: kind::{kind} cannot negate A or B"
            " (PTX ISA 9.7.16.10.1, Table 51)"
        )
    _check_shape(instruction)
    return instruction
