"""Where a result came from: the command, the versions, the machine and the time it took."""

from __future__ import annotations

import shlex
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from raptor.devices import device_name
from raptor.run import Record


@dataclass(frozen=True)
class Provenance(Record):
    """Where a result came from."""

    command: str | None = None
    versions: dict[str, str] = field(default_factory=dict)
    device: str | None = None
    seconds: float | None = None

    @classmethod
    def since(cls, started: float, device: str | torch.device = "cpu") -> Provenance:
        """Of this process; `started` is `time.monotonic()` at the start of the work."""
        return cls(**provenance(started, device))


def versions() -> dict[str, str]:
    """Versions of torch, and of raptor and timm if they are installed as packages."""
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
    program = ["raptor"] if name in ("raptor", "__main__.py", "cli.py") else ["python", name]
    return {
        "command": shlex.join([*program, *sys.argv[1:]]),
        "versions": versions(),
        "device": device_name(device),
        "seconds": round(time.monotonic() - started, 1),
    }
