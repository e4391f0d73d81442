"""Scripts that run Triton's kernels on the CPU."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest


def check_interpreted(*scripts: str) -> None:
    """Run scripts one after the other under Triton's interpreter, in one process of their own; none may fail."""
    pytest.importorskip("triton")
    code = "\n".join([*scripts, "print('same')"])
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert done.stdout.strip() == "same", done.stderr[-2000:]
