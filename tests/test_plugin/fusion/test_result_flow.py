"""Escape analysis of the projection's result: vLLM's MLPs one by one, and other uses."""

import ast
import textwrap
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from torch.nn import Module
from vllm.model_executor.layers.fusion.fused_act_quant import maybe_fused_act_quant
from vllm.model_executor.models.registry import ModelRegistry

from tests.vllm_classes import classes_with, has_class
from vllm_fp4_plugin.fusion.forward_analysis import Flow, Use, flow_of

PROJECTION = "gate_up_proj"

# Every class of vLLM 0.32 and 0.33 that calls its gate_up_proj, all read by a person, with the
# consumer of the result. Each module says whether the consumer is SiluAndMul; Gemma's, for example,
# is GeluAndMul. A row counts if the installed vLLM has the class.
ACTIVATIONS = {
    "act_fn": """
        bailing_moe:BailingMLP bailing_moe_v3:BailingMoeV3MLP bert_with_rope:BertWithRopeGatedMLP
        cohere2_moe:Cohere2MoeMLP commandr:CohereMLP deepseek_v2:DeepseekV2MLP
        ernie45_moe:Ernie4_5_MoeMLP exaone4:Exaone4GatedMLP exaone:ExaoneGatedMLP gemma2:Gemma2MLP
        gemma3:Gemma3MLP gemma3n:Gemma3nMLP gemma4:Gemma4MLP gemma:GemmaMLP
        glm4_1v:Glm4vPatchMerger glm4_1v:Glm4vVisionMLP glm4_moe:Glm4MoeMLP granite:GraniteMLP
        hrm_text:HrmTextMLP hy_v3:HYV3FeedForward hyperclovax:HyperCLOVAXMLP internlm2:InternLM2MLP
        interns1_pro:InternS1ProMoeMLP k2_horizon:K2HorizonMLP llama:LlamaMLP
        longcat_flash:FlashMLP mimo_v2:MiMoV2MLP minicpm:MiniCPMMLP mistral:MistralMLP
        molmo:LanguageModelMLP moss_audio:GatedMLP muse_glimmer:MuseGlimmerMLP
        olmo_hybrid:OlmoHybridMLP openpangu:OpenPanguMLP orion:OrionMLP
        param2moe:Param2MoEMLP pixtral:FeedForward qwen2:Qwen2MLP
        qwen2_5_vl:Qwen2_5_VisionMLP qwen2_moe:Qwen2MoeMLP qwen3_moe:Qwen3MoeMLP rnj1:Rnj1MLP
        sarvam:SarvamMLAMLP solar:SolarMLP stablelm:StablelmMLP step1:StepMLP
        step3_text:Step3TextMLP step3p5:Step3p5MLP
        colultravbert:UltraBertMLP
        models/beam/nvidia/dflash2:DFlash2BeamMLP
        models/deepseek_v4/cpu/model:DeepseekV4MLP models/deepseek_v4/nvidia/model:DeepseekV4MLP
        models/deepseek_v4/xpu/model:DeepseekV4MLP models/glm5next/common/model:Glm5NextMLP
        models/glm5next/common/multimodal:Glm5NextPatchMerger
        models/glm5next/common/multimodal:Glm5NextVisionMLP models/hy_v4/nvidia/moe:HYV4FeedForward
        models/kimi_k3/nvidia/model:KimiMLP models/minimax_m3/nvidia/model:MiniMaxM3MLP
        models/step5/nvidia/model:Step5MLP
    """,
    "act_and_mul": "pixtral:PixtralHFMLP",
    "act": "plamo3:DenseMLP",
}
ALONE = {"plamo3:DenseMLP"}  # asks for the result without a bias

