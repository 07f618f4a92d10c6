"""Experts of one rank among several: the products get the number of experts of all ranks."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from nvfp4_kernels.activation import SILU
from nvfp4_kernels.gemm.call import GroupedGemmCall
from tests.test_plugin.experts.test_experts import E, Model, batch, mixture
from vllm_fp4_plugin.experts import op


@pytest.mark.parametrize("weight_only", [False, True])
def test_products_know_of_all_ranks(weight_only: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    told, find = [], op.load_target

    def found(target: str) -> Callable[..., Any]:
        def called(*given: Any) -> Any:
            told.extend(each.global_experts for each in given if isinstance(each, GroupedGemmCall))
            return find(target)(*given)

        return called

    monkeypatch.setattr(op, "load_target", found)
    held = Model(weight_only=weight_only).held(slice(0, E // 2))
    places = torch.arange(E, dtype=torch.int32)
    places[E // 2 :] = -1
    mixture(*batch(), places, held, SILU, weight_on_input=False)
    assert told == [E, E]
