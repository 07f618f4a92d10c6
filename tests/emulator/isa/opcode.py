"""Parser of an opcode, which lets no modifier go unnoticed."""

from collections.abc import Collection
from typing import NoReturn

from tests.emulator.findings import UnknownInstruction


class Opcode:
    """Dot-separated parts of an opcode: a builder takes the parts it knows, then calls finish.

    Attributes:
        text: the opcode as written, for messages.
        family: the first part.
        parts: parts not taken yet, in order.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        self.family, *self.parts = text.split(".")

    def flag(self, name: str) -> bool:
        """Take the modifier ``name``; returns whether the opcode has it."""
        if name not in self.parts:
            return False
        self.parts.remove(name)
        return True

    def choice(self, names: Collection[str], default: str | None = None) -> str:
        """Take the single modifier among ``names``; return ``default`` if the opcode has none."""
        for part in self.parts:
            if part in names:
                self.parts.remove(part)
                return part
        if default is None:
            raise UnknownInstruction(f"{self.text}: needs one of .{' .'.join(names)}")
        return default

    def type(self, names: Collection[str]) -> str:
        """Take the last part, which must be a type among ``names``."""
        if not self.parts or self.parts[-1] not in names:
            last = f".{self.parts[-1]}" if self.parts else "nothing"
            raise UnknownInstruction(f"{self.text}: type {last}, expected .{' .'.join(names)}")
        return self.parts.pop()

    def refuse(self, part: str) -> NoReturn:
        """Raise for a part that this form of the instruction does not have."""
        raise UnknownInstruction(f"{self.text}: .{part} is not modelled for this form")

    def finish(self) -> None:
        """Refuse any part that has not been taken."""
        if self.parts:
            self.refuse(self.parts[0])
