"""Ledger of the tensors loaded for a layer's experts: checks each tensor, and completeness."""

import math
from collections.abc import Callable, Iterable, Iterator
from functools import cached_property
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor
from vllm.config import get_current_vllm_config

from nvfp4_kernels.formats.nvfp4 import BLOCK_SIZE
from vllm_fp4_plugin.checkpoint.arrivals import Source, source_of
from vllm_fp4_plugin.experts.stacks import DOWN, GATE, UP, Part, apart
from vllm_fp4_plugin.formats import TensorNames, UnsupportedCheckpoint


class Form(NamedTuple):
    """Required form of a tensor on disk.

    Attributes:
        dtype: dtype; None: any floating-point dtype.
        columns_per: number of weight columns per column of the tensor (2 for packed data, 16 for
            block scales); None for a scalar or a bias.
        is_bias: whether the tensor has one element per row of the weight.
    """

    dtype: torch.dtype | None
    columns_per: int | None
    is_bias: bool = False

    @property
    def is_number(self) -> bool:
        """Whether the tensor is a scalar."""
        return self.columns_per is None and not self.is_bias


BIAS = "bias"
BIAS_FORM = Form(None, None, is_bias=True)


def nvfp4_forms(names: TensorNames) -> dict[str, Form]:
    """Forms of a projection's tensors, by their names on disk."""
    return {
        names.weight: Form(torch.uint8, 2),
        names.block_scale: Form(torch.float8_e4m3fn, BLOCK_SIZE),
        names.weight_global: Form(torch.float32, None),
        names.input_global: Form(torch.float32, None),
    }


