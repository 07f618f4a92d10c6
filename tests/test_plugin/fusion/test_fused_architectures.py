"""Every architecture of vLLM's registry with the plugin's fused ops, compared with itself unfused.

A scaled-down model of each architecture, with layers of all its kinds, runs a prompt through vLLM's
own model code. Activations are in 16 bits, so that only bfloat16 rounding may differ.
"""

from collections.abc import Iterator
from typing import Any

import pytest
import vllm as vllm_module

from tests.registry import configs, session, step, unbuilt, weights

# Hidden states of tokens differ by .001 to .015 of their norm; with queries that are not rotated,
# or gate and up exchanged, by more than .3. Rounding may change a router's choice for a few tokens.
ROUNDING = 0.03
# Models whose blocks run eight times: a relative change of 2⁻⁸ in the embedding grows to .38.
RECURRENT = {"HrmTextForCausalLM"}
# Numbers of classes built here: with fused ops, with fused rotations, and run as a whole.
COUNTS = {"0.32": (194, 108, 121), "0.33": (202, 109, 123)}
MOST = 0.75  # of a model's tokens
SWITCHES = ("fuse_mlp", "fuse_norm", "fuse_attention")


@pytest.fixture(scope="module")
def vllm() -> Iterator[session.Session]:
    with session.started() as found:
        yield found


def built(vllm: session.Session, architecture: str, fused: bool) -> session.Built:
    options: dict[str, Any] = dict.fromkeys(SWITCHES, fused) | {"activation": "16-bit"}
    entry = configs.ENTRIES.get(architecture)
    if entry is not None and entry.ignore:
        options["ignore"] = list(entry.ignore)
    config: dict[str, Any] = {"additional_config": {"nvfp4_tc": options}}
    found = vllm.build(architecture, device="cpu", load_format="dummy", **config)
    weights.load(found)
    return found


def reports(model: session.Built) -> str:
    quantization = model.config.quant_config
    if quantization is None:
        return ""
    return "\n".join(f"{r.kernel} {r.reason}" for r in quantization.startup.report.layers)


@pytest.mark.thorough
def test_each_says_the_same_unfused(vllm: session.Session) -> None:
    apart, fused, rotated = {}, 0, 0
    for architecture, *_ in configs.distinct().values():
        if architecture in unbuilt.UNBUILT.keys() | weights.UNPREPARED.keys():
            continue
        one = built(vllm, architecture, True)
        said = reports(one)
        rotates = " rotated" in said
        if not rotates and "silu_mul" not in said:
            continue
        fused, rotated = fused + 1, rotated + rotates
        other = built(vllm, architecture, False)
        try:
            results = [step.run(each).double() for each in (one, other)]
        except Exception as error:
            print(f"{architecture}: not run: {type(error).__name__}: {error}")
            continue
        each = (results[0] - results[1]).norm(dim=-1) / results[1].norm(dim=-1)
        apart[architecture] = float(each.quantile(MOST))
    print(f"{fused} with fused ops, {rotated} that rotate, {len(apart)} run whole")
    wrong = {name: far for name, far in apart.items() if not far < ROUNDING}
    assert wrong.keys() <= RECURRENT, wrong
    release = ".".join(vllm_module.__version__.split(".")[:2])
    assert (fused, rotated, len(apart)) == COUNTS[release]
