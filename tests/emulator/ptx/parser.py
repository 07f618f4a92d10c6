"""Parser from PTX text to :class:`~tests.emulator.ptx.syntax.Module`."""

import bisect
import re
import struct
from dataclasses import replace

from tests.emulator.findings import PtxSyntaxError, UnknownInstruction, Where
from tests.emulator.ptx.shared_arrays import told
from tests.emulator.ptx.syntax import (
    TYPE_BITS,
    Address,
    Immediate,
    Instruction,
    Kernel,
    Module,
    Not,
    Operand,
    Pair,
    Register,
    Sink,
    Symbol,
    Variable,
    Vector,
)

_SPACE = r"(?:\s+|//[^\n]*|/\*.*?\*/)*"
_TOKEN = re.compile(
    _SPACE
    + r"""(?:(?P<word>[%.$_A-Za-z][\w.$%]*(?:::[\w.$%]*)*)
      |(?P<mark>[@!{}\[\](),;:+\-|<>=])
      |(?P<number>0[fF][0-9a-fA-F]{8}|0[dD][0-9a-fA-F]{16}|0[xX][0-9a-fA-F]+U?|0[bB][01]+U?
                 |\d+\.\d*(?:[eE][+-]?\d+)?|\d+[eE][+-]?\d+|\d+U?)
      |(?P<string>"(?:[^"\\]|\\.)*")
      |\Z)""",
    re.VERBOSE | re.DOTALL,
)
_USED_BYTES = re.compile(r'"used_bytes_mask (?P<mask>\w+)"')
_DIGITS = re.compile(r"%\w*?(\d*)$")


class _Tokens:
    """Token stream of a text, with one token of lookahead."""

    def __init__(self, text: str) -> None:
        self.lines = text.splitlines()
        starts = [0]
        for line in text.splitlines(keepends=True):
            starts.append(starts[-1] + len(line))
        self._starts = starts
        self.items: list[tuple[str, str, int]] = []
        end = 0
        append = self.items.append
        for match in _TOKEN.finditer(text):
            start, stop = match.span()
            if start != end:
                break
            end = stop
            kind = match.lastgroup
            if kind:
                append((kind, match[kind], match.start(kind)))
        if end != len(text):
            space = re.compile(_SPACE, re.DOTALL).match(text, end)
            assert space  # the token may be empty
            end = space.end()
            number = bisect.bisect_right(starts, end)
            raise PtxSyntaxError(
                f"cannot read {text[end : end + 20]!r}", Where("", number, self.lines[number - 1])
            )
        append(("end", "", len(text)))
        self.at = 0

    @property
    def line(self) -> int:
        return bisect.bisect_right(self._starts, self.items[self.at][2])

    def peek(self) -> str:
        return self.items[self.at][1]

    def next(self) -> str:
        token = self.items[self.at][1]
        self.at += 1
        return token

    def accept(self, token: str) -> bool:
        if self.items[self.at][1] == token:
            self.at += 1
            return True
        return False

    def expect(self, token: str) -> None:
        if not self.accept(token):
            raise self.error(f"expected {token!r}, found {self.peek()!r}")

    def error(self, fact: str) -> PtxSyntaxError:
        line = min(self.line, len(self.lines))
        return PtxSyntaxError(fact, Where("", line, self.lines[line - 1] if self.lines else ""))


