from __future__ import annotations

import signal
from collections.abc import Callable

import pytest
import torch
from tiny_models import tiny_timm
from torch import Tensor, nn

from raptor.vit.view import ViT

torch.set_num_threads(1)
for _ignored in (signal.SIGHUP, signal.SIGINT):  # by nohup, or by a shell that runs the tests in the background
    if signal.getsignal(_ignored) is signal.SIG_IGN:
        signal.signal(_ignored, signal.SIG_DFL if _ignored == signal.SIGHUP else signal.default_int_handler)


@pytest.fixture
def teacher() -> ViT:
    """Four blocks, a cls token, two registers, four patches, five classes."""
    return tiny_timm("vit_small_patch14_reg4_dinov2", reg_tokens=2, num_classes=5)


@pytest.fixture
def rotary() -> ViT:
    """Four rotary blocks whose arguments come from the model."""
    return tiny_timm("vit_small_patch16_dinov3", num_classes=5)


@pytest.fixture
def snapshot() -> Callable[[nn.Module], dict[str, Tensor]]:
    """A copy of a module's state dict."""
    return lambda model: {k: v.clone() for k, v in model.state_dict().items()}
