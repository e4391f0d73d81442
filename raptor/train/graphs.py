"""A training step's forward and backward pass, captured once as a CUDA graph and replayed.

Launching the kernels of one step takes the host longer than a GPU needs to run them for a small model or batch; a
replayed graph costs one launch. Shapes are fixed, everything random is outside, and the layers' loop has no host sync,
so the whole of forward and backward can be captured; clipping and the optimizer run as usual.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from raptor.train.step import DistillStep, Parts

NUM_WARM = 3


class NotCapturable(RuntimeError):
    """The step copies something to the host, waits for it, or does else what a graph cannot hold."""


class GraphedStep:
    """Replays one stage's forward and backward pass; gradients land in the parameters' `grad`.

    Args:
        module: the step, on a GPU.
        stage: `stage1` or `stage2`.
        images: a batch like every later one.
        parts: which of the two losses are in it; lambda, where both are, may change from step to step.
        precision: `bf16` or `fp32`.
    """

    def __init__(self, module: DistillStep, stage: str, images: Tensor, parts: Parts, precision: str):
        self.module, self.stage, self.parts, self.precision = module, stage, parts, precision
        self.images = images.clone()
        self.lam = torch.zeros((), device=images.device)
        parameters = [p for _, p in module.trained_parameters()]
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        try:
            with torch.cuda.stream(side):
                for _ in range(NUM_WARM - 1):  # compilation may wait for the host
                    self._run()
                with _no_host_sync():
                    self._run()
        finally:
            torch.cuda.current_stream().wait_stream(side)
        for p in parameters:
            p.grad = None
        self.graph = torch.cuda.CUDAGraph()
        # thread_local: a thread that pins memory for a loader may call CUDA meanwhile.
        try:
            with torch.cuda.graph(self.graph, capture_error_mode="thread_local"):
                self.layer_losses = self._run()
        except RuntimeError as error:
            if "captur" not in str(error):
                raise
            raise NotCapturable(str(error)) from None
        self.grads = [p.grad for p in parameters]

    def __call__(self, images: Tensor, lam: float) -> Tensor:
        """Run on `images`; gives the loss of every layer and leaves the gradients in place."""
        self.images.copy_(images, non_blocking=True)
        self.lam.fill_(lam)
        for (_, p), grad in zip(self.module.trained_parameters(), self.grads):
            p.grad = grad
        self.graph.replay()
        return self.layer_losses.clone()

    def _run(self) -> Tensor:
        enabled = self.precision == "bf16"
        with torch.autocast("cuda", torch.bfloat16, enabled=enabled, cache_enabled=False):
            loss, layer_losses = self.module(self.images, self.stage, self.lam, self.parts)
        loss.backward()
        return layer_losses.detach()


@contextmanager
def _no_host_sync() -> Iterator[None]:
    """Inside, a call that waits for the device is a `NotCapturable`."""
    mode = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings(action="ignore"):  # that not every wait is found
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    except RuntimeError as error:
        if "synchroniz" not in str(error):
            raise
        raise NotCapturable(str(error)) from None
    finally:
        torch.cuda.set_sync_debug_mode(mode)
