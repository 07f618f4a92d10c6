"""``python -m tests.faults``: see the package."""

import argparse
import os
import sys
import tempfile
from collections import Counter
from pathlib import Path

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_LOGGING_LEVEL": "CRITICAL"}
os.environ["HF_HUB_OFFLINE"] = "1"

from tests import tiny_llama
from tests.engine import inspect_models_here, run
from tests.faults.faults import faults, struck
from tests.faults.judge import Verdict, judge
from tests.faults.summary import summary
from vllm_fp4_plugin.quantizer.checkpoint import quantize_checkpoint


def main() -> None:
    """Print a line for every fault; exit with 1 if a broken checkpoint was served."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    formats = "modelopt", "compressed-tensors"
    parser.add_argument("--format", nargs="+", choices=formats, default=formats)
    parser.add_argument("--only", nargs="+", default=[""], help="parts of faults' names")
    parser.add_argument("--table", type=Path, help="Markdown file for a table of each format")
    given = parser.parse_args()
    inspect_models_here()
    verdicts: dict[str, list[Verdict]] = {}
    with tempfile.TemporaryDirectory() as directory:
        folder = Path(directory)
        text = folder / "text"
        text.write_text(tiny_llama.TEXT * 20)
        source = tiny_llama.save(folder / "bf16")
        for name in given.format:
            sound = folder / name
            quantize_checkpoint(source, sound, format=name, calibrate=text, seq_len=64)
            expected = run(str(sound))
            of_format = verdicts.setdefault(name, [])
            for fault in faults(sound):
                if not any(part in fault.name for part in given.only):
                    continue
                verdict = judge(fault, struck(fault, sound, folder / "broken"), expected)
                of_format.append(verdict)
                mark = " " if verdict.is_right else "!"
                print(
                    f"{mark} {name} | {fault.name} | {verdict.outcome} | {verdict.seconds:.1f} s | "
                    f"{verdict.message[:400]!r}",
                    flush=True,
                )
    if given.table is not None:
        tables = [[f"## {name}", "", *summary(found), ""] for name, found in verdicts.items()]
        given.table.write_text("\n".join(line for table in tables for line in table))
    judged = [verdict for found in verdicts.values() for verdict in found]
    count = Counter(verdict.outcome for verdict in judged)
    print(f"{len(judged)} faults: {', '.join(f'{n} {name}' for name, n in count.items())}")
    sys.exit(not all(verdict.is_right for verdict in judged))


if __name__ == "__main__":
    main()
