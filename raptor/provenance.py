"""Where a result came from: the command, the versions, the machine and the time it took."""

from __future__ import annotations

import shlex
import sys
import time
from pathlib import Path
from typing import Any

import torch

from raptor.devices import device_name


def versions() -> dict[str, str]:
    """Of torch, and of raptor and timm where they are installed as packages."""
    from importlib.metadata import PackageNotFoundError, version

    found = {"torch": str(torch.__version__)}
    for package, name in (("raptor-vit", "raptor"), ("timm", "timm")):
        try:
            found[name] = version(package)
        except PackageNotFoundError:
            continue
    return found


def provenance(started: float, device: str | torch.device = "cpu") -> dict[str, Any]:
    """What every result file carries; `started` is `time.monotonic()` at the start of the work."""
    name = Path(sys.argv[0]).name
    program = "raptor" if name in ("raptor", "__main__.py", "cli.py") else f"python {name}"
    return {
        "command": shlex.join([program, *sys.argv[1:]]),
        "versions": versions(),
        "device": device_name(device),
        "seconds": round(time.monotonic() - started, 1),
    }
