"""Summary of verdicts: a row for each kind of fault of each kind of tensor, file or field."""

import re
from collections import Counter, defaultdict
from collections.abc import Sequence

from tests.faults.judge import Verdict

OUTCOMES = "refused", "refused by vLLM", "served alike", "served otherwise"
_SHOWN = 150  # characters of a message


def summary(verdicts: Sequence[Verdict]) -> list[str]:
    """Lines of a Markdown table."""
    groups: dict[tuple[str, str], list[Verdict]] = defaultdict(list)
    for verdict in verdicts:
        groups[_place(verdict.fault.where), _kind(verdict)].append(verdict)
    rows = ["| where | fault | of these refused | by vLLM | served | says, for example |"]
    rows.append("|---|---|---|---|---|---|")
    for (place, kind), found in sorted(groups.items()):
        count = Counter(verdict.outcome for verdict in found)
        ours = [v.message for v in found if v.outcome == "refused"] or [""]
        said = " ".join(re.sub(r"\(ctx.*", "", ours[0]).split()).replace("|", "\\|")
        shown = said if len(said) <= _SHOWN else f"{said[:_SHOWN]}…"
        served = count["served alike"] + count["served otherwise"]
        figures = f"{count['refused']} of {len(found)} | {count['refused by vLLM'] or ''} |"
        rows.append(f"| {place} | {kind} | {figures} {served or ''} | {shown} |")
    return rows


def _place(where: str) -> str:
    file, _, field = where.partition(" ")
    if field and file == "config.json":
        return "sizes" if "." not in field else "`quantization_config`"
    if "," in where or where.endswith((".json", "model.safetensors")):
        return f"`{where.partition(',')[0]}`"
    layer = re.sub(r".*\.(\w+_proj|\w*norm|lm_head|embed_tokens|attn)\.", "", where)
    module = re.search(r"(\w+_proj|\w*norm|lm_head|embed_tokens|attn)\.\w+$", where)
    if module is not None and module[1].endswith("_proj"):
        return f"NVFP4 layers' `{layer}`"
    return f"others' `{layer}`"


def _kind(verdict: Verdict) -> str:
    fault = verdict.fault
    if not fault.where.startswith("config.json "):
        return fault.kind
    return "another value, type, or none" if fault.meaning == "none" else "says nothing else"
