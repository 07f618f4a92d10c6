"""Summary table of verdicts: a row per kind of tensor, per file and per part of the config."""

import re
from collections import Counter, defaultdict
from collections.abc import Sequence

from tests.faults.judge import Verdict

_SHOWN = 150  # characters of a message


def summary(verdicts: Sequence[Verdict]) -> list[str]:
    """Lines of a Markdown table."""
    groups: dict[tuple[str, str], list[Verdict]] = defaultdict(list)
    for verdict in verdicts:
        groups[_place(verdict.fault.where), _field_faults(verdict)].append(verdict)
    rows = ["| where | faults | refused | refused by vLLM | served | message, for example |"]
    rows.append("|---|---|---|---|---|---|")
    for (place, field_faults), found in sorted(groups.items()):
        count = Counter(verdict.outcome for verdict in found)
        kinds = field_faults or ", ".join(sorted({verdict.fault.kind for verdict in found}))
        messages = [v.message for v in found if v.outcome == "refused"] or [""]
        message = " ".join(re.sub(r"\(ctx.*", "", messages[0]).split()).replace("|", "\\|")
        shown = message if len(message) <= _SHOWN else f"{message[:_SHOWN]}…"
        served = count["served alike"] + count["served otherwise"]
        figures = f"{count['refused']} of {len(found)} | {count['refused by vLLM'] or ''}"
        rows.append(f"| {place} | {kinds} | {figures} | {served or ''} | {shown} |")
    return rows


def _place(where: str) -> str:
    file, _, field = where.partition(" ")
    if field and file == "config.json":
        return "sizes" if "." not in field else "`quantization_config`"
    if "," in where or where.endswith((".json", "model.safetensors")):
        return f"`{where.partition(',')[0]}`"
    tensor = re.search(r"(\w+_proj|\w*norm|lm_head|embed_tokens|attn)\.(\w+)$", where)
    if tensor is None:
        return f"`{where.removesuffix('_extra')}` of other layers"
    layer, name = tensor[1], tensor[2].removesuffix("_extra")
    return f"`{name}` of {'NVFP4' if layer.endswith('_proj') else 'other'} layers"


def _field_faults(verdict: Verdict) -> str:
    fault = verdict.fault
    if not fault.where.startswith("config.json "):
        return ""
    if fault.meaning == "none":
        return "a field has another value or type, or is absent"
    return "the same, where the field decides nothing"