ELSEWHERE = "forward uses gate_up_proj's result elsewhere than in a layer"
SOME_PATHS = "forward has gate_up_proj's result in x on some paths alone"
NO_CALL = "uses gate_up_proj otherwise than by calling it"
ESCAPES = {
    # Fused if the module's flag says SiLU: see test_a_flag_of_the_module.
    "openpangu_vl:OpenPanguVisionMLP": SOME_PATHS,
    "falcon_h1:FalconH1MLP": ELSEWHERE,  # multiplies the gate by a constant
    "zamba2:Zamba2MLP": ELSEWHERE,  # adds an adapter's product
    "dory:DoryMLP": ELSEWHERE,  # scales gate and up by vectors of their own
    "models/beam/nvidia/moe:BeamMLP": ELSEWHERE,  # a kernel of its own, which rounds once
    "models/deepseek_v4/amd/model:DeepseekV4MLP": f"forward {NO_CALL}",  # reads its weight
    "models/flint/model:FlintMLP": f"forward {NO_CALL}",  # hands it to a kernel of its own
    "models/inkling/amd/mlp:InklingDenseMLP": ELSEWHERE,  # a Triton kernel of its own
    "models/inkling/nvidia/mlp:InklingDenseMLP": ELSEWHERE,
    "models/kimi_k3/amd/linear:KimiMLP": f"get_input_quant_key {NO_CALL}",
    "models/minimax_m3/amd/model:MiniMaxM3MLP": ELSEWHERE,  # swiglu_oai_split
}

# Architectures whose MLPs were fused first, by class.
FIRST = {
    "Cohere2ForCausalLM": "commandr:CohereMLP",
    "CohereForCausalLM": "commandr:CohereMLP",
    "Exaone4ForCausalLM": "exaone4:Exaone4GatedMLP",
    "GraniteForCausalLM": "granite:GraniteMLP",
    "IQuestCoderForCausalLM": "llama:LlamaMLP",
    "InternLM2ForCausalLM": "internlm2:InternLM2MLP",
    "InternLM3ForCausalLM": "llama:LlamaMLP",
    "LlamaForCausalLM": "llama:LlamaMLP",
    "Ministral3ForCausalLM": "mistral:MistralMLP",
    "MistralForCausalLM": "mistral:MistralMLP",
    "OrionForCausalLM": "orion:OrionMLP",
    "Phi3ForCausalLM": "llama:LlamaMLP",
    "Qwen2ForCausalLM": "qwen2:Qwen2MLP",
    "Qwen3ForCausalLM": "qwen2:Qwen2MLP",
    "SolarForCausalLM": "solar:SolarMLP",
    "StableLmForCausalLM": "stablelm:StablelmMLP",
    "TeleChat3ForCausalLM": "llama:LlamaMLP",
}
SHARED = {"phi3": "llama", "qwen3": "qwen2"}  # modules that take another's MLP


@pytest.fixture(scope="module")
def flows() -> dict[str, Flow]:
    classes = dict(classes_with(f"self.{PROJECTION}("))
    return {
        name: flow_of(owner, PROJECTION, "result" if name in ALONE else "pair")
        for name, owner in classes.items()
    }


def test_vllms_classes(flows: dict[str, Flow]) -> None:
    """Every new class, and every class with a changed verdict, must be read and listed above."""
    rows = {n: a for a, names in ACTIVATIONS.items() for n in names.split()}
    expected = {name: activation for name, activation in rows.items() if has_class(name)}
    followed = {name: flow for name, flow in flows.items() if not flow.escape}
    assert {name: "".join(flow.consumers) for name, flow in followed.items()} == expected


def test_vllms_classes_that_do_more(flows: dict[str, Flow]) -> None:
    escapes = {name: flow.escape for name, flow in flows.items() if flow.escape}
    assert escapes.keys() == set(filter(has_class, ESCAPES))
    for name, escape in escapes.items():
        assert escape.startswith(f"{name.rpartition(':')[2]}.{ESCAPES[name]} ("), escape


def test_the_reason_names_the_place(flows: dict[str, Flow]) -> None:
    escape = flows["falcon_h1:FalconH1MLP"].escape
    assert "(falcon_h1.py:" in escape
    assert escape.count("\n") == 0
    assert "x[:, :self.intermediate_size // self.tp_size] *=" in escape


@pytest.mark.parametrize("architecture", FIRST)
def test_architectures_fused_first(architecture: str) -> None:
    served = ModelRegistry.models[architecture].module_name.rpartition(".")[2]
    module, _, name = FIRST[architecture].partition(":")
    assert SHARED.get(served, served) == module
    owner = getattr(import_module(f"vllm.model_executor.models.{module}"), name)
    assert flow_of(owner, PROJECTION, "pair") == Flow(frozenset({Use("act_fn", 0)}), "")


# --- classes made up ----------------------------------------------------------------------------

