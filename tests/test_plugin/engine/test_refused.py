"""Output of a refusal: one marked line, the last line, whichever process refused."""

import logging
import logging.config
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

import pytest
from pydantic import BaseModel, field_validator
from safetensors.torch import load_file, save_file

from examples.server import ENVIRONMENT, free_port
from tests import limits
from tests.forking_vllm import forking_command
from vllm_fp4_plugin.engine import refusal
from vllm_fp4_plugin.engine.refusal import MARK
from vllm_fp4_plugin.formats import UnsupportedCheckpoint

NORM = "model.norm.weight"
VLLM = logging.getLogger("vllm")
WORKERS = logging.getLogger("vllm.v1.executor.multiproc_executor")


@pytest.fixture
def front_end(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """Process that reports refusals; yields the folder where workers leave refusals in a file."""
    monkeypatch.setattr(refusal.tempfile, "gettempdir", lambda: str(tmp_path))
    monkeypatch.setattr(sys, "excepthook", lambda *_: print("traceback", file=sys.stderr))
    monkeypatch.setenv(refusal.VARIABLE, "")
    # Log records go nowhere; without any handler, logging itself would print them.
    for name, value in {"handlers": [logging.NullHandler()], "level": VLLM.level,
                        "propagate": False}.items():  # fmt: skip
        monkeypatch.setattr(VLLM, name, value)
    refusal.register()
    refusal.tell_last()
    yield tmp_path
    refusal._remove()


def refuse(message: str = "layer: is odd,\n must be even") -> None:
    raise UnsupportedCheckpoint(message)


def logged(error: Exception) -> None:
    """Log an error as a worker of vLLM does."""
    try:
        raise error
    except Exception:
        WORKERS.exception("WorkerProc failed to start.")


def ended(capsys: pytest.CaptureFixture[str], function=refuse) -> str:
    """Standard error of a process that ends with the function's exception."""
    try:
        function()
    except Exception as error:
        sys.excepthook(type(error), error, error.__traceback__)
    return capsys.readouterr().err


def command(function) -> object:
    """Function that calls ``function`` from a module of vLLM's commands."""
    module = ModuleType("vllm.entrypoints.cli.main")
    vars(module)["called"] = function
    exec("def main(): called()", vars(module))
    return vars(module)["main"]


def engine_failed() -> None:
    raise RuntimeError("Engine core initialization failed. See root cause above.")


# --- errors that count as refusals --------------------------------------------------------------


def test_a_refusal_is_found_in_what_it_became() -> None:
    class Config(BaseModel):
        value: int

        @field_validator("value")
        @classmethod
        def refuse(cls, value: int) -> int:
            refuse("layer: is odd")
            return value

    def wrapped() -> None:
        try:
            refuse("layer: is odd")
        except ValueError as error:
            raise RuntimeError("vLLM's") from error

    for function in (refuse, wrapped, lambda: Config(value=1)):
        with pytest.raises((ValueError, RuntimeError)) as caught:
            function()
        assert refusal.cause(caught.value).startswith("layer: is odd")


def test_what_is_of_others_is_none() -> None:
    def hidden() -> None:
        try:
            refuse()
        except ValueError:
            raise ValueError("theirs") from None

    with pytest.raises(ValueError, match="theirs") as caught:
        hidden()
    assert refusal.cause(caught.value) == ""
    assert refusal.cause(OSError("no memory")) == ""


# --- in this process ----------------------------------------------------------------------------


def test_a_program_keeps_its_traceback(front_end: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert ended(capsys) == f"traceback\n{MARK}layer: is odd, must be even\n"


def test_a_command_has_one_line(front_end: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert ended(capsys, command(refuse)) == f"{MARK}layer: is odd, must be even\n"


def test_who_debugs_sees_the_traceback(
    front_end: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(refusal, "_is_debugging", lambda: True)
    said = ended(capsys, command(refuse))
    assert said == f"traceback\n{MARK}layer: is odd, must be even\n"


def test_logging_may_be_configured_anew(
    front_end: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    handler = {"class": "logging.NullHandler"}
    logging.config.dictConfig(
        {
            "version": 1,
            "disable_existing_loggers": False,
            "handlers": {"none": handler},
            "loggers": {"vllm": {"handlers": ["none"]}},
        }
    )
    logged(UnsupportedCheckpoint("told"))
    assert ended(capsys, command(engine_failed)) == f"{MARK}told\n"


def test_other_errors_are_left_alone(front_end: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert ended(capsys, command(engine_failed)) == "traceback\n"


# --- from another process -----------------------------------------------------------------------


def test_the_first_rank_that_refuses_is_told_of(
    front_end: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for error in (OSError("theirs"), UnsupportedCheckpoint("first"), UnsupportedCheckpoint("next")):
        logged(error)
    assert ended(capsys, command(engine_failed)) == f"{MARK}first\n"


def test_another_engine_starts_afresh(front_end: Path, capsys: pytest.CaptureFixture[str]) -> None:
    logged(UnsupportedCheckpoint("of an engine before"))
    refusal.tell_last()
    assert list(front_end.iterdir()) == []
    assert ended(capsys, command(engine_failed)) == "traceback\n"


@pytest.mark.parametrize("name", refusal._LOGGERS)
def test_what_logs_is_there(name: str) -> None:
    source = Path(find_spec(name).origin).read_text()
    assert "logger.exception(" in source


def test_without_a_front_end_nothing_is_left(
    front_end: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(refusal.VARIABLE)
    logged(UnsupportedCheckpoint("told"))
    assert list(front_end.iterdir()) == []


def test_registering_twice_leaves_once(front_end: Path) -> None:
    refusal.register()
    assert WORKERS.filters.count(refusal._leave) == 1


@pytest.mark.slow
def test_a_worker_refuses_and_the_server_says_so_last(modelopt: Path, tmp_path: Path) -> None:
    tensors = load_file(modelopt / "model.safetensors")
    tensors[NORM][0] = float("nan")
    broken = tmp_path / "broken"
    broken.mkdir()
    for file in modelopt.iterdir():
        (broken / file.name).symlink_to(file)
    (broken / "model.safetensors").unlink()
    save_file(tensors, broken / "model.safetensors", metadata={"format": "pt"})
    environment = {**ENVIRONMENT, "VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen(
            forking_command(broken, free_port(), "nvfp4-tc"), stdout=log, stderr=log,
            env=os.environ | environment, start_new_session=True,
        )  # fmt: skip
        try:
            assert process.wait(limits.PROCESS) == 1
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    said = (tmp_path / "log").read_text()
    assert f"UnsupportedCheckpoint: {broken}" in said  # the worker's own traceback stays
    assert "wait_for_engine_startup" not in said  # the front end's has no cause in it
    # Python's process for shared memory may warn of segments that vLLM left, after all others
    # ended.
    lines = [line for line in said.splitlines() if "resource_tracker" not in line]
    assert lines[-1].startswith(f"{MARK}{broken / 'model.safetensors'}: {NORM}: holds")
    assert not list(Path(tempfile.gettempdir()).glob(f"nvfp4-tc-refused-{process.pid}-*"))
