"""Devices and precision: where things run."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

_DEVICES = ("auto", "cpu", "cuda")
HAS_TRITON = find_spec("triton") is not None
"""Our kernels need it; torch comes without it on a Mac and in the build for the CPU only."""


def pick_device(device: str) -> str:
    """`auto` is the GPU when there is one."""
    if device not in _DEVICES:
        raise ValueError(f"unknown device {device!r}: choose from {', '.join(_DEVICES)}")
    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("no CUDA device here: use --device cpu")
    return device


def pick_precision(precision: str, device: str) -> str:
    """`auto` is bf16 on a GPU and fp32 elsewhere (on the CPU bf16 does not pay)."""
    if precision == "auto":
        return "bf16" if device == "cuda" else "fp32"
    if precision not in ("fp32", "bf16"):
        raise ValueError(f"unknown precision {precision!r}: choose from auto, fp32, bf16")
    return precision


def device_name(device: str | torch.device) -> str:
    """The device as summaries name it."""
    return torch.cuda.get_device_name(device) if torch.device(device).type == "cuda" else "cpu"


@contextmanager
def full_precision(device: torch.device) -> Iterator[None]:
    """No gradients, no autocast and no TF32, whatever the caller trains with: for measurements."""
    switches = _tf32_switches()
    before = [getattr(where, name) for where, name, _ in switches]
    for where, name, off in switches:
        setattr(where, name, off)
    try:
        with torch.no_grad(), torch.autocast(device.type, enabled=False):
            yield
    finally:
        for (where, name, _), value in zip(switches, before):
            setattr(where, name, value)


def _tf32_switches() -> list[tuple[Any, str, Any]]:
    """Owner, name and off value of each TF32 switch. Newer torch refuses to read the old ones once a new one is set."""
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    if hasattr(matmul, "fp32_precision"):
        conv: Any = cudnn.conv  # type: ignore[attr-defined]
        return [(matmul, "fp32_precision", "ieee"), (conv, "fp32_precision", "ieee")]
    return [(matmul, "allow_tf32", False), (cudnn, "allow_tf32", False)]


def to_device(values: Tensor, device: torch.device) -> Tensor:
    """`values` on `device`, copied without waiting: through pinned memory, since the host waits for any other."""
    if device.type == "cuda" and values.device.type == "cpu":
        values = values.pin_memory()
    return values.to(device, non_blocking=True)


def free_bytes(device: torch.device) -> int:
    """Memory that is free on a device, or on the host; 8 GiB where the host does not say."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        return 8 * 2**30