Make = Callable[..., type[Module]]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    """Maker of classes from the source of their members, stored in a file for ``inspect``."""

    def made(members: str, base: type = Module, **names: Any) -> type[Module]:
        file = tmp_path / f"mlp{len(list(tmp_path.iterdir()))}.py"
        file.write_text("class Mlp(Base):\n" + textwrap.indent(textwrap.dedent(members), "    "))
        known = {"maybe_fused_act_quant": maybe_fused_act_quant, "act_quant": lambda *_: None}
        namespace = {"Base": base} | known | names
        exec(compile(file.read_text(), str(file), "exec"), namespace)
        return namespace["Mlp"]

    return made


def forward(body: str) -> str:
    return "def forward(self, x):\n" + textwrap.indent(textwrap.dedent(body), "    ")


CALL = "y, _ = self.gate_up_proj(x)\n"
HARMLESS = {
    "one name for all": "x, _ = self.gate_up_proj(x)\nx = self.act(x)\nreturn x * 2",
    "nested": "return self.down(self.act(self.gate_up_proj(x)[0]))[0]",
    "pair by index": "y = self.gate_up_proj(x)\nreturn self.act(y[0])",
    "renamed": CALL + "z = y\nreturn self.act(z)",
    "twice": CALL + "return self.act(y) + self.act(y)",
    "either branch, both of it": (
        "if self.fused:\n    y, _ = self.gate_up_proj(x)\n"
        "else:\n    y, _ = self.gate_up_proj(2 * x)\n"
        "y = self.act(y)\nreturn y * self.scale"
    ),
    "a branch that returns": (
        "if self.raw:\n    return self.up(x)\n" + CALL + "return self.act(y)"
    ),
    "a branch that raises": (
        CALL + "if x.numel() == 0:\n    y = None\n    raise ValueError\nreturn self.act(y)"
    ),
    "not used after a branch": (
        "z = x\nif self.fused:\n    z, _ = self.gate_up_proj(x)\n    w = self.act(z)\n"
        "else:\n    w = x\nreturn w"
    ),
    "before": "x = x * self.scale\n" + CALL + "return self.act(y)",
    "name taken again": CALL + "z = self.act(y)\ny = z * 2\nfor _ in z:\n    y = y + 1\nreturn y",
    "early return": "if x.numel() == 0:\n    return x\n" + CALL + "return self.act(y)",
    "bias is used": "y, b = self.gate_up_proj(x)\nassert b is None\nreturn self.act(y)",
    "through vLLM's helper": CALL + "return maybe_fused_act_quant(self.act, y, self.down)",
    "another method": CALL + "return self.after(self.act(y))\n",
}


@pytest.mark.parametrize("body", HARMLESS)
def test_harmless(body: str, make: Make) -> None:
    after = "def after(self, x):\n    return x + self.offset\n"
    owner = make(after + forward(HARMLESS[body]))
    assert flow_of(owner, PROJECTION, "pair") == Flow(frozenset({Use("act", 0)}), "")


