"""Where and in which precision things run."""

from __future__ import annotations

import torch

DEVICES = ("auto", "cpu", "cuda")


def pick_device(device: str) -> str:
    """`auto` is the GPU when there is one."""
    if device not in DEVICES:
        raise ValueError(f"unknown device {device!r}: choose from {', '.join(DEVICES)}")
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
