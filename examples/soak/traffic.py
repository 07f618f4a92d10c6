"""Requests of every kind that a server receives, each with a verdict on its outcome."""

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import httpx
import openai

from examples.server import MODEL_NAME

# Verdicts: as expected; a reported error; neither an answer nor an error; an unexpected answer.
EXPECTED, ERROR, LOST, WRONG = "expected", "error", "lost", "wrong"

_LEAVE_SECONDS = 0.3  # at most, until a request is aborted
_MALFORMED: tuple[Mapping[str, Any], ...] = (
    {"prompt": "a", "max_tokens": -1},
    {"prompt": "a", "temperature": "hot"},
    {"prompt": {"text": "a"}},
    {"prompt": "a", "n": 0},
    {"prompt": "a", "top_p": 7},
    {"prompt": "a", "model": "no-such-model"},
    {"max_tokens": 1},
)


class _Lost(Exception):
    """Signal that a request ended without a complete answer, and without an error."""


class _Wrong(Exception):
    """Signal of an answer to a request that must be refused, or of an answer of the wrong form."""


@dataclass(frozen=True)
class Outcome:
    """Outcome of a request.

    Attributes:
        kind: kind of the request, see ``Traffic.kinds``.
        verdict: ``EXPECTED``, ``ERROR``, ``LOST`` or ``WRONG``.
        seconds: duration of the request.
        tokens: number of tokens generated and received.
        detail: description of an unexpected outcome.
    """

    kind: str
    verdict: str
    seconds: float
    tokens: int = 0
    detail: str = ""