MISUSES = {
    "scaled": CALL + "y = y * self.scale\nreturn self.act(y)",
    "scaled in place": CALL + "y *= self.scale\nreturn self.act(y)",
    "scaled in part": CALL + "y[:, :4] *= 2\nreturn self.act(y)",
    "scaled on a condition": CALL + "if self.scale:\n    y = y * 2\nreturn self.act(y)",
    "scaled as an argument": CALL + "return self.act(y * 2)",
    "scaled on a renamed one": CALL + "z = y\ny = self.act(y)\nreturn y + z",
    "sliced": CALL + "return self.act(y[..., :8])",
    "asked for its shape": CALL + "n = y.shape[0]\nreturn self.act(y)",
    "returned": CALL + "return y",
    "returned on a condition": CALL + "if self.raw:\n    return y\nreturn self.act(y)",
    "returned beside": CALL + "return self.act(y), y",
    "stored": CALL + "self.last = y\nreturn self.act(y)",
    "stored in a list": CALL + "self.all.append(y)\nreturn self.act(y)",
    "logged": CALL + "print(y)\nreturn self.act(y)",
    "tested": CALL + "if y is None:\n    return x\nreturn self.act(y)",
    "to a function": CALL + "return silu_and_mul(y)",
    "to a function with the activation": CALL + "return act_quant(self.act, y, self.down)",
    "to a function of the helper's name": (
        "maybe_fused_act_quant = x.f\n"
        + CALL
        + "return maybe_fused_act_quant(self.act, y, self.down)"
    ),
    "with more arguments": CALL + "return self.act(y, self.limit)",
    "with a keyword": CALL + "return self.act(y, limit=1)",
    "as a keyword": CALL + "return self.act(x=y)",
    "pair to the activation": "return self.act(self.gate_up_proj(x))",
    "pair as arguments": "return self.act(*self.gate_up_proj(x))",
    "unpacked result": CALL + "gate, up = y\nreturn self.act(gate)",
    "starred": "y, *_ = self.gate_up_proj(x)\nreturn self.act(y)",
    "in a loop": "for _ in range(2):\n    x, _ = self.gate_up_proj(x)\nreturn self.act(x)",
    "in a context": "with self.ctx():\n    y, _ = self.gate_up_proj(x)\nreturn self.act(y)",
    "in try": "try:\n    y, _ = self.gate_up_proj(x)\nfinally:\n    x = 0\nreturn self.act(y)",
    "back to the projection": CALL + "z, _ = self.gate_up_proj(y)\nreturn self.act(z)",
    "in a comprehension": CALL + "return [self.act(z) for z in y]",
}
OTHERS = {
    "weight": (CALL + "return self.act(y) + self.gate_up_proj.weight", NO_CALL),
    "alias": ("p = self.gate_up_proj\nreturn self.act(p(x)[0])", NO_CALL),
    "its forward": ("return self.act(self.gate_up_proj.forward(x)[0])", NO_CALL),
    "self": (CALL + "log(self)\nreturn self.act(y)", "forward hands itself on"),
    "by its name": (CALL + "getattr(self, 'gate_up_' + 'proj')(x)", "forward hands itself on"),
    "modules": (CALL + "self._modules['a'](x)\nreturn self.act(y)", "uses torch's Module._modules"),
    "children": (CALL + "a, b = self.children()\nreturn self.act(y)", "Module.children"),
    "lambda": ("f = lambda: y\n" + CALL + "return f(), self.act(y)", "forward is not understood"),
    "function": (
        "def f():\n    return y\n" + CALL + "return f(), self.act(y)", "forward is not understood"
    ),
    "walrus": ("return self.act((y := self.gate_up_proj(x)[0]))", "forward is not understood"),
    "locals": (CALL + "locals()\nreturn self.act(y)", "forward is not understood"),
    "another self": ("self = self.a\n" + CALL + "return self.act(y)", "forward is not understood"),
    "super": ("return super().forward(x)", "forward takes __class__ from around it"),
    "activation replaced": (
        CALL + "if x is None:\n    self.act = silu\nreturn self.act(y)",
        "replaces its act while it runs",
    ),
    "no activation": ("return self.down(x)", "calls no layer with gate_up_proj's result"),
}  # fmt: skip


EITHER = "y = x\nif {test}:\n    y, _ = self.gate_up_proj(x)\nreturn self.act(y)"
SOMETIMES = {
    "pair or result": "y = self.gate_up_proj(x)\nif self.a:\n    y = y[0]\nreturn self.act(y)",
    "one branch": EITHER.format(test="self.fused"),
    "its size": EITHER.format(test="x.shape[0] > 1"),
    "the other branch": CALL + "if self.fused:\n    y = x\nreturn self.act(y)",
    "an inner branch": CALL + "if self.a:\n    if self.b:\n        y = x\nreturn self.act(y)",
    "one branch returns, one does not": (
        "y = x\nif self.a:\n    y, _ = self.gate_up_proj(x)\n    if self.b:\n"
        "        return self.act(y)\nreturn self.act(y)"
    ),
}


@pytest.mark.parametrize("body", SOMETIMES)
def test_what_only_some_paths_hold(body: str, make: Make) -> None:
    flow = flow_of(make(forward(SOMETIMES[body])), PROJECTION, "pair")
    name = "has gate_up_proj's result in y on some paths alone (mlp0.py:"
    assert flow.escape.startswith(f"Mlp.forward {name}"), flow.escape


