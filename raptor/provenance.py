"""Where a result came from: the command, the versions, the machine and the time it took."""

from __future__ import annotations

import shlex
import sys
import time
from pathlib import Path
from typing import Any

import torch

from raptor.devices import device_name


def provenance(started: float, device: str | torch.device = "cpu") -> dict[str, Any]:
    """What every result file carries; `started` is `time.monotonic()` at the start of the work."""
    from importlib.metadata import PackageNotFoundError, version

    versions = {"torch": str(torch.__version__)}
    for package, name in (("raptor-vit", "raptor"), ("timm", "timm")):
        try:
            versions[name] = version(package)
        except PackageNotFoundError:
            continue
    name = Path(sys.argv[0]).name
    program = "raptor" if name in ("raptor", "__main__.py", "cli.py") else f"python {name}"
    return {
        "command": shlex.join([program, *sys.argv[1:]]),
        "versions": versions,
        "device": device_name(device),
        "seconds": round(time.monotonic() - started, 1),
    }
