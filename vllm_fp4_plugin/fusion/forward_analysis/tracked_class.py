"""Class through whose methods a query follows a value: methods to read, and uses found so far.

See the package for *value*.
"""

import dis
import inspect
from types import CodeType, FunctionType

from torch.nn import Module

from vllm_fp4_plugin.fusion.forward_analysis.flow import (
    EscapeError,
    Parameter,
    Query,
    Tracked,
    Use,
)
from vllm_fp4_plugin.fusion.module_constants import Constants, builders_of, functions_of

_OF_MODULES = frozenset({*vars(Module()), "__class__", "__dict__"} - {"training"})


class TrackedClass:
    """Class through whose methods the value of a query is followed.

    Args:
        kind: the class.
        constants: instance attributes used in branch conditions, with their values.
        query: query of the analysis.

    Attributes:
        methods: methods to read, in order of discovery.
        uses: uses of the value found so far.
        without: see ``Flow``.
        alone: see ``Flow``.
        arguments: see ``Flow``.
    """

    def __init__(self, kind: type[Module], constants: Constants, query: Query) -> None:
        self.kind = kind
        self.constants = dict(constants)
        self.query = query
        self.producer = query.producer
        self.uses: set[Use] = set()
        self.without: set[str] = set()
        self.alone: set[str] = set()
        self.arguments: set[tuple[Parameter | None, ...]] = set()
        self.methods: dict[FunctionType, None] = {}

    @property
    def name(self) -> str:
        """Name of the class, for messages."""
        return self.kind.__name__

    @property
    def followed(self) -> str:
        """Description of the value for messages."""
        return f"{self.producer}'s result" if self.producer else f"its input {self.query.parameter}"

    def returned(self, arguments: int) -> Tracked | None:
        """Relation of the producer's return value to the followed value; None if unknown.

        ``arguments``: number of arguments of the producer's call.
        """
        if self.query.returns == "norm":
            return {1: Tracked.RESULT, 2: Tracked.PAIR}.get(arguments)
        return Tracked.RESULT if self.query.returns == "result" else Tracked.PAIR

    @property
    def index(self) -> int:
        """Index of the followed value in the pair that the producer returns."""
        return 1 if self.query.returns == "second" else 0

    def start(self) -> None:
        """Add ``forward`` and the methods that mention the submodule to ``methods``.

        Raises:
            EscapeError: the class overrides attribute lookup, or ``__init__`` or a
                method that only ``__init__`` calls does more with the submodule than assign it.
        """
        for name in ("__getattr__", "__getattribute__"):
            if getattr(self.kind, name) is not getattr(Module, name):
                raise EscapeError(f"{self.name} has a {name} of its own")
        self.reach("forward")
        builders = builders_of(self.kind)
        for name, function in functions_of(self.kind):
            code = function.__code__
            if name in builders and self.producer:
                self._check_init(code)
            elif self.producer and self.producer in (*code.co_names, *code.co_consts):
                self.methods[function] = None

    def reach(self, name: str) -> None:
        """Add the method or property ``name``, used in code to be read, to ``methods``.

        Attributes that are neither have no effect.

        Raises:
            EscapeError: the attribute belongs to torch's ``Module``, or is another descriptor.
        """
        member = inspect.getattr_static(self.kind, name, None)
        function = member.fget if isinstance(member, property) else member
        if name in _OF_MODULES or function is getattr(Module, name, self):
            raise EscapeError(f"{self.name} uses torch's Module.{name}")
        if isinstance(function, FunctionType):
            self.methods[function] = None
        elif hasattr(member, "__get__") and not isinstance(member, staticmethod | classmethod):
            raise EscapeError(f"{self.name}.{name} is no plain method")

    def finish(self, stored: set[str]) -> None:
        """Check the class once all methods are read.

        Args:
            stored: attributes that the methods assign to.

        Raises:
            EscapeError: a method replaces the submodule or a consumer, or there is no consumer.
        """
        for name in stored & {self.producer, *(use.attribute for use in self.uses)}:
            raise EscapeError(f"{self.name} replaces its {name} while it runs")
        if not self.uses:
            raise EscapeError(f"{self.name} calls no layer with {self.followed}")

    def _check_init(self, code: CodeType) -> None:
        """Raise if the code of ``__init__`` does more with the submodule than assign it."""
        for step in dis.get_instructions(code):
            # As a constant, the submodule's name only builds the prefix of a layer: harmless.
            if step.argval == self.producer and step.opname not in ("STORE_ATTR", "LOAD_CONST"):
                raise EscapeError(f"{self.name}.__init__ does more than make it")
            if isinstance(step.argval, CodeType):
                self._check_init(step.argval)
