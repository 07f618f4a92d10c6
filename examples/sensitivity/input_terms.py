"""Numbers of NVFP4 terms of the inputs, as parsed from the command line."""

from nvfp4_kernels.settings import MAX_TERMS


def parse_input_terms(written: str, calibrated: bool) -> tuple[int, ...]:
    """Parse comma-separated distinct numbers of terms; 0 stands for inputs in 16 bits.

    Raises:
        ValueError: a number is out of range or repeated, or ``calibrated`` is False and
            ``written`` is not ``"1"``.
    """
    numbers = [part.strip() for part in written.split(",")]
    known = {str(terms): terms for terms in range(MAX_TERMS + 1)}
    if any(number not in known for number in numbers) or len({*numbers}) < len(numbers):
        raise ValueError(
            f"input_terms: is {written!r}, must be numbers from 0 to {MAX_TERMS}, each once, with "
            "commas between; change --input-terms"
        )
    if numbers != ["1"] and not calibrated:
        raise ValueError(
            f"input_terms: is {written!r}, and inputs stay in 16 bits; give --calibrate"
        )
    return tuple(known[number] for number in numbers)
