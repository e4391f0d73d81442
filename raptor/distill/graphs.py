"""A training step's forward and backward pass, captured once as a CUDA graph and replayed.

Launching the kernels of one step takes the host longer than a GPU needs to run them for a small model or batch; a
replayed graph costs one launch. Shapes are fixed, everything random is outside, and the layers' loop has no host sync,
so the whole of forward and backward can be captured; clipping and the optimizer run as usual.
"""

from __future__ import annotations

import torch
from torch import Tensor

from raptor.distill.step import DistillStep

NUM_WARM = 3


class GraphedStep:
    """Replays one stage's forward and backward pass; gradients land in the parameters' `grad`.

    Args:
        module: the step, on a GPU.
        stage: `stage1` or `stage2`.
        images: a batch like every later one.
        forcing: whether teacher forcing is part of the loss (its share lambda may then change from step to step).
        precision: `bf16` or `fp32`.
    """

    def __init__(self, module: DistillStep, stage: str, images: Tensor, forcing: bool, precision: str):
        self.module, self.stage, self.precision = module, stage, precision
        self.images = images.clone()
        self.lam = torch.zeros((), device=images.device) if forcing else None
        parameters = [p for _, p in module.trained_parameters()]
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(NUM_WARM):
                self._run()
        torch.cuda.current_stream().wait_stream(side)
        for p in parameters:
            p.grad = None
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.layer_losses = self._run()
        self.grads = [p.grad for p in parameters]

    def __call__(self, images: Tensor, lam: float) -> Tensor:
        """Run on `images`; gives the loss of every layer and leaves the gradients in place."""
        self.images.copy_(images, non_blocking=True)
        if self.lam is not None:
            self.lam.fill_(lam)
        for (_, p), grad in zip(self.module.trained_parameters(), self.grads):
            p.grad = grad
        self.graph.replay()
        return self.layer_losses.clone()

    def _run(self) -> Tensor:
        enabled = self.precision == "bf16"
        with torch.autocast("cuda", torch.bfloat16, enabled=enabled, cache_enabled=False):
            loss, layer_losses = self.module(self.images, self.stage, 0.0 if self.lam is None else self.lam)
        loss.backward()
        return layer_losses.detach()