def test_a_layer_that_is_called_with_something_else_too(make: Make) -> None:
    plain = make(forward(CALL + "return self.act(y)"))
    assert not flow_of(plain, PROJECTION, "pair").called_otherwise
    for body in (
        "if self.raw:\n    return self.act(x)\n" + CALL + "return self.act(y)",
        CALL + "for _ in range(2):\n    x = self.act(x)\nreturn self.act(y)",
    ):
        flow = flow_of(make(forward(body)), PROJECTION, "pair")
        assert flow.called_otherwise == "act is called with something else too"


# --- tests that constants of the module settle ----------------------------------------------------

TESTS = {  # with self.flag True, self.size 3, self.name "silu", self.gone None, self.act a module
    "self.flag": True,
    "not self.flag": False,
    "self.size > 2": True,
    "self.size in (1, 2)": False,
    "self.name == 'silu'": True,
    "self.name != 'silu' or self.size": True,
    "self.gone is None": True,
    "self.gone": False,
    "self.act is not None": True,
    "self.act is None": False,
    "self.flag and 1 < self.size <= 3": True,
    "self.gone and x.any()": False,
    "self.flag or x.any()": True,
}
UNKNOWN = (
    "x.any() or self.flag", "self.act", "self.act == 1", "self.listed", "self.training",
    "self.counted", "self.computed", "self.absent", "self.name < self.size", "other.flag",
    "self.flag and x.any()", "self.name is 'silu'",
)  # fmt: skip
SET = """
def count(self):
    self.counted = True
@property
def computed(self):
    return True
"""


def flagged(make: Make, test: str) -> Module:
    module = make(SET + forward(EITHER.format(test=test)))()
    module.act, module.listed, module.counted = Module(), [1], True
    module.flag, module.size, module.name, module.gone = True, 3, "silu", None
    return module


@pytest.mark.parametrize("test", TESTS)
def test_a_flag_of_the_module(test: str, make: Make) -> None:
    flow = flow_of(flagged(make, test), PROJECTION, "pair")
    if TESTS[test]:
        assert flow == Flow(frozenset({Use("act", 0)}), "")
        assert not flow.called_otherwise
    else:
        assert flow.escape == "Mlp calls no layer with gate_up_proj's result"


@pytest.mark.filterwarnings("ignore::SyntaxWarning")
@pytest.mark.parametrize("test", UNKNOWN)
def test_a_test_that_no_constant_settles(test: str, make: Make) -> None:
    assert "on some paths alone" in flow_of(flagged(make, test), PROJECTION, "pair").escape


def test_modules_of_a_class_with_other_flags(make: Make) -> None:
    """The analysis of one module is not reused for a module with other flags."""
    owner = make(forward(EITHER.format(test="self.flag")))
    modules = [owner(), owner()]
    modules[0].flag, modules[1].flag = True, False
    assert [bool(flow_of(m, PROJECTION, "pair").escape) for m in modules] == [False, True]
    modules[1].flag = True
    assert not flow_of(modules[1], PROJECTION, "pair").escape


def test_a_conditional_expression(make: Make) -> None:
    body = CALL + "return self.act(y if self.flag else x)"
    module = make(forward(body))()
    module.flag = True
    assert not flow_of(module, PROJECTION, "pair").escape
    assert ELSEWHERE in flow_of(type(module), PROJECTION, "pair").escape


@pytest.mark.parametrize("body", MISUSES)
def test_misuses(body: str, make: Make) -> None:
    flow = flow_of(make(forward(MISUSES[body])), PROJECTION, "pair")
    assert flow.escape.startswith(f"Mlp.{ELSEWHERE} (mlp0.py:")


@pytest.mark.parametrize("body", OTHERS)
def test_other_leaks(body: str, make: Make) -> None:
    source, reason = OTHERS[body]
    assert reason in flow_of(make(forward(source)), PROJECTION, "pair").escape


def test_every_body_is_python() -> None:
    bodies = *HARMLESS.values(), *MISUSES.values(), *SOMETIMES.values()
    for body in (*bodies, *(source for source, _ in OTHERS.values())):
        ast.parse(forward(body))


def test_result_alone(make: Make) -> None:
    owner = make(forward("return self.act(self.gate_up_proj(x))"))
    assert not flow_of(owner, PROJECTION, "result").escape
    indexed = make(forward("return self.act(self.gate_up_proj(x)[0])"))
    assert ELSEWHERE in flow_of(indexed, PROJECTION, "result").escape


