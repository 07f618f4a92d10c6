"""Step 3.7's config, with the field names and the config class of the hub's checkpoints."""

import json
from pathlib import Path
from typing import Any

_CLASS = "Step3p7Config"
_CODE = f"""
from transformers import PretrainedConfig


class {_CLASS}(PretrainedConfig):
    model_type = "step3p7"

    def __init__(self, vision_config=None, text_config=None, projector_bias=False, **kwargs):
        self.vision_config = PretrainedConfig(**(vision_config or {{}}))
        self.text_config = PretrainedConfig(**(text_config or {{}}))
        self.projector_bias = projector_bias
        super().__init__(**kwargs)
"""


def surround(directory: Path) -> None:
    """Add to a checkpoint the config fields that vLLM reads, and the code of the config class."""
    file = directory / "config.json"
    config = json.loads(file.read_text())
    config["auto_map"] = {"AutoConfig": f"configuration.{_CLASS}"}
    config["text_config"] |= _text(config["text_config"])
    config["vision_config"] |= _vision(config["vision_config"])
    file.write_text(json.dumps(config, indent=2))
    (directory / "configuration.py").write_text(_CODE)


def _text(config: dict[str, Any]) -> dict[str, Any]:
    sparse = [i for i, kind in enumerate(config["mlp_layer_types"]) if kind == "sparse"]
    return {
        "architectures": ["Step3p5ForCausalLM"],
        "num_attention_groups": config["num_key_value_heads"],
        "moe_num_experts": config["n_routed_experts"],
        "moe_top_k": config["num_experts_per_tok"],
        "moe_layers_enum": ",".join(map(str, sparse)),
        "moe_router_activation": "sigmoid",
        "use_moe_router_bias": True,
        "need_fp32_gate": True,
        "norm_expert_weight": True,
        "att_impl_type": "GQA",
        "use_head_wise_attn_gate": True,
        "rope_theta": 10000.0,
        "rope_scaling": None,
        "attention_other_setting": {
            "attention_type": "sliding_attention",
            "num_attention_heads": config["num_attention_heads"],
            "num_attention_groups": config["num_key_value_heads"],
            "head_dim": config["head_dim"],
        },
    }


def _vision(config: dict[str, Any]) -> dict[str, Any]:
    return {
        "width": config["hidden_size"],
        "layers": config["num_hidden_layers"],
        "heads": config["num_attention_heads"],
        "ls_init_value": config["layer_scale_init_value"],
        "output_dim": None,
        "use_abs_posemb": True,
        "use_cls_token": False,
        "use_rope2d": True,
        "use_ln_pre": True,
        "use_ln_post": False,
    }
