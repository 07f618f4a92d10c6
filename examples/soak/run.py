"""Soak test: load a server, kill its engine, start another server, and compare the answers."""

import argparse
import asyncio
import dataclasses
import inspect
import random
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil

from examples.server import ENVIRONMENT, Server, ServerError, free_port, running, vllm_command
from examples.soak import memory
from examples.soak.memory import Sample
from examples.soak.results import MEGABYTE, Results
from examples.soak.traffic import Traffic

ANSWERS = 8  # number of compared greedy answers
_SETTLE_SECONDS = 60.0  # for aborted requests to leave the engine
_END_SECONDS = 60.0  # for a server without its engine to end
_FIRST_TOKEN_SECONDS = 30.0  # until the engine is killed, at most
# Limit for reused connections. A server closes a connection that was idle for longer, perhaps just
# at its reuse: vLLM's after 5 s, and on a busy machine, where a client may read an answer a minute
# late, after 60 s too.
_IDLE_SECONDS = 2.0
_SERVER_IDLE_SECONDS = 3600
_GAUGES = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc")


@dataclass(frozen=True)
class Settings:
    """Settings of a run.

    Attributes:
        model: served model.
        quantization: vLLM's ``--quantization``; None: the checkpoint's own.
        requests: maximum number of requests.
        seconds: maximum duration of the load.
        at_once: number of requests in flight.
        prompt_tokens: maximum length of a prompt.
        output_tokens: maximum length of an answer.
        seed: seed of all random choices.
        server_options: further options of ``vllm serve``.
        server_time_limit: seconds until a server must be ready.
        request_time_limit: seconds after which a request is lost.
        sample_seconds: maximum time between samples of memory.
    """

    model: str
    quantization: str | None
    requests: int
    seconds: float
    at_once: int
    prompt_tokens: int
    output_tokens: int
    seed: int
    server_options: Sequence[str]
    server_time_limit: float
    request_time_limit: float
    sample_seconds: float = 1.0


def run(settings: Settings, results: Results, out: Path, say: Callable[[str], None]) -> None:
    """Load a server, kill its engine, start another server; fill ``results`` on the way.

    ``say`` is called with lines about the progress.

    Raises:
        ServerError: a server could not be started, or did not answer while idle.
        ValueError: ``settings.prompt_tokens`` is too large for the model.
    """
    with _serving(settings, out / "server-1.log") as server:
        say(f"ready after {server.ready_seconds:.1f} s")
        asyncio.run(_soak(server, settings, results, say))
    with _serving(settings, out / "server-2.log") as server:
        results.kill.ready_seconds = server.ready_seconds
        say(f"another server is ready after {server.ready_seconds:.1f} s")
        results.answers["after the restart"] = asyncio.run(_restarted(server, settings))


def _serving(settings: Settings, log: Path) -> Any:
    port = free_port()
    command = vllm_command(settings.model, port, settings.quantization, settings.server_options)
    environment = ENVIRONMENT | {"VLLM_HTTP_TIMEOUT_KEEP_ALIVE": str(_SERVER_IDLE_SECONDS)}
    return running(command, port, log, settings.server_time_limit, environment)


async def _soak(
    server: Server, settings: Settings, results: Results, say: Callable[[str], None]
) -> None:
    async with _client(server, settings) as client:
        traffic = await _traffic(server, client, settings)
        prompts = _prompts(traffic)
        results.answers["before"] = await _idle(traffic, prompts, settings)
        await _load(traffic, server, settings, results, say)
        results.left = await _left(server)
        results.answers["after the load"] = await _idle(traffic, prompts, settings)
        await _kill(traffic, server, settings, results)
    ended = results.kill.ended_seconds
    how = "did not end" if ended is None else f"ended after {ended:.1f} s"
    say(f"the engine was killed; its server {how}")


async def _restarted(server: Server, settings: Settings) -> list[str]:
    async with _client(server, settings) as client:
        traffic = await _traffic(server, client, settings)
        return await _idle(traffic, _prompts(traffic), settings)


def _client(server: Server, settings: Settings) -> Any:
    import openai

    connections = httpx.Limits(
        max_connections=None,
        max_keepalive_connections=settings.at_once,
        keepalive_expiry=_IDLE_SECONDS,
    )
    return openai.AsyncOpenAI(
        base_url=f"{server.url}/v1",
        api_key="none",
        max_retries=0,
        # Proxies of the environment are not for this machine; this program itself reports lost
        # requests.
        http_client=httpx.AsyncClient(trust_env=False, limits=connections, timeout=None),  # noqa: S113
        timeout=None,
    )