@dataclass
class Traffic:
    """Generator of requests to a server.

    Attributes:
        client: ``openai.AsyncOpenAI`` that does not retry.
        text: token ids that prompts are cut from.
        max_model_len: maximum number of tokens that the server accepts for a request.
        prompt_tokens: maximum length of a prompt.
        output_tokens: maximum length of an answer.
        time_limit: seconds after which a request without an answer counts as lost.
        draw: random source of kinds, lengths and moments.
        has_full_length: whether answers have exactly ``output_tokens`` tokens; else a random number
            from 1 to that.
        streaming: set once a first token was received in a stream.
    """

    client: Any
    text: Sequence[int]
    max_model_len: int
    prompt_tokens: int
    output_tokens: int
    time_limit: float
    draw: random.Random
    has_full_length: bool = False
    streaming: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def kinds(self) -> dict[str, tuple[int, Callable[[], Awaitable[int]]]]:
        """Kinds of requests by name: share in twentieths, and function that sends a request."""
        return {
            "answer": (6, self._answer),
            "stream": (6, self._stream),
            "sampled, two answers": (2, self._sampled),
            "disconnect in a stream": (2, self._disconnect),
            "abort": (2, self._abort),
            "over-long prompt": (1, self._over_long),
            "malformed": (1, self._malformed),
        }

    async def any(self) -> Outcome:
        """Send one request of a random kind."""
        kinds = self.kinds
        [kind] = self.draw.choices(list(kinds), [weight for weight, _ in kinds.values()])
        return await self.one(kind)

    async def one(self, kind: str) -> Outcome:
        """Send one request of the given kind."""
        start, tokens, verdict, detail = time.monotonic(), 0, EXPECTED, ""
        try:
            async with asyncio.timeout(self.time_limit):
                tokens = await self.kinds[kind][1]()
        except TimeoutError:
            verdict, detail = LOST, f"no answer and no error in {self.time_limit:g} s"
        except _Lost as lost:
            verdict, detail = LOST, str(lost)
        except _Wrong as wrong:
            verdict, detail = WRONG, str(wrong)
        except (openai.APIError, httpx.HTTPError) as error:
            verdict, detail = ERROR, _said(error)
        return Outcome(kind, verdict, time.monotonic() - start, tokens, detail)

    async def greedy(self, prompts: Sequence[Sequence[int]], tokens: int) -> list[str]:
        """Greedy continuations of ``prompts`` by ``tokens`` tokens each, requested one by one."""
        answers = []
        for prompt in prompts:
            async with asyncio.timeout(self.time_limit):
                answers.append((await self._create(prompt, tokens)).choices[0].text)
        return answers

    async def _create(self, prompt: Any, tokens: int, **more: Any) -> Any:
        return await self.client.completions.create(
            model=MODEL_NAME, prompt=list(prompt), max_tokens=tokens,
            **{"temperature": 0, "extra_body": {"ignore_eos": True}} | more,
        )  # fmt: skip

    def _prompt(self) -> Sequence[int]:
        length = self.draw.randint(1, self.prompt_tokens)
        start = self.draw.randrange(len(self.text) - length)
        return self.text[start : start + length]

    def _tokens(self) -> int:
        least = self.output_tokens if self.has_full_length else 1
        return self.draw.randint(least, self.output_tokens)

    async def _answer(self) -> int:
        wanted = self._tokens()
        answer = await self._create(self._prompt(), wanted)
        return _whole(answer, wanted)

    async def _sampled(self) -> int:
        wanted = self._tokens()
        seed = self.draw.randrange(1 << 20)
        answer = await self._create(
            self._prompt(), wanted, n=2, temperature=0.8, seed=seed, logprobs=2
        )
        return _whole(answer, 2 * wanted, choices=2)

    async def _stream(self) -> int:
        wanted, got, reason = self._tokens(), 0, None
        async for part in await self._streaming(wanted):
            self.streaming.set()
            reason = part.choices[0].finish_reason or reason if part.choices else reason
            got = part.usage.completion_tokens if part.usage else got
        if reason is None:
            raise _Lost("the stream ended without a reason")
        if got != wanted:
            raise _Lost(f"the stream ended with {got} tokens of {wanted}")
        return got

    async def _disconnect(self) -> int:
        received, leave_after = 0, self.draw.randint(1, 3)
        stream = await self._streaming(self.output_tokens)
        async for part in stream:
            received += bool(part.choices)
            if received == leave_after:
                break
        await stream.close()
        if not received:
            raise _Lost("the stream ended before a token")
        return received

    async def _streaming(self, tokens: int) -> Any:
        return await self._create(
            self._prompt(), tokens, stream=True, stream_options={"include_usage": True}
        )

    async def _abort(self) -> int:
        request = asyncio.ensure_future(self._create(self._prompt(), self.output_tokens))
        done, _ = await asyncio.wait([request], timeout=self.draw.random() * _LEAVE_SECONDS)
        if done:
            return _whole(request.result(), self.output_tokens)
        request.cancel()
        with suppress(asyncio.CancelledError):
            await request
        return 0

    async def _over_long(self) -> int:
        excess = self.draw.randint(1, 100)
        length = self.max_model_len + excess
        prompt = [*self.text] * (length // len(self.text) + 1)
        await _refused(self._create(prompt[:length], 1), 400)
        return 0

    async def _malformed(self) -> int:
        body = {"model": MODEL_NAME} | dict(self.draw.choice(_MALFORMED))
        await _refused(self.client.post("/completions", body=body, cast_to=object), 400, 404, 422)
        return 0


def _said(error: BaseException) -> str:
    """Error message with its causes, as openai's connection error says only that it failed."""
    said = f"{type(error).__name__}: {error}"
    return f"{said} ({_said(error.__cause__)})" if error.__cause__ else said


async def _refused(request: Awaitable[Any], *statuses: int) -> None:
    """Wait for a refusal with one of ``statuses``; raise ``_Wrong`` for an answer."""
    try:
        await request
    except openai.APIStatusError as error:
        if error.status_code not in statuses:
            raise
        return
    raise _Wrong("was answered, must be refused")


def _whole(answer: Any, wanted: int, choices: int = 1) -> int:
    """Check that ``choices`` answers have ``wanted`` tokens in all; return the number of tokens."""
    got = answer.usage.completion_tokens
    if len(answer.choices) != choices or got != wanted:
        raise _Wrong(f"has {got} tokens of {wanted} in {len(answer.choices)} of {choices} answers")
    if any(choice.finish_reason is None for choice in answer.choices):
        raise _Lost("an answer without a reason to end")
    return int(got)
