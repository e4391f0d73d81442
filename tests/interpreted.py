"""Scripts that run Triton's kernels on the CPU."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest


def check_interpreted(script: str) -> None:
    """Run a script under Triton's interpreter, in a process of its own; it must print `same`."""
    pytest.importorskip("triton")
    done = subprocess.run(
        [sys.executable, "-c", script], env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True
    )
    assert done.stdout.strip() == "same", done.stderr[-2000:]