def parse(text: str) -> Module:
    """Parse a PTX module.

    Raises:
        PtxSyntaxError: the text is not PTX; the message names the line.
        UnknownInstruction: the text uses a directive that is not modelled, such as a device
            function.
    """
    tokens = _Tokens(text)
    module = Module(target="", kernels={}, variables={}, lines=tokens.lines, files={})
    while tokens.peek():
        word = tokens.next()
        if word == ".version":
            tokens.next()
        elif word == ".target":
            module.target = tokens.next()
            while tokens.accept(","):
                tokens.next()
        elif word == ".address_size":
            tokens.next()
        elif word == ".file":
            number = int(tokens.next())
            module.files[number] = tokens.next().strip('"')
            while tokens.accept(","):
                tokens.next()
        elif word in (".visible", ".weak", ".extern", ".common", ".alias", ".blocksareclusters"):
            continue
        elif word == ".entry":
            kernel = _kernel(tokens)
            module.kernels[kernel.name] = kernel
        elif word in (".shared", ".global", ".const"):
            variable = _variable(tokens, word[1:])
            module.variables[variable.name] = variable
        elif word == ".func":
            _declared_function(tokens)
        elif word == ".section":
            _skip_section(tokens)
        elif word == ".pragma":
            tokens.next()
            tokens.expect(";")
        else:
            tokens.at -= 1
            raise tokens.error(f"unknown directive {word!r}")
    for name, arrays in told(text).items():
        module.kernels[name].shared_arrays = arrays
    return module


def _declared_function(tokens: _Tokens) -> None:
    """Parse a prototype such as vprintf's; bodies are refused, as CuTe DSL inlines everything."""
    line = tokens.line
    while tokens.peek() not in (";", "{", ""):
        tokens.next()
    if not tokens.accept(";"):
        where = Where("", line, tokens.lines[line - 1])
        raise UnknownInstruction("device functions (.func with a body) are not modelled", where)


def _skip_section(tokens: _Tokens) -> None:
    """Skip a debug section, which holds no code."""
    while not tokens.accept("{"):
        tokens.next()
    depth = 1
    while depth:
        depth += {"{": 1, "}": -1}.get(tokens.next(), 0)


def _dimensions(tokens: _Tokens) -> tuple[int, int, int]:
    values = [int(tokens.next())]
    while tokens.accept(","):
        values.append(int(tokens.next()))
    return (*values, *[1] * (3 - len(values)))  # type: ignore[return-value]


