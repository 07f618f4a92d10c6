"""Search of an engine's log for the kernels that ran and the reasons of a failure."""

import re

# vLLM hides the engine's own error behind this error.
NOT_THE_CAUSE = "initialization failed"
_ERROR = re.compile(r"(?:^|[\s\]])((?:\w+\.)*\w*(?:Error|Exception|Checkpoint|Option)): (.+)$")
_REFUSED = re.compile(r"^nvfp4-tc: refused: (.+)$", re.MULTILINE)
_KERNELS = re.compile(r"(nvfp4-tc: .+|Using \S+ for .*(?:GEMM|linear).*|Using .*attention.*)$")


def refusal(log: str) -> str:
    """Reason, from a log, why ``nvfp4-tc`` refused a model; empty if the log has no refusal."""
    refused = _REFUSED.search(log)
    return refused[1].rstrip() if refused else ""


def root_cause(log: str) -> str:
    """Cause of a failure, from a log: reason of the refusal, else the first error, else empty."""
    if refused := refusal(log):
        return refused
    lines = [line.rstrip() for line in log.splitlines()]
    # Lines logged as errors go before warnings that mention an error.
    for line in [*(line for line in lines if " ERROR " in line), *lines]:
        match = _ERROR.search(line)
        if match and NOT_THE_CAUSE not in match[2]:
            return f"{match[1].rpartition('.')[2]}: {match[2]}"
    return ""


def kernel_lines(log: str) -> list[str]:
    """Lines of a log that name the running kernels, each once."""
    found = [match[1] for line in log.splitlines() if (match := _KERNELS.search(line.rstrip()))]
    return list(dict.fromkeys(found))
