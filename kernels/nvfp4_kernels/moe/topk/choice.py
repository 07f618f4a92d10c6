"""Router top-k of one token by a warp: no shared memory, no exchange between warps.

A lane has every 32nd expert's logit or score as an order-preserving integer. ``redux`` finds the
maximum of the lanes' maxima, once per slot. A bfloat16 logit leaves room for the expert in the
integer, which then orders by value first and by expert second.
"""

from dataclasses import dataclass
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Array, Float32, Int32, Int64, Uint8
from cutlass.experimental import primitives as ptx

from nvfp4_kernels.device.math import LOG2_E, exp2, rounded, sigmoid
from nvfp4_kernels.device.types import TYPES
from nvfp4_kernels.moe.router import Router
from nvfp4_kernels.moe.topk.reference import NOT_ZERO

WARP = 32
LOWEST = -(1 << 31)  # below the order of every value
NONE = 1 << 30  # above every expert
LOW_HALF = 0xFFFF
MAGNITUDE = 0x7FFFFFFF


class RouterLogits(NamedTuple):
    """Logits of a batch, in global memory; part of kernels' arguments.

    Attributes:
        logits: [tokens, experts].
        bias: float32 [experts], or null.
        padding: a byte per row, not 0 for rows that are not tokens; or null.
        tokens: number of rows of logits.
    """

    logits: cute.Pointer
    bias: cute.Pointer
    padding: cute.Pointer
    tokens: Int32


LOGITS_TYPES = {"bias": Float32, "padding": Uint8}
LOGITS_ALIGNMENT = {"logits": 2, "bias": 4, "padding": 1}


class Chosen(NamedTuple):
    """Top-k slot of a lane; meaningful only in the first ``top_k`` lanes.

    Attributes:
        id: expert of the lane's slot, -1 for padding.
        expert: expert of the lane's slot, valid for padding too.
        order: order-preserving integer of the expert's score plus bias, or, without a bias, of the
            expert's logit.
        peak: largest logit of all experts.
        total: sum of exp(logit − peak) over all experts; ``peak`` and ``total`` are 0 and 1 unless
            scores or weights are a softmax over all experts.
    """

    id: Int32
    expert: Int32
    order: Int32
    peak: Float32
    total: Float32


