"""Reader of a file that lists the linears to leave unquantised."""

from pathlib import Path

from vllm_fp4_plugin.quantizer.errors import QuantizerError


def read_patterns(file: Path) -> list[str]:
    """Read patterns, one per line of a UTF-8 file; ``#``, first or after a space, starts a comment.

    Raises:
        QuantizerError: the file is missing, not UTF-8, or holds no pattern.
    """
    if not file.is_file():
        raise QuantizerError(f"ignore_file: {file} is not a file; give a list of patterns")
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise QuantizerError(f"ignore_file: {file} is not UTF-8 ({error}); convert it") from error
    patterns = [pattern for line in lines if (pattern := f" {line}".split(" #")[0].strip())]
    if not patterns:
        raise QuantizerError(
            f"ignore_file: {file} holds no pattern; write one a line, or leave out --ignore-file"
        )
    return patterns
