"""``python -m vllm_fp4_plugin doctor``: what is installed, and which commands work with it."""


def doctor() -> None:
    """Print what is installed, whether it was tried together, and what works here.

    The exit status is 1 where vllm serve would not start.
    """
    from vllm_fp4_plugin.commands import doctor

    doctor.doctor()
