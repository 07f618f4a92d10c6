"""Startup code for every process of a run: ``sitecustomize.py``, found through ``PYTHONPATH``."""

import os
from pathlib import Path

FOLDER = str(Path(__file__).parent)


def path() -> str:
    """``PYTHONPATH`` with this folder in front."""
    before = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    return os.pathsep.join([FOLDER, *(folder for folder in before if folder not in ("", FOLDER))])
