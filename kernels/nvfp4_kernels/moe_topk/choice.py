"""Choice of one token's experts by a warp: no shared memory, nothing between warps.

A lane holds every 32nd expert's logit as an integer that orders like it. Of the lanes' best ones
``redux`` finds the best, as often as a token has slots. A bfloat16 leaves room for its expert in
the same integer: a word then orders values, and experts of equal ones.
"""

from dataclasses import dataclass
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Array, Float32, Int32, Int64, Uint8

from nvfp4_kernels.device.math import LOG2_E, exp2, rounded, sigmoid
from nvfp4_kernels.device.types import TYPES
from nvfp4_kernels.moe_topk.reference import NOT_ZERO
from nvfp4_kernels.router import Router

WARP = 32
LOWEST = -(1 << 31)  # below the order of every value
NONE = 1 << 30  # above every expert
LOW_HALF = 0xFFFF
MAGNITUDE = 0x7FFFFFFF


class Logits(NamedTuple):
    """Logits of a batch, in global memory; part of kernels' arguments.

    Attributes:
        logits: [tokens, experts].
        bias: float32 [experts], or null.
        padding: a byte for each token, not 0 where there is none; or null.
        tokens: of the batch.
    """

    logits: cute.Pointer
    bias: cute.Pointer
    padding: cute.Pointer
    tokens: Int32


LOGITS_TYPES = {"bias": Float32, "padding": Uint8}
LOGITS_ALIGNMENT = {"logits": 2, "bias": 4, "padding": 1}


