"""What becomes of a checkpoint with a fault: refused, served as if it had none, or worse."""

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
    """What became of a fault.

    Attributes:
        fault: of the checkpoint.
        outcome: what was done with it.
        message: of the refusal, its first line.
        seconds: until then.
    """

    fault: Fault
    outcome: Outcome
    message: str
    seconds: float

    @property
    def is_right(self) -> bool:
        """Whether nothing was served that should not be."""
        if self.outcome == "served alike":
            return self.fault.meaning != "none"
        return self.outcome != "served otherwise" or self.fault.meaning == "another"


def judge(fault: Fault, broken: Path, sound: Run) -> Verdict:
    """Start an engine on a checkpoint with a fault, and compare it with the sound one's."""
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
    """The refusal of ours that an error is, or that pydantic has wrapped."""
    if isinstance(error, OURS):
        return error
    details = error.errors() if isinstance(error, ValidationError) else ()
    causes = [detail.get("ctx", {}).get("error") for detail in details]
    return next((cause for cause in causes if isinstance(cause, OURS)), None)
