"""Problems for both grouped GEMMs on sm_90."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from nvfp4_kernels.devices import standing_in
from tests.test_kernels.gemm.grouped.grouped_cases import (
    GroupedCase,
    GroupedProblem,
    grouped_problem,
)
from tests.test_kernels.routing_cases import CASES as ROUTINGS
from tests.test_kernels.routing_cases import RoutingCase

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


def case(
    routing: RoutingCase, n: int, k: int, act: torch.dtype = BF16, out: torch.dtype = BF16
) -> GroupedCase:
    return GroupedCase(routing, n, k, act, out_dtype=out, fragments=True)


CASES = {
    "one token": case(ROUTINGS["one token"], 96, 64),
    "no token": case(ROUTINGS["no token"], 48, 64),
    "nothing routed": case(ROUTINGS["nothing routed"], 48, 64),
    "all to one expert": case(ROUTINGS["all to one expert"], 96, 192),
    "an expert per token": case(ROUTINGS["an expert per token"], 64, 128),
    "one expert": case(ROUTINGS["one expert"], 72, 80),
    "ids of no expert": case(ROUTINGS["ids of no expert"], 160, 96),
    "linear map": case(ROUTINGS["linear map"], 77, 48),
    "128 experts": case(RoutingCase(5, 8, 128), 64, 64),
    "a long K": case(RoutingCase(2, 1, 4), 64, 2048),
    "tiles of 16": case(RoutingCase(25, 2, 4, 16), 144, 320),
    "tiles of 32": case(RoutingCase(40, 2, 4, 32), 96, 256),
    "tiles of 64": case(ROUTINGS["tiles of 64"], 80, 160),
    "tiles of 128": case(ROUTINGS["tiles of 128"], 136, 96),
    "tiles of 256": case(ROUTINGS["tiles of 256"], 72, 64),
    "I of GLM 4.5": case(RoutingCase(3, 1, 2), 1408, 64),
    "I of Nemotron 3": case(RoutingCase(3, 1, 2), 1856, 64),
    "K of GLM 4.5": case(RoutingCase(3, 1, 2), 64, 1408),
    "K of Nemotron 3": case(RoutingCase(3, 1, 2), 64, 1856),
    "fp16": case(ROUTINGS["tiles of 64"], 64, 64, FP16, FP16),
    "bias": replace(case(ROUTINGS["one token"], 77, 96, out=FP32), bias=BF16),
    "bias, 128 tokens": replace(case(ROUTINGS["tiles of 128"], 136, 96, FP16), bias=FP16),
    "bias, a long K": replace(case(RoutingCase(2, 1, 4), 64, 2048), bias=FP32),
    "float32 out": case(ROUTINGS["one token"], 96, 64, out=FP32),
}


def problem_of(case: GroupedCase, *, gated: bool) -> GroupedProblem:
    """A problem whose tokens the reference routes, on the CPU."""
    with standing_in("cpu", "cpu"):
        return grouped_problem(case, gated=gated)


def on_device(args: dict[str, Any], device: torch.device) -> dict[str, Any]:
    """Arguments of an op, with its tensors on ``device``."""
    return {name: v.to(device) if isinstance(v, Tensor) else v for name, v in args.items()}