@dataclass(frozen=True)
class TokenChoice:
    """Top-k of a token's experts.

    Attributes:
        dtype: dtype of logits, e.g. ``"bfloat16"``.
        experts: number of experts of all ranks.
        router: routing rule.
        biased: whether a bias is added to scores for selection.
    """

    dtype: str
    experts: int
    router: Router
    biased: bool

    @property
    def is_packed(self) -> bool:
        """Whether an order-preserving integer also holds the expert."""
        return self.dtype == "bfloat16" and not self.biased

    def types(self) -> dict[str, type[cutlass.Numeric]]:
        """Element types of ``RouterLogits``."""
        return {"logits": TYPES[self.dtype], **LOGITS_TYPES}

    def choose(self, given: RouterLogits, token: Int32, lane: Int32) -> Chosen:
        """Select a token's experts; lane j returns slot j."""
        first = Int64(token) * self.experts
        # Issue all loads before using the first.
        loaded = [self._load(given, first, each) for each in self._experts(lane)]
        biases = [self._bias(given, each) for each in self._experts(lane)] if self.biased else []
        values = [Float32(value) for value in loaded]
        peak, total = Float32(0.0), Float32(1.0)
        if self.router.scoring == "softmax" and (self.biased or not self.router.renormalize):
            peak = self._peak(lane, values)
            total = self._sum_of_exponentials(lane, values, peak)
        orders = self._orders(lane, values, biases, peak, total)
        if self.router.groups > 1:
            orders = self._within(self._best_groups(lane, orders), lane, orders)
        expert, order = self._best(lane, orders)
        return Chosen(self._unless_padding(given, token, expert), expert, order, peak, total)

    def weigh(self, given: RouterLogits, token: Int32, lane: Int32, chosen: Chosen) -> Float32:
        """Routing weight of this lane's slot; 0 for padding."""
        logit = value_of(chosen.order)
        if self.biased:  # the bias has changed the ordered values
            logit = Float32(self._load(given, Int64(token) * self.experts, chosen.expert))
        weight = self._weight(logit, lane < self.router.top_k, chosen.peak, chosen.total)
        return Float32(cutlass.select_(chosen.id < 0, Float32(0.0), weight))

    def _unless_padding(self, given: RouterLogits, token: Int32, expert: Int32) -> Int32:
        padding = Array(given.padding, shape=(1,))
        is_none = ptx.inline_ptx(
            "mov.b32 {$w0}, 0; @{$r1} ld.global.u8 {$w0}, [{$r0}];",
            write_only_types=[Int32],
            read_only_args=[padding.data_ptr(token), given.padding.toint() != 0],
        )
        return Int32(cutlass.select_(is_none != 0, Int32(-1), expert))

    @property
    def _each(self) -> int:
        """Number of experts per lane."""
        return -(-self.experts // WARP)

    def _experts(self, lane: Int32) -> list[Int32]:
        return [lane + n * WARP for n in range(self._each)]

    def _load(self, given: RouterLogits, first: Int64, expert: Int32) -> cutlass.Numeric:
        """Logit of ``expert``; lanes past the last expert load the last expert's."""
        at = Int32(cutlass.min(expert, Int32(self.experts - 1)))
        return TYPES[self.dtype](Array(given.logits, shape=(1,)).load(first + at))

    def _bias(self, given: RouterLogits, expert: Int32) -> Float32:
        """Bias of ``expert``; lanes past the last expert load the last expert's."""
        at = Int32(cutlass.min(expert, Int32(self.experts - 1)))
        return Array(given.bias, shape=(1,)).load(at)

    def _peak(self, lane: Int32, values: list[Float32]) -> Float32:
        best = Int32(LOWEST)
        for expert, value in zip(self._experts(lane), values, strict=True):
            best = Int32(cutlass.max(best, self._if_expert(expert, order_of(value))))
        return value_of(cute.arch.warp_redux_sync(best, "max"))

    def _sum_of_exponentials(self, lane: Int32, values: list[Float32], peak: Float32) -> Float32:
        total = Float32(0.0)
        for expert, value in zip(self._experts(lane), values, strict=True):
            power = _exponential(value, peak)
            total += Float32(cutlass.select_(expert < self.experts, power, Float32(0.0)))
        return warp_sum(total)

    def _if_expert(self, expert: Int32, order: Int32) -> Int32:
        return Int32(cutlass.select_(expert < self.experts, order, Int32(LOWEST)))

    def _orders(
        self,
        lane: Int32,
        values: list[Float32],
        biases: list[Float32],
        peak: Float32,
        total: Float32,
    ) -> list[Int32]:
        """Integers in the order of selection; ``LOWEST`` past the last expert."""
        orders = []
        for number, (expert, value) in enumerate(zip(self._experts(lane), values, strict=True)):
            order = order_of(value)
            if self.biased:
                score = self._score(value, peak, total)
                order = order_of(rounded("add", score, biases[number]))
            if self.is_packed:
                order = (order & Int32(~LOW_HALF)) | (Int32(LOW_HALF) - expert)
            orders.append(self._if_expert(expert, order))
        return orders

    def _score(self, value: Float32, peak: Float32, total: Float32) -> Float32:
        if self.router.scoring == "sigmoid":
            return sigmoid(value)
        return rounded("mul", _exponential(value, peak), cute.arch.rcp_approx(total))

    def _weight(
        self, logit: Float32, is_slot: cutlass.Boolean, peak: Float32, total: Float32
    ) -> Float32:
        """Routing weight of this lane's slot; ``peak``, ``total``: see ``Chosen``."""
        if self.router.scoring == "sigmoid":
            part = sigmoid(logit)
        else:
            if self.router.renormalize and self.biased:
                # The best logit of all may be so far above that every exponential would be 0.
                order = Int32(cutlass.select_(is_slot, order_of(logit), Int32(LOWEST)))
                peak = value_of(cute.arch.warp_redux_sync(order, "max"))
            elif self.router.renormalize:
                peak = cute.arch.shuffle_sync(logit, 0)
            part = _exponential(logit, peak)
        part = Float32(cutlass.select_(is_slot, part, Float32(0.0)))
        if self.router.renormalize:
            more = NOT_ZERO if self.router.scoring == "sigmoid" else 0.0
            total = rounded("add", warp_sum(part, self.router.top_k), Float32(more))
        if self.router.renormalize or self.router.scoring == "softmax":
            part = rounded("mul", part, cute.arch.rcp_approx(total))
        scale = self.router.scale
        return part if scale == 1.0 else rounded("mul", part, Float32(scale))

    # The best of the warp

    def _first(self, lane: Int32, orders: list[Int32]) -> tuple[Int32, Int32]:
        """Maximum of ``orders`` over all lanes, and its expert; ties go to the lowest expert."""
        best, expert = orders[0], lane
        for each, order in zip(self._experts(lane)[1:], orders[1:], strict=True):
            if self.is_packed:
                best = Int32(cutlass.max(best, order))
            else:
                is_better = order > best
                best = Int32(cutlass.select_(is_better, order, best))
                expert = Int32(cutlass.select_(is_better, each, expert))
        top = cute.arch.warp_redux_sync(best, "max")
        if self.is_packed:
            return top, Int32(LOW_HALF) - (top & Int32(LOW_HALF))
        candidate = Int32(cutlass.select_(best == top, expert, Int32(NONE)))
        return top, cute.arch.warp_redux_sync(candidate, "min")

    def _without(self, lane: Int32, orders: list[Int32], expert: Int32) -> list[Int32]:
        return [
            Int32(cutlass.select_(each == expert, Int32(LOWEST), order))
            for each, order in zip(self._experts(lane), orders, strict=True)
        ]

    def _best(self, lane: Int32, orders: list[Int32]) -> tuple[Int32, Int32]:
        """Select the top-k; return the expert and order of this lane's slot.

        Lanes without a slot return expert 0 and an order without meaning.
        """
        chosen, order = Int32(0), Int32(0)
        for slot in range(self.router.top_k):
            top, expert = self._first(lane, orders)
            chosen = Int32(cutlass.select_(lane == slot, expert, chosen))
            order = Int32(cutlass.select_(lane == slot, top, order))
            orders = self._without(lane, orders, expert)
        if self.is_packed:  # lower half of a bfloat16 as float32
            half = Int32(LOW_HALF)
            order = Int32(cutlass.select_(order < 0, order | half, order & ~half))
        return chosen, order

    # Groups

    def _best_groups(self, lane: Int32, orders: list[Int32]) -> Int32:
        """Select the best expert groups; return a bit mask."""
        own = Int32(LOWEST)  # of the group that has this lane's number
        for group in range(self.router.groups):
            order = self._of_group(lane, orders, group)
            own = Int32(cutlass.select_(lane == group, order, own))
        chosen = Int32(0)
        for _ in range(self.router.top_groups):
            top = cute.arch.warp_redux_sync(own, "max")
            candidate = Int32(cutlass.select_(own == top, lane, Int32(WARP)))
            group = cute.arch.warp_redux_sync(candidate, "min")
            chosen = chosen | (Int32(1) << group)
            own = Int32(cutlass.select_(lane == group, Int32(LOWEST), own))
        return chosen

    def _of_group(self, lane: Int32, orders: list[Int32], group: int) -> Int32:
        """Order of a group's score: the best expert's or, with a bias, the sum of the best two."""
        size = self.experts // self.router.groups
        first, end = group * size, (group + 1) * size
        members = [
            Int32(cutlass.select_((each >= first) & (each < end), order, Int32(LOWEST)))
            for each, order in zip(self._experts(lane), orders, strict=True)
        ]
        best, expert = self._first(lane, members)
        if self.is_packed:  # ties go to the lower group
            return best & Int32(~LOW_HALF)
        if not self.biased:
            return best
        second, _ = self._first(lane, self._without(lane, members, expert))
        return order_of(rounded("add", value_of(best), value_of(second)))

    def _within(self, groups: Int32, lane: Int32, orders: list[Int32]) -> list[Int32]:
        size = self.experts // self.router.groups
        return [
            Int32(cutlass.select_(((groups >> (each // size)) & 1) != 0, order, Int32(LOWEST)))
            for each, order in zip(self._experts(lane), orders, strict=True)
        ]


def order_of(value: Float32) -> Int32:
    """Order-preserving integer of a float32; NaN is the greatest."""
    bits = (value + 0.0).bitcast(Int32)  # -0 + 0 is +0
    order = bits ^ ((bits >> 31) & Int32(MAGNITUDE))
    return Int32(cutlass.select_(value != value, Int32(MAGNITUDE), order))


def value_of(order: Int32) -> Float32:
    """Inverse of ``order_of``."""
    return (order ^ ((order >> 31) & Int32(MAGNITUDE))).bitcast(Float32)


def _exponential(value: Float32, peak: Float32) -> Float32:
    """e^(value − peak), within 2 ulp plus the effect of rounding the exponent."""
    return exp2(rounded("mul", value - peak, Float32(LOG2_E)))


def warp_sum(value: Float32, lanes: int = WARP) -> Float32:
    """Sum over the first ``lanes`` lanes of a warp, bit-identical in each of these lanes.

    Lanes from ``lanes`` to the next power of two must hold 0.
    """
    for mask in (16, 8, 4, 2, 1):
        if mask < lanes:
            value = value + cute.arch.shuffle_sync_bfly(value, mask)
    return value
