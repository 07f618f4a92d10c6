"""GPU binaries as CuTe embeds them: a container of images, to which the PTX is added.

Layout of the container, as written by ``fatbinary``: a header of 16 bytes (magic, version, header
size, number of following bytes), then images, each with a header that states the kind, the header
size and the payload size.
"""

import ctypes
import struct

_MAGIC = 0xBA55ED50
_HEADER = struct.Struct("<IHHQ")
_IMAGE = struct.Struct("<HHIQ")
_PTX_HEADER_BYTES = 64
_PTX = 1
# Offset of an image's compressed size; 0 for an uncompressed payload.
_COMPRESSED = struct.Struct("<I")


def _check(data: bytes) -> tuple[int, int]:
    """Size of the header, and number of bytes behind it."""
    if len(data) < _HEADER.size:
        raise ValueError(f"library image: {len(data)} bytes, a fat binary has at least 16")
    magic, version, header, nbytes = _HEADER.unpack_from(data)
    if magic != _MAGIC or version != 1:
        raise ValueError(
            f"library image: starts with magic {magic:#x} version {version}, expected a fat binary "
            f"({_MAGIC:#x} version 1)"
        )
    return header, nbytes


def read_image(address: int) -> bytes:
    """The whole container that starts at ``address`` of this process.

    Raises:
        ValueError: the memory holds no fat binary.
    """
    header, nbytes = _check(ctypes.string_at(address, _HEADER.size))
    return ctypes.string_at(address, header + nbytes)


def is_fat_binary(data: bytes) -> bool:
    return data[:4] == _MAGIC.to_bytes(4, "little")


def with_ptx(image: bytes, ptx: str) -> bytes:
    """Copy of ``image`` with an additional entry that holds ``ptx``."""
    header, nbytes = _check(image)
    text = ptx.encode()
    text += b"\0" * (8 - len(text) % 8)
    entry = _IMAGE.pack(_PTX, 0x101, _PTX_HEADER_BYTES, len(text)).ljust(_PTX_HEADER_BYTES, b"\0")
    body = image[header : header + nbytes]
    return (
        _HEADER.pack(_MAGIC, 1, header, nbytes + len(entry) + len(text))
        + image[_HEADER.size : header]
        + body
        + entry
        + text
    )


def ptx_of(image: bytes) -> str:
    """The PTX that ``image`` holds.

    Raises:
        ValueError: the image holds no PTX: its kernel was compiled before the emulator was
            installed, or elsewhere.
    """
    header, nbytes = _check(image)
    at, end = header, header + nbytes
    while at < end:
        kind, _, size, payload = _IMAGE.unpack_from(image, at)
        if kind == _PTX and not _COMPRESSED.unpack_from(image, at + _IMAGE.size)[0]:
            return image[at + size : at + size + payload].rstrip(b"\0").decode()
        at += size + payload
    raise ValueError(
        "library image: no PTX in it; compile the kernel again after installing the emulator"
    )