def _variable(tokens: _Tokens, space: str) -> Variable:
    """Parse a declaration from behind its space: ``.align 4 .b8 name[16] = {...};``."""
    align, width = 1, 0
    while tokens.peek().startswith("."):
        word = tokens.next()
        if word == ".align":
            align = int(tokens.next())
        elif word[1:] in TYPE_BITS:
            width = max(TYPE_BITS[word[1:]] // 8, 1)
            align = max(align, width)
        elif word in (".ptr", ".global", ".shared", ".const", ".local", ".attribute"):
            continue
        else:
            tokens.at -= 1
            raise tokens.error(f"unknown declaration {word!r}")
    name = tokens.next()
    count = 1
    while tokens.accept("["):
        count = 0 if tokens.peek() == "]" else count * int(tokens.next())
        tokens.expect("]")
    initial = _initialiser(tokens, width, count * width) if tokens.accept("=") else None
    if space != "param":
        tokens.expect(";")
    return Variable(name, space, count * width, align, initial)


def _initialiser(tokens: _Tokens, width: int, nbytes: int) -> bytes:
    values: list[int] = []
    depth = 0
    while True:
        token = tokens.next()
        depth += {"{": 1, "}": -1}.get(token, 0)
        if token[0].isdigit():
            values.append(_number(token).value & (1 << 8 * width) - 1)
        elif token not in "{},":
            tokens.at -= 1
            raise tokens.error(f"initialiser {token!r} is not a number")
        if depth == 0:
            break
    return b"".join(v.to_bytes(width, "little") for v in values).ljust(nbytes, b"\0")


def _kernel(tokens: _Tokens) -> Kernel:
    kernel = Kernel(tokens.next())
    if tokens.accept("("):
        while not tokens.accept(")"):
            tokens.expect(".param")
            kernel.parameters.append(_variable(tokens, "param"))
            tokens.accept(",")
    while not tokens.accept("{"):
        word = tokens.next()
        if word == ".reqntid":
            kernel.required_block = _dimensions(tokens)
        elif word == ".maxntid":
            x, y, z = _dimensions(tokens)
            kernel.max_block = x * y * z
        elif word == ".reqnctapercluster":
            kernel.required_cluster = _dimensions(tokens)
        elif word == ".maxnreg":
            kernel.max_registers = int(tokens.next())
        elif word == ".minnctapersm":
            kernel.min_ctas = int(tokens.next())
        elif word == ".maxclusterrank":
            tokens.next()
        elif word in (".explicitcluster", ".blocksareclusters", ".noreturn"):
            continue
        elif word == ".pragma":
            tokens.next()
            tokens.expect(";")
        else:
            tokens.at -= 1
            raise tokens.error(f"unknown kernel directive {word!r}")
    try:
        _Body(tokens, kernel).read()
    except (PtxSyntaxError, UnknownInstruction) as error:
        if error.where is not None and not error.where.kernel:
            error.where = replace(error.where, kernel=kernel.name)
        raise
    return kernel


def _used_parts(load: Instruction, used: int) -> list[Instruction]:
    """Loads of the vector elements with any used byte; ``used`` has one bit per byte.

    The compiler may load a whole vector to use a part of it, even past the end of an array, and
    marks the used part by a pragma (PTX ISA, used_bytes_mask). Nothing reads the other registers of
    the vector.
    """
    target, source = load.operands[0], load.operands[1]
    width = TYPE_BITS[load.parts[-1]] // 8
    if not isinstance(target, Vector) or not isinstance(source, Address):
        return [load]
    opcode = ".".join(part for part in load.parts if part not in ("v2", "v4", "v8"))
    return [
        replace(
            load,
            opcode=opcode,
            parts=tuple(opcode.split(".")),
            operands=(item, replace(source, offset=source.offset + n * width), *load.operands[2:]),
        )
        for n, item in enumerate(target.items)
        if used >> n * width & (1 << width) - 1
    ]


class _Body:
    """Parser of a kernel's statements. Braces open scopes with private register names."""

    def __init__(self, tokens: _Tokens, kernel: Kernel) -> None:
        self.tokens = tokens
        self.kernel = kernel
        self.scopes: list[dict[str, str]] = [{}]
        self.opened = 0
        self.scope_starts: list[tuple[int, int, list[str]]] = [(0, 0, [])]
        self.call_parameters: set[str] = set()
        self.source = -1
        self.source_index: dict[tuple[int, int], int] = {}
        self.used_bytes: int | None = None  # used_bytes_mask of the next load

    def read(self) -> None:
        tokens, kernel = self.tokens, self.kernel
        while True:
            token = tokens.peek()
            if token == "{":
                tokens.next()
                self.opened += 1
                self.scopes.append({})
                self.scope_starts.append((len(kernel.body), self.opened, []))
            elif token == "}":
                tokens.next()
                self._close_scope()
                if not self.scopes:
                    return
            elif token == "":
                raise tokens.error(f"kernel {kernel.name} does not end")
            elif token[0] == ".":
                self._directive(tokens.next())
            elif tokens.items[tokens.at + 1][1] == ":":
                self._label(tokens.next())
                tokens.next()
            else:
                self._instruction()

    def _label(self, name: str) -> None:
        """Define a label; a label inside of a scope is visible only there, under a unique name."""
        _, number, labels = self.scope_starts[-1]
        if number:
            labels.append(name)
            name = f"{name}.{number}"
        if name in self.kernel.labels:
            raise self.tokens.error(f"label {name} is defined twice")
        self.kernel.labels[name] = len(self.kernel.body)

    def _close_scope(self) -> None:
        self.scopes.pop()
        start, number, labels = self.scope_starts.pop()
        if not labels:
            return
        body = self.kernel.body
        for index in range(start, len(body)):
            operands = tuple(
                Symbol(f"{o.name}.{number}", o.offset)
                if isinstance(o, Symbol) and o.name in labels
                else o
                for o in body[index].operands
            )
            if operands != body[index].operands:
                body[index] = replace(body[index], operands=operands)

    def _directive(self, word: str) -> None:
        tokens = self.tokens
        if word == ".reg":
            kind = tokens.next()[1:]
            while True:
                name = tokens.next()
                if tokens.accept("<"):
                    count = int(tokens.next())
                    tokens.expect(">")
                    for index in range(count):
                        self._declare(f"{name}{index}", kind)
                else:
                    self._declare(name, kind)
                if not tokens.accept(","):
                    break
            tokens.expect(";")
        elif word == ".loc":
            self._location()
        elif word in (".shared", ".local"):
            self.kernel.variables.append(_variable(tokens, word[1:]))
        elif word == ".param":
            self._call_parameter()
        elif word == ".pragma":
            found = _USED_BYTES.match(tokens.next())
            self.used_bytes = int(found["mask"], 0) if found else None
            tokens.expect(";")
        else:
            tokens.at -= 1
            raise tokens.error(f"unknown directive {word!r} in a kernel's body")

    def _declare(self, name: str, kind: str) -> None:
        if kind not in TYPE_BITS:
            raise self.tokens.error(f"register type .{kind} is not one of {sorted(TYPE_BITS)}")
        inner = name if len(self.scopes) == 1 else f"{name}.{self.opened}"
        self.scopes[-1][name] = inner
        self.kernel.registers[inner] = kind

    def _call_parameter(self) -> None:
        """Declare a call's parameter or result: a register that st.param and ld.param move."""
        variable = _variable(self.tokens, "param")
        self.tokens.expect(";")
        if variable.nbytes not in (4, 8):
            raise self._unknown(
                f"call parameter {variable.name} of {variable.nbytes} bytes is not modelled, "
                "4 and 8 are"
            )
        self._declare(variable.name, f"b{8 * variable.nbytes}")
        self.call_parameters.add(self._name(variable.name))

    def _call(self) -> tuple[Operand, ...]:
        """``(results), function, (arguments)`` as a vector, a symbol and a vector."""
        tokens = self.tokens
        found = self._parameter_list() if tokens.peek() == "(" else Vector(())
        tokens.accept(",")
        function = Symbol(tokens.next())
        arguments = self._parameter_list() if tokens.accept(",") else Vector(())
        if tokens.peek() != ";":
            raise self._unknown(f"call of {function.name} through a pointer is not modelled")
        return found, function, arguments

    def _parameter_list(self) -> Vector:
        tokens = self.tokens
        items = []
        tokens.expect("(")
        while not tokens.accept(")"):
            items.append(self._operand())
            tokens.accept(",")
        return Vector(tuple(items))

    def _move_of_parameter(self, opcode: str, operands: list[Operand]) -> tuple[str, list[Operand]]:
        """Plain move in place of st.param to or ld.param from a call parameter; else unchanged."""
        place = 0 if opcode.startswith("st.") else 1
        address = operands[place]
        if not isinstance(address, Address) or not isinstance(address.start, Register):
            return opcode, operands
        name = address.start.name
        if name not in self.call_parameters:
            return opcode, operands
        kind = self.kernel.registers[name]
        if address.offset or TYPE_BITS.get(opcode.split(".")[-1]) != TYPE_BITS[kind]:
            raise self._unknown(f"{opcode} of a part of call parameter {name} is not modelled")
        return f"mov.{kind}", [*operands[:place], address.start, *operands[place + 1 :]]

    def _unknown(self, fact: str) -> UnknownInstruction:
        line = self.tokens.line
        return UnknownInstruction(fact, Where(self.kernel.name, line, self.tokens.lines[line - 1]))

    def _location(self) -> None:
        tokens = self.tokens
        number, line = int(tokens.next()), int(tokens.next())
        tokens.next()
        while tokens.accept(","):
            # , function_name SYMBOL+OFFSET, inlined_at FILE LINE COLUMN
            if tokens.next() == "function_name":
                tokens.next()
                if tokens.accept("+"):
                    tokens.next()
            else:
                for _ in range(3):
                    tokens.next()
        place = (number, line)
        if place not in self.source_index:
            self.source_index[place] = len(self.kernel.sources)
            self.kernel.sources.append(place)
        self.source = self.source_index[place]

    def _instruction(self) -> None:
        tokens = self.tokens
        line = tokens.line
        guard, negated = None, False
        if tokens.accept("@"):
            negated = tokens.accept("!")
            guard = self._name(tokens.next())
        opcode = tokens.next()
        operands: list[Operand] = []
        if opcode.split(".")[0] == "call":
            operands += self._call()
        while not tokens.accept(";"):
            operands.append(self._operand())
            if not tokens.accept(",") and tokens.peek() != ";":
                raise tokens.error(f"expected ',' or ';', found {tokens.peek()!r}")
        if opcode.startswith(("st.param", "ld.param")):
            opcode, operands = self._move_of_parameter(opcode, operands)
        instruction = Instruction(
            opcode, tuple(opcode.split(".")), tuple(operands), guard, negated, line, self.source
        )
        used, self.used_bytes = self.used_bytes, None
        self.kernel.body += [instruction] if used is None else _used_parts(instruction, used)

    def _name(self, name: str) -> str:
        for scope in reversed(self.scopes):
            if name in scope:
                return scope[name]
        return name

    def _operand(self) -> Operand:
        tokens = self.tokens
        if tokens.accept("{"):
            items = []
            while not tokens.accept("}"):
                items.append(self._operand())
                tokens.accept(",")
            return Vector(tuple(items))
        if tokens.accept("["):
            return self._address()
        if tokens.accept("!"):
            return Not(Register(self._name(tokens.next())))
        first = self._atom()
        if tokens.accept("|"):
            return Pair(first, self._atom())
        return first

    def _atom(self) -> Operand:
        tokens = self.tokens
        kind, token, _ = tokens.items[tokens.at]
        if token == "-" or kind == "number":
            sign = -1 if tokens.accept("-") else 1
            literal = _number(tokens.next())
            return Immediate(sign * literal.value, literal.bits)
        if kind != "word":
            raise tokens.error(f"{token!r} is not an operand")
        tokens.next()
        if token == "_":
            return Sink()
        name = self._name(token)
        if name in self.kernel.registers or token[0] == "%":
            return Register(name)
        if tokens.peek() in "+-" and tokens.peek():
            sign = -1 if tokens.next() == "-" else 1
            return Symbol(token, sign * _number(tokens.next()).value)
        return Symbol(token)

    def _address(self) -> Address:
        tokens = self.tokens
        start = self._atom()
        offset = 0
        if isinstance(start, Symbol):
            start, offset = Symbol(start.name), start.offset
        coordinates: tuple[Operand, ...] = ()
        while not tokens.accept("]"):
            if tokens.accept("+"):
                sign = -1 if tokens.accept("-") else 1
                offset += sign * _number(tokens.next()).value
            elif tokens.accept("-"):
                offset -= _number(tokens.next()).value
            else:
                tokens.expect(",")
                inner = self._operand()
                coordinates = inner.items if isinstance(inner, Vector) else (inner,)
        assert isinstance(start, Register | Symbol | Immediate)
        return Address(start, offset, coordinates)


def _number(token: str) -> Immediate:
    head = token[:2].lower()
    if head == "0f":
        return Immediate(int(token[2:], 16), 32)
    if head == "0d":
        return Immediate(int(token[2:], 16), 64)
    token = token.rstrip("U")
    if head == "0x":
        return Immediate(int(token, 16))
    if head == "0b":
        return Immediate(int(token, 2))
    if "." in token or "e" in token or "E" in token:
        return Immediate(struct.unpack("<Q", struct.pack("<d", float(token)))[0], 64)
    return Immediate(int(token, 8) if len(token) > 1 and token[0] == "0" else int(token))