class ExpertLedger:
    """Account of the tensors that the experts of one layer have received.

    Unless vLLM filters weights by rank, every rank receives every expert's tensors, and drops the
    tensors of other ranks' experts.

    Args:
        layer: vLLM's layer of routed experts.
        prefix: name of the layer.
        only_held: whether tensors of other ranks' experts may be missing; those ranks check them.
    """

    def __init__(self, layer: Any, prefix: str, *, only_held: bool = False) -> None:
        self.prefix = prefix
        self._names = {
            GATE: layer.ckpt_gate_proj_name,
            DOWN: layer.ckpt_down_proj_name,
            UP: layer.ckpt_up_proj_name,
        }
        self.shards = tuple(s for s in (GATE, UP) if self._names[s] is not None)
        config = layer.moe_config
        self._count: int = config.num_experts
        self._h: int = config.hidden_dim_unpadded or config.hidden_dim
        self._i: int = config.intermediate_size
        self._row_of = layer._map_global_expert_id_to_local_expert_id
        self._only_held = only_held
        # vLLM can be told to skip the weights, but not the scales, of other ranks' experts.
        self._filtered = get_current_vllm_config().parallel_config.enable_ep_weight_filter
        self._wanted: dict[str, Form | None] = {}
        self._received: dict[tuple[str, int, str], Source | None] = {}
        self._numbers: list[tuple[str, str, Tensor]] = []
        self._complete = False

    def expect(self, tensor: str, form: Form | None = None) -> None:
        """Expect ``tensor`` in ``form`` (None: any) for every projection of every expert."""
        self._wanted[tensor] = form

    def loader(self, inner: Callable[..., Any]) -> Callable[..., Any]:
        """Make a weight loader that splits, records and checks a tensor before calling ``inner``.

        A tensor that stacks experts or projections is split, and each part passed to ``inner``.

        Args:
            inner: loader with the arguments of ``RoutedExperts.weight_loader``.
        """

        # vLLM binds these parameter names.
        def load(
            param: Tensor,
            loaded_weight: Tensor,
            weight_name: str,
            shard_id: str,
            expert_id: int,
            return_success: bool = False,
        ) -> Any:
            tensor = weight_name.rpartition(".")[2].partition("_")[2]
            parts = list(self._apart(tensor, loaded_weight, shard_id, expert_id))
            came = [
                self._take(tensor, part, inner, param, weight_name, return_success)
                for part in parts
            ]
            if len({part.expert for part in parts}) > 1:
                # A stack, of which a model may have picked this rank's experts.
                self._note_all(tensor, {part.shard for part in parts})
            return any(came) if return_success else None

        load.supports_moe_loading = True  # type: ignore[attr-defined]
        return load

    def _apart(self, tensor: str, loaded: Tensor, shard: str, expert: int) -> Iterator[Part]:
        form = self._wanted.get(tensor)
        return apart(
            loaded, shard, expert, is_number=form is not None and form.is_number,
            rows=self._i, shards=self.shards, held=self.local_experts, count=self._count,
        )  # fmt: skip

    def _take(
        self,
        tensor: str,
        part: Part,
        inner: Callable[..., Any],
        param: Tensor,
        weight_name: str,
        return_success: bool,
    ) -> Any:
        self._note(tensor, part.tensor, part.shard, part.expert)
        return inner(param, part.tensor, weight_name, part.shard, part.expert, return_success)

    def number_parameters(self) -> list[Tensor]:
        """Parameters that hold scalars, and that a model may fill directly, without a loader."""
        return [parameter for _, _, parameter in self._numbers]

    def watch(self, part: str, tensor: str, parameter: Tensor) -> None:
        """Register a parameter of scalars; ``note_filled`` records it as received once filled.

        Args:
            part: ``"w13"`` or ``"w2"``.
            tensor: name on disk of the tensor that the parameter holds.
            parameter: one scalar per expert and shard.
        """
        self._numbers.append((part, tensor, parameter))

    def note_filled(self, is_filled: Callable[[Tensor], bool]) -> None:
        """Record as received the scalars of each registered parameter that a model has filled."""
        for part, tensor, parameter in self._numbers:
            if is_filled(parameter):
                self._note_all(tensor, self.shards if part == "w13" else (DOWN,))

    def _note_all(self, tensor: str, shards: Iterable[str]) -> None:
        for key in product([tensor], range(self._count), shards):
            self._received.setdefault(key, None)

    @cached_property
    def local_experts(self) -> list[int]:
        """Global indices of this rank's experts, in the order of their weight rows."""
        rows = {expert: self._row_of(expert) for expert in range(self._count)}
        return sorted((e for e, row in rows.items() if row >= 0), key=lambda expert: rows[expert])

    def projection(self, expert: int, shard: str) -> str:
        """Checkpoint name of a projection of an expert, by its index over the experts of all ranks.

        ``shard``: vLLM's name of the projection.
        """
        return f"{self.prefix}.{expert}.{self._names[shard]}"

    def begin(self) -> None:
        """Start a load: expect every tensor again."""
        self._received.clear()
        self._complete = False

    def missing(self) -> Iterator[str]:
        """Checkpoint names of the expected tensors that have not arrived."""
        for tensor in () if self._complete else self._wanted:
            is_read = not (self._filtered and tensor in ("weight", "weight_packed"))
            for expert in range(self._count):
                if (self._only_held or not is_read) and self._row_of(expert) < 0:
                    continue
                for shard in (*self.shards, DOWN):
                    if (tensor, expert, shard) not in self._received:
                        yield self._name(tensor, expert, shard)

    def check_complete(self) -> None:
        """Raise unless every expected tensor has arrived; none is expected until the next load.

        vLLM may process a layer more than once after a load, and during a reload, which repeats
        the check.
        """
        missing = list(self.missing())
        if missing:
            more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
            raise UnsupportedCheckpoint(
                f"{missing[0]}{more}: not in the checkpoint, every expert of {self.prefix} must "
                "be; if the layer is not quantised, its name must be in the config's ignore list, "
                "otherwise the checkpoint is incomplete, copy or download it again"
            )
        self._complete = True

    def _name(self, tensor: str, expert: int, shard: str) -> str:
        return f"{self.projection(expert, shard)}.{tensor}"

    def _note(self, tensor: str, loaded: Tensor, shard: str, expert: int) -> None:
        if self._complete:
            self.begin()  # a reload that started without a notice
        form, source = self._wanted.get(tensor), source_of(loaded)
        if form is not None:
            self._check(source or self._name(tensor, expert, shard), loaded, shard, form)
        self._received[tensor, expert, shard] = source

    def source(self, tensor: str, row: int, shard: str, *, of_all: bool = False) -> Source | str:
        """Checkpoint tensor from which an expert's tensor came; if unknown, the expected name.

        Args:
            tensor: name on disk.
            row: index of the expert on this rank.
            shard: the projection.
            of_all: whether ``row`` is an index over the experts of all ranks instead.
        """
        expert = row if of_all else self.local_experts[row]
        return self._received.get((tensor, expert, shard)) or self._name(tensor, expert, shard)

    def _check(self, name: Source | str, loaded: Tensor, shard: str, form: Form) -> None:
        if form.dtype is None and not loaded.is_floating_point():
            raise UnsupportedCheckpoint(
                f"{name}: dtype is {_short(loaded.dtype)}, must be a float's; export the "
                "checkpoint again"
            )
        if form.dtype is not None and loaded.dtype != form.dtype:
            raise UnsupportedCheckpoint(
                f"{name}: dtype is {_short(loaded.dtype)}, must be {_short(form.dtype)}; if the "
                "experts are not quantised, their name must be in the config's ignore list"
            )
        if form.is_number:
            if math.prod(loaded.shape) != 1:
                raise UnsupportedCheckpoint(
                    f"{name}: shape is {tuple(loaded.shape)}, must be one number; quantise the "
                    "model again with one global scale per tensor"
                )
            return
        n, k = (self._h, self._i) if shard == DOWN else (self._i, self._h)
        expected = (n,) if form.columns_per is None else (n, k // form.columns_per)
        if tuple(loaded.shape) != expected:
            raise UnsupportedCheckpoint(
                f"{name}: shape is {tuple(loaded.shape)}, must be {expected}; the checkpoint does "
                "not fit the model's config"
            )


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