# --- more than one method, or none that can be read ----------------------------------------------

GOOD = forward(CALL + "return self.act(y)")


def escape_of(owner: type[Module]) -> str:
    return flow_of(owner, PROJECTION, "pair").escape


def test_a_helper_that_returns_it(make: Make) -> None:
    helper = "def helper(self, x):\n    return self.gate_up_proj(x)[0]\n"
    assert "Mlp.helper uses gate_up_proj's result elsewhere" in escape_of(
        make(helper + forward("return self.act(self.helper(x))"))
    )


def test_a_helper_that_does_all(make: Make) -> None:
    helper = "def helper(self, x):\n    y, _ = self.gate_up_proj(x)\n    return self.act(y)\n"
    assert not escape_of(make(helper + forward("return self.helper(x) * 2")))


def test_a_helper_that_is_given_it(make: Make) -> None:
    """The analysis stops at the helper, which is reported as the consumer instead of SiluAndMul."""
    helper = "def helper(self, y):\n    return y * 2\n"
    owner = make(helper + forward(CALL + "return self.helper(y)"))
    assert flow_of(owner, PROJECTION, "pair").consumers == {"helper"}


def test_a_method_beside_forward(make: Make) -> None:
    other = "def gates(self, x):\n    return self.gate_up_proj(x)[0].chunk(2)\n"
    assert "Mlp.gates uses gate_up_proj's result elsewhere" in escape_of(make(other + GOOD))


def test_a_property_that_hands_it_out(make: Make) -> None:
    members = "@property\ndef p(self):\n    return self.gate_up_proj\n"
    source = forward(CALL + "self.p.weight\nreturn self.act(y)")
    assert f"Mlp.p {NO_CALL}" in escape_of(make(members + source))


@pytest.mark.parametrize(
    "line",
    [
        "self.f = lambda x: self.gate_up_proj(x)",
        "self.f = self.gate_up_proj.forward",
    ],
)
def test_kept_by_init(line: str, make: Make) -> None:
    init = "def __init__(self, p):\n    self.gate_up_proj = p('gate_up_proj')\n"
    assert not escape_of(make(init + GOOD))
    owner = make(f"{init}    {line}\n{GOOD}")
    assert escape_of(owner) == "Mlp.__init__ does more than make it"


def test_subclasses(make: Make) -> None:
    good = make(GOOD)
    assert not escape_of(make("scale = 2", good))
    scaled = forward(MISUSES["scaled"])
    assert ELSEWHERE in escape_of(make(scaled, good))
    assert "takes __class__" in escape_of(make(forward("return super().forward(x) * 2"), good))
    assert ELSEWHERE in escape_of(make("scale = 2", make(scaled)))


def test_decorated(make: Make) -> None:
    import functools

    def plain(function: Any) -> Any:
        def wrapper(self: Any, x: Any) -> Any:
            return function(self, x)

        return wrapper

    def polite(function: Any) -> Any:
        return functools.wraps(function)(plain(function))

    assert "Mlp.wrapper takes function" in escape_of(make("@decorator\n" + GOOD, decorator=plain))
    assert "is wrapped by a decorator" in escape_of(make("@decorator\n" + GOOD, decorator=polite))
    assert "Mlp.forward is no plain method" in escape_of(
        make(GOOD + "\nforward = functools.partialmethod(forward)", functools=functools)
    )


def test_without_source() -> None:
    namespace: dict[str, Any] = {"Module": Module}
    source = f"class Mlp(Module):\n{textwrap.indent(GOOD, '    ')}"
    exec(source, namespace)
    assert escape_of(namespace["Mlp"]) == "Mlp.forward has no source that can be read"


def test_source_that_changed(make: Make, tmp_path: Path) -> None:
    owner = make(forward(MISUSES["scaled"]))
    (tmp_path / "mlp0.py").write_text(f"class Mlp(Base):\n{textwrap.indent(GOOD, '    ')}")
    assert escape_of(owner) == "Mlp.forward has no source that can be read"


def test_attributes_that_are_computed(make: Make) -> None:
    getter = "def __getattr__(self, name):\n    return 1\n"
    assert "Mlp has a __getattr__ of its own" in escape_of(make(getter + GOOD))
