"""Cases: batches of requests to an engine."""

import re
from collections.abc import Sequence
from dataclasses import dataclass


class BadOption(ValueError):
    """Error for an unusable option; the message gives name, value and accepted values."""


@dataclass(frozen=True)
class Case:
    """A batch of requests that are sent at once.

    Attributes:
        batch: number of requests.
        prompt_tokens, output_tokens: tokens of each request; with one output token the case
            measures prefill.
    """

    batch: int
    prompt_tokens: int
    output_tokens: int

    @property
    def prefill(self) -> bool:
        """Whether the case measures prefill."""
        return self.output_tokens == 1

    @property
    def name(self) -> str:
        """Unique name among the cases of a run."""
        return f"{self.batch}x{self.prompt_tokens}+{self.output_tokens}"

    @property
    def title(self) -> str:
        """Title to display."""
        if self.prefill:
            return f"prefill {self.batch} × {self.prompt_tokens}"
        return f"decode batch {self.batch}"

    @property
    def tokens(self) -> int:
        """Number of tokens that the rate counts: of the prompts for prefill, else generated."""
        return self.batch * (self.prompt_tokens if self.prefill else self.output_tokens)

    @property
    def length(self) -> int:
        """Number of tokens of a finished request, prompt included."""
        return self.prompt_tokens + self.output_tokens


def make_cases(
    batch_sizes: Sequence[int], prompt_tokens: int, output_tokens: int, prefills: Sequence[str]
) -> tuple[Case, ...]:
    """Decode cases, then prefill cases, written ``"32x1024"``: batch size and prompt tokens.

    Raises:
        BadOption: fewer than 2 output tokens for decode, a malformed or repeated case, or no case.
    """
    if batch_sizes and output_tokens < 2:
        raise BadOption(
            f"--output-tokens: is {output_tokens}, must be at least 2; measure prompts by "
            "themselves with --prefill"
        )
    cases = [Case(batch, prompt_tokens, output_tokens) for batch in batch_sizes]
    for text in prefills:
        match = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)", text)
        if not match:
            raise BadOption(f"--prefill: is {text!r}, must be BATCHxTOKENS such as 32x1024")
        cases.append(Case(int(match[1]), int(match[2]), 1))
    if not cases:
        raise BadOption("--batch-sizes: are none, nor is there a --prefill; give one of them")
    for case in cases:
        if cases.count(case) > 1:
            raise BadOption(f"{case.title}: is there twice; name it once")
    return tuple(cases)
