"""``python -m vllm_fp4_plugin doctor``: what is installed, and whether vLLM could serve with it."""


def doctor() -> None:
    """Print versions and devices, each with a verdict: ok, wrong or unknown, and the remedy.

    The exit status is 1 where ``vllm serve`` would not start.
    """
    from vllm_fp4_plugin.commands.diagnosis import diagnose

    diagnose()
