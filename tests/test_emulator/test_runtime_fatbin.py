import ctypes
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.emulator.runtime.fatbin import is_fat_binary, ptx_of, read_image, with_ptx

TEXT = st.text(st.characters(codec="utf-8", exclude_characters="\0"))


def container(*images: tuple[int, bytes, int]) -> bytes:
    """Fat binary of (kind, payload, compressed size) images, as ``fatbinary`` writes it."""
    body = b""
    for kind, payload, compressed in images:
        header = struct.pack("<HHIQI", kind, 0x101, 0x68, len(payload), compressed)
        body += header.ljust(0x68, b"\0") + payload
    return struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(body)) + body


ELF = container((2, b"\x7fELF" + bytes(44), 0))


@given(TEXT)
def test_ptx_comes_back_as_it_went_in(ptx: str) -> None:
    assert ptx_of(with_ptx(ELF, ptx)) == ptx


def test_the_image_before_stays_as_it_is() -> None:
    image = with_ptx(ELF, ".version 9.0")
    assert image[16 : len(ELF)] == ELF[16:]
    assert struct.unpack_from("<Q", image, 8) == (len(image) - 16,)


def test_compressed_ptx_is_not_taken_for_text() -> None:
    with pytest.raises(ValueError, match="no PTX in it; compile the kernel again"):
        ptx_of(container((1, b"squeezed", 8)))


def test_an_image_without_ptx_is_refused() -> None:
    with pytest.raises(ValueError, match="no PTX in it"):
        ptx_of(ELF)


@pytest.mark.parametrize(
    ("data", "message"),
    [(b"\x7fELF" + bytes(60), "starts with magic 0x464c457f"), (b"PED", "3 bytes")],
)
def test_what_is_no_fat_binary_is_refused(data: bytes, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        with_ptx(data, "")
    assert not is_fat_binary(data)


def test_an_image_is_read_to_its_own_end() -> None:
    image = with_ptx(ELF, ".version 9.0")
    memory = ctypes.create_string_buffer(image + b"something else")
    assert read_image(ctypes.addressof(memory)) == image
    assert is_fat_binary(image)
