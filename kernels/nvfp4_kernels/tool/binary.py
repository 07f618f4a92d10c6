"""Reader of the resources recorded in a GPU binary: registers, local and shared memory, threads.

A compiled kernel is a *fat binary*, a container of images, one of which is the *cubin*, an ELF
file. The ``.nv.info`` sections hold attributes; CUDA's ``cuobjdump -elf`` shows their names.
"""

import struct
from dataclasses import dataclass

FAT_MAGIC = struct.pack("<I", 0xBA55ED50)
_FAT_HEADER = struct.Struct("<IHHQ")  # magic, version, own size, bytes that follow
_IMAGE = struct.Struct("<HHIQ")  # kind, version, own size, payload's size
_ELF_IMAGE = 2
_SECTION = struct.Struct("<IIQQQQIIQQ")
_SYMBOL = struct.Struct("<IBBHQQ")
_NOBITS = 8  # a section that takes room in memory alone
# Attributes, and the form of attributes with a string of bytes.
_REGISTERS, _FRAME, _THREADS = 0x2F, 0x11, 0x10
_SIZED = 4


class UnreadableBinary(ValueError):
    """GPU binary of an unexpected form."""


@dataclass(frozen=True)
class Cubin:
    """Resource usage of one kernel, as its cubin records it.

    Attributes:
        image: the ELF file.
        kernel: name of the kernel.
        registers: registers per thread.
        local_bytes: local memory per thread: the stack frame, including register spills.
        shared_bytes: static shared memory per CTA.
        threads: threads per CTA that the kernel requires; 0 if not recorded.
        code_bytes: size of the machine code.
    """

    image: bytes
    kernel: str
    registers: int
    local_bytes: int
    shared_bytes: int
    threads: int
    code_bytes: int


def read_fat_binary(data: bytes) -> Cubin:
    """Read the only kernel of a fat binary.

    Raises:
        UnreadableBinary: not a fat binary, or not exactly one image of one kernel.
    """
    if data[:4] != FAT_MAGIC:
        raise UnreadableBinary(
            f"fat binary: starts with {data[:4].hex()!r}, must be {FAT_MAGIC.hex()!r}; read one "
            "that cute.compile made"
        )
    _, _, at, nbytes = _FAT_HEADER.unpack_from(data)
    end, images = at + nbytes, []
    while at < end:
        kind, _, header, payload = _IMAGE.unpack_from(data, at)
        if kind == _ELF_IMAGE:
            images.append(data[at + header : at + header + payload])
        at += header + payload
    if len(images) != 1:
        raise UnreadableBinary(f"fat binary: has {len(images)} cubins, must have one")
    return read_cubin(images[0])


def read_cubin(image: bytes) -> Cubin:
    """Read the only kernel of a cubin.

    Raises:
        UnreadableBinary: not an uncompressed ELF file, or not exactly one kernel.
    """
    if image[:4] != b"\x7fELF":
        raise UnreadableBinary(
            f"cubin: starts with {image[:4].hex()!r}, must be an ELF file; compile it uncompressed"
        )
    sections = _sections(image)
    kernels = [name.removeprefix(".text.") for name in sections if name.startswith(".text.")]
    if len(kernels) != 1:
        raise UnreadableBinary(f"cubin: has {len(kernels)} kernels, must have one")
    (kernel,) = kernels
    of_all = _attributes(sections[".nv.info"][1])
    own = _attributes(sections.get(f".nv.info.{kernel}", (0, b""))[1])
    symbol = _symbols(image, sections).index(kernel)
    return Cubin(
        image=image,
        kernel=kernel,
        registers=_of_symbol(of_all, _REGISTERS, symbol),
        local_bytes=_of_symbol(of_all, _FRAME, symbol),
        shared_bytes=sections.get(f".nv.shared.{kernel}", (0, b""))[0],
        threads=next((struct.unpack_from("<I", v)[0] for k, v in own if k == _THREADS), 0),
        code_bytes=sections[f".text.{kernel}"][0],
    )


def _sections(image: bytes) -> dict[str, tuple[int, bytes]]:
    """Size and contents of each ELF section, by name."""
    (at,) = struct.unpack_from("<Q", image, 0x28)
    size, count, names = struct.unpack_from("<HHH", image, 0x3A)
    headers = [_SECTION.unpack_from(image, at + n * size) for n in range(count)]
    strings = headers[names][4]
    found = {}
    for name, kind, _, _, start, nbytes, *_ in headers:
        contents = b"" if kind == _NOBITS else image[start : start + nbytes]
        found[_string(image, strings + name)] = nbytes, contents
    return found


def _symbols(image: bytes, sections: dict[str, tuple[int, bytes]]) -> list[str]:
    table, strings = sections[".symtab"][1], sections[".strtab"][1]
    return [
        _string(strings, _SYMBOL.unpack_from(table, at)[0])
        for at in range(0, len(table), _SYMBOL.size)
    ]


def _string(data: bytes, at: int) -> str:
    return data[at : data.index(b"\0", at)].decode()


def _attributes(data: bytes) -> list[tuple[int, bytes]]:
    """Number and value of each attribute in a ``.nv.info`` section."""
    found, at = [], 0
    while at < len(data):
        form, number, value = struct.unpack_from("<BBH", data, at)
        at += 4
        nbytes = value if form == _SIZED else 0
        found.append((number, data[at : at + nbytes] if nbytes else struct.pack("<H", value)))
        at += nbytes
    return found


def _of_symbol(attributes: list[tuple[int, bytes]], number: int, symbol: int) -> int:
    """Value of attribute ``number`` for ``symbol``; its contents are two words: symbol, value."""
    for each, data in attributes:
        if each == number and len(data) == 8:
            index, value = struct.unpack("<II", data)
            if index == symbol:
                return int(value)
    raise UnreadableBinary(f"cubin: has no attribute {number:#x} for its kernel")