@dataclass(frozen=True)
class TokenChoice:
    """Choice of a token's experts.

    Attributes:
        dtype: of logits, e.g. ``"bfloat16"``.
        experts: of all ranks.
        router: the rule.
        biased: whether there is a bias.
        padded: whether some rows may be none.
    """

    dtype: str
    experts: int
    router: Router
    biased: bool
    padded: bool

    @property
    def is_packed(self) -> bool:
        """Whether a word holds both a value and its expert."""
        return self.dtype == "bfloat16" and not self.biased

    def types(self) -> dict[str, type[cutlass.Numeric]]:
        """Element types of ``Logits``."""
        return {"logits": TYPES[self.dtype], **LOGITS_TYPES}

    @cute.jit
    def run(self, given: Logits, token: Int32, lane: Int32) -> tuple[Int32, Float32]:
        """Expert and weight of the token's slot ``lane``; those of other lanes mean nothing."""
        first = Int64(token) * self.experts
        values = [self._load(given, first, each) for each in self._experts(lane)]
        peak = Float32(0.0)
        total = Float32(1.0)
        if cutlass.const_expr(self._needs_softmax):
            peak = self._peak(lane, values)
            total = self._sum_of_exponentials(lane, values, peak)
        orders = self._orders(given, lane, values, peak, total)
        if cutlass.const_expr(self.router.groups > 1):
            orders = self._within(self._best_groups(lane, orders), lane, orders)
        chosen = self._best(lane, orders)
        logit = self._load(given, first, chosen)
        is_slot = lane < self.router.top_k
        weight = self._weight(logit, is_slot, peak, total)
        if cutlass.const_expr(self.padded):
            is_none = Array(given.padding, shape=(1,))[token] != Uint8(0)
            chosen = Int32(cutlass.select_(is_none, Int32(-1), chosen))
            weight = Float32(cutlass.select_(is_none, Float32(0.0), weight))
        return chosen, weight

    @property
    def _needs_softmax(self) -> bool:
        """Whether weights or the choice depend on the sum over all experts."""
        return self.router.scoring == "softmax" and (self.biased or not self.router.renormalize)

    @property
    def _each(self) -> int:
        """Experts of a lane."""
        return -(-self.experts // WARP)

    def _experts(self, lane: Int32) -> list[Int32]:
        return [lane + n * WARP for n in range(self._each)]

    def _load(self, given: Logits, first: Int64, expert: Int32) -> Float32:
        """Logit of an expert; of one that there is not, of the last."""
        at = Int32(cutlass.min(expert, Int32(self.experts - 1)))
        value = Float32(TYPES[self.dtype](Array(given.logits, shape=(1,)).load(first + at)))
        return rounded("add", value, Float32(0.0))  # -0 + 0 is +0

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
        self, given: Logits, lane: Int32, values: list[Float32], peak: Float32, total: Float32
    ) -> list[Int32]:
        """Integers that order as what experts are chosen by; of no expert, the lowest."""
        orders = []
        for expert, value in zip(self._experts(lane), values, strict=True):
            order = order_of(value)
            if self.biased:
                at = Int32(cutlass.min(expert, Int32(self.experts - 1)))
                bias = Array(given.bias, shape=(1,)).load(at)
                order = order_of(rounded("add", self._score(value, peak, total), bias))
            if self.is_packed:
                order = (order & Int32(~LOW_HALF)) | (Int32(LOW_HALF) - expert)
            orders.append(self._if_expert(expert, order))
        return orders

    def _score(self, value: Float32, peak: Float32, total: Float32) -> Float32:
        if self.router.scoring == "sigmoid":
            return sigmoid(value)
        return rounded("div", _exponential(value, peak), total)

    def _weight(
        self, logit: Float32, is_slot: cutlass.Boolean, peak: Float32, total: Float32
    ) -> Float32:
        """Weight of this lane's slot."""
        if self.router.scoring == "sigmoid":
            part = sigmoid(logit)
        elif self._needs_softmax and not self.router.renormalize:
            part = _exponential(logit, peak)
        else:
            # The best one without a bias, and no less than any other with one.
            peak = peak if self._needs_softmax else cute.arch.shuffle_sync(logit, 0)
            part = _exponential(logit, peak)
        part = Float32(cutlass.select_(is_slot, part, Float32(0.0)))
        if self.router.renormalize:
            more = NOT_ZERO if self.router.scoring == "sigmoid" else 0.0
            part = rounded("div", part, rounded("add", warp_sum(part), Float32(more)))
        elif self.router.scoring == "softmax":
            part = rounded("div", part, total)
        scale = self.router.scale
        return part if scale == 1.0 else rounded("mul", part, Float32(scale))

    # The best of the warp

    def _first(self, lane: Int32, orders: list[Int32]) -> tuple[Int32, Int32]:
        """Best order of all lanes, and its expert: the lowest of equal ones."""
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

    def _best(self, lane: Int32, orders: list[Int32]) -> Int32:
        """Expert of the slot of this lane; 0 of a lane without one."""
        chosen = Int32(0)
        for slot in range(self.router.top_k):
            _, expert = self._first(lane, orders)
            chosen = Int32(cutlass.select_(lane == slot, expert, chosen))
            orders = self._without(lane, orders, expert)
        return chosen

    # Groups

    def _best_groups(self, lane: Int32, orders: list[Int32]) -> Int32:
        """A bit for each group that experts may be of."""
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
        """Order of a group: its best expert's, or with a bias that of its best two's sum."""
        size = self.experts // self.router.groups
        first, end = group * size, (group + 1) * size
        members = [
            Int32(cutlass.select_((each >= first) & (each < end), order, Int32(LOWEST)))
            for each, order in zip(self._experts(lane), orders, strict=True)
        ]
        best, expert = self._first(lane, members)
        if self.is_packed:  # of equal groups, the lower one is the better one
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
    """Integer that orders as float32 values do; NaN is above them."""
    bits = value.bitcast(Int32)
    order = bits ^ ((bits >> 31) & Int32(MAGNITUDE))
    return Int32(cutlass.select_(value != value, Int32(MAGNITUDE), order))


def value_of(order: Int32) -> Float32:
    """Value of an order."""
    return (order ^ ((order >> 31) & Int32(MAGNITUDE))).bitcast(Float32)


def _exponential(value: Float32, peak: Float32) -> Float32:
    """e^(value − peak), within 2 ulp and what rounding the exponent costs."""
    return exp2(rounded("mul", value - peak, Float32(LOG2_E)))


def warp_sum(value: Float32) -> Float32:
    """Sum over the lanes, in the same order in each."""
    for mask in (16, 8, 4, 2, 1):
        value = value + cute.arch.shuffle_sync_bfly(value, mask)
    return value