async def _traffic(server: Server, client: Any, settings: Settings) -> Traffic:
    async with httpx.AsyncClient(trust_env=False, timeout=60) as http:
        body = {"prompt": inspect.getsource(argparse)[:50_000], "add_special_tokens": False}
        response = await http.post(f"{server.url}/tokenize", json=body)
        known = response.raise_for_status().json()
    room = known["max_model_len"] - settings.prompt_tokens
    most = min(known["max_model_len"] - 1, len(known["tokens"]) // 2)
    if settings.prompt_tokens > most:
        raise ValueError(
            f"--prompt-tokens: is {settings.prompt_tokens}, must be at most {most} here; lower it"
        )
    return Traffic(
        client,
        known["tokens"],
        known["max_model_len"],
        prompt_tokens=settings.prompt_tokens,
        output_tokens=min(settings.output_tokens, room),
        time_limit=settings.request_time_limit,
        draw=random.Random(settings.seed),
    )


def _prompts(traffic: Traffic) -> list[Sequence[int]]:
    length = traffic.prompt_tokens
    starts = range(0, len(traffic.text) - length, (len(traffic.text) - length) // ANSWERS)
    return [traffic.text[start : start + length] for start in [*starts][:ANSWERS]]


async def _idle(
    traffic: Traffic, prompts: Sequence[Sequence[int]], settings: Settings
) -> list[str]:
    """Greedy answers of an otherwise idle server."""
    import openai

    try:
        return await traffic.greedy(prompts, traffic.output_tokens)
    except (openai.APIError, TimeoutError) as error:
        raise ServerError(
            f"vllm serve: an idle server gave no answer ({type(error).__name__}: {error}); "
            "its log tells more"
        ) from error


async def _load(
    traffic: Traffic,
    server: Server,
    settings: Settings,
    results: Results,
    say: Callable[[str], None],
) -> None:
    start, begun = time.monotonic(), 0

    async def user() -> None:
        nonlocal begun
        while begun < settings.requests and time.monotonic() - start < settings.seconds:
            begun += 1
            results.outcomes.append(await traffic.any())

    async def sample() -> None:
        told = 0.0
        while True:
            seconds, done = time.monotonic() - start, len(results.outcomes)
            results.samples.append(Sample(seconds, done, memory.tree_bytes(server.pid)))
            if seconds - told >= 30:
                told = seconds
                megabytes = results.samples[-1].bytes / MEGABYTE
                say(f"{done:,} requests in {seconds:.0f} s, {megabytes:,.0f} MB")
            await asyncio.sleep(memory.until_next(seconds, settings.sample_seconds))

    sampling = asyncio.ensure_future(sample())
    await asyncio.gather(*(user() for _ in range(settings.at_once)))
    if sampling.done():
        sampling.result()  # raises the sampling's exception
    sampling.cancel()
    results.seconds = time.monotonic() - start
    say(f"{len(results.outcomes):,} requests in {results.seconds:.0f} s")


async def _left(server: Server) -> dict[str, float]:
    """Gauges of the engine that are not zero within ``_SETTLE_SECONDS``, by name."""
    deadline = time.monotonic() + _SETTLE_SECONDS
    async with httpx.AsyncClient(trust_env=False, timeout=60) as http:
        while True:
            text = (await http.get(f"{server.url}/metrics")).raise_for_status().text
            found = {name: _gauge(text, name) for name in _GAUGES}
            left = {name: value for name, value in found.items() if value}
            if not left or time.monotonic() > deadline:
                return left
            await asyncio.sleep(0.2)


def _gauge(text: str, name: str) -> float:
    """Sum of a gauge over engines, from Prometheus's text; NaN if the gauge is missing."""
    lines = [line for line in text.splitlines() if line.startswith((f"{name}{{", f"{name} "))]
    return sum(float(line.rpartition(" ")[2]) for line in lines) if lines else float("nan")


async def _kill(traffic: Traffic, server: Server, settings: Settings, results: Results) -> None:
    """Kill the engine of a busy server; wait for the server to end, ``_END_SECONDS`` at most."""
    engine = memory.engine_process(server.pid)
    if engine is None:
        raise ServerError("vllm serve: has no engine process; leave VLLM_ENABLE_V1_MULTIPROCESSING")
    results.kill.engine = engine.name()
    # As long as possible, so that the requests are still under way.
    room = traffic.max_model_len - traffic.prompt_tokens
    long = dataclasses.replace(
        traffic, output_tokens=room, has_full_length=True, streaming=asyncio.Event()
    )
    kinds = ["stream", "answer"] * settings.at_once
    requests = [asyncio.ensure_future(long.one(kind)) for kind in kinds[: settings.at_once]]
    with suppress(TimeoutError):
        await asyncio.wait_for(long.streaming.wait(), _FIRST_TOKEN_SECONDS)
    under_way = [request for request in requests if not request.done()]
    # Requests that ended before the kill are judged like any other: an error is a failure.
    results.outcomes += [request.result() for request in requests if request.done()]
    engine.kill()
    killed = time.monotonic()
    results.kill.outcomes = await asyncio.gather(*under_way)
    while time.monotonic() - killed < _END_SECONDS:
        if not _runs(server.pid):
            results.kill.ended_seconds = time.monotonic() - killed
            return
        await asyncio.sleep(0.05)


def _runs(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
