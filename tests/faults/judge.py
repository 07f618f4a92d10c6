"""Verdict on a broken checkpoint: refused, served like the sound one, or served differently."""

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pydantic import ValidationError

from nvfp4_kernels.checks import InvalidArgument
from tests.engine import Run, run
from tests.faults.faults import Fault
from vllm_fp4_plugin.formats import UnsupportedCheckpoint

Outcome = Literal["refused", "refused by vLLM", "served alike", "served otherwise"]
OURS = (UnsupportedCheckpoint, InvalidArgument)


@dataclass(frozen=True)
class Verdict:
    """Outcome of a fault.

    Attributes:
        fault: fault of the checkpoint.
        outcome: who refused the checkpoint, or how it was served.
        message: first line of the refusal.
        seconds: seconds until the outcome.
    """

    fault: Fault
    outcome: Outcome
    message: str
    seconds: float

    @property
    def is_right(self) -> bool:
        """Whether the fault was refused, or served with a valid meaning."""
        if self.outcome == "served alike":
            return self.fault.meaning != "none"
        return self.outcome != "served otherwise" or self.fault.meaning == "another"


def judge(fault: Fault, broken: Path, sound: Run) -> Verdict:
    """Start an engine on a broken checkpoint, and compare its answers with the sound engine's."""
    start = time.monotonic()
    try:
        found = run(str(broken))
    except Exception as error:  # vLLM's, too
        ours = _of_ours(error)
        outcome: Outcome = "refused by vLLM" if ours is None else "refused"
        message = f"{type(error).__name__}: {error}" if ours is None else str(ours)
        said = message.replace(str(broken), "MODEL")
        return Verdict(fault, outcome, said, time.monotonic() - start)
    alike = found.logprobs == sound.logprobs
    outcome = "served alike" if alike else "served otherwise"
    return Verdict(fault, outcome, "", time.monotonic() - start)


def _of_ours(error: Exception) -> Exception | None:
    """Refusal by the plugin, raised directly or wrapped by pydantic; None for any other error."""
    if isinstance(error, OURS):
        return error
    details = error.errors() if isinstance(error, ValidationError) else ()
    causes = [detail.get("ctx", {}).get("error") for detail in details]
    return next((cause for cause in causes if isinstance(cause, OURS)), None)
