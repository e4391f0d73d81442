"""A training step's forward and backward pass, captured once as a CUDA graph and replayed.

For a small model or batch the host needs longer to launch the kernels of one step than a GPU needs to run them; a
replayed graph costs one launch. Shapes are fixed, everything random is drawn outside, and the loop over layers has no
host sync, so all of forward and backward can be captured. Clipping and the optimizer run as usual.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

_NUM_WARM = 3  # passes on a side stream before a capture, as torch asks for: kernels are chosen and compiled in them


class NotCapturable(RuntimeError):
    """The step copies something to the host, waits for it, or does something else that a graph cannot hold."""


class StepGraphs:
    """The captured passes of one stage of a `DistillStep`, by image size and by the losses that a step computes."""

    def __init__(self, module: Any, stage: str, precision: str):
        self.module = module
        self.stage = stage
        self.precision = precision
        self.enabled = True
        self.graphs: dict[tuple[Hashable, torch.Size], GraphedStep] = {}

    def run(self, images: Tensor, lam: float, parts: Hashable) -> Tensor | None:
        """The loss of every layer, with the gradients left in place; None when the step cannot run as a graph."""
        if not self.enabled:
            return None
        key = (parts, images.shape)
        try:
            if key not in self.graphs:
                # Graphs of other losses are let go, because each holds its own memory.
                self.graphs = {other: graph for other, graph in self.graphs.items() if other[0] == parts}
                self.graphs[key] = GraphedStep(self.module, self.stage, images, parts, self.precision)
            return self.graphs[key](images, lam)
        except NotCapturable as error:
            self.enabled = False
            self.release()
            reason = str(error).splitlines()[0]
            print(f"this model's step runs without a CUDA graph: {reason}", file=sys.stderr)
            return None

    def release(self) -> None:
        """Let go of the captured passes and of the memory that they hold; a later step captures again."""
        self.graphs.clear()
        # The gradients lie in that memory: while one of them is kept, torch cannot use it for anything else.
        self.module.zero_grad(set_to_none=True)


class GraphedStep:
    """Replays one stage's forward and backward pass; gradients land in the parameters' `grad`.

    Args:
        module: the `DistillStep`, on a GPU.
        stage: `stage1` or `stage2`.
        images: a batch of the same shape as all later ones.
        parts: its `Parts`, which of the two losses are in it. With both, lambda may change from step to step.
        precision: `bf16` or `fp32`.
    """

    def __init__(self, module: Any, stage: str, images: Tensor, parts: Hashable, precision: str):
        self.module = module
        self.stage = stage
        self.parts = parts
        self.precision = precision
        self.images = images.clone()
        self.lam = torch.zeros((), device=images.device)
        self.parameters = [p for _, p in module.trained_parameters()]
        side = torch.cuda.Stream()
        # Streams do not wait for each other by themselves.
        side.wait_stream(torch.cuda.current_stream())
        try:
            with torch.cuda.stream(side):
                for _ in range(_NUM_WARM - 1):  # compilation may wait for the host
                    self._run()
                with _no_host_sync():
                    self._run()
        finally:
            torch.cuda.current_stream().wait_stream(side)
        for p in self.parameters:
            p.grad = None  # so that the capture makes gradients in the memory that every replay writes to
        self.graph = torch.cuda.CUDAGraph()
        # thread_local: a thread that pins memory for a loader may call CUDA during the capture.
        try:
            with torch.cuda.graph(self.graph, capture_error_mode="thread_local"):
                self.layer_losses = self._run()
        except RuntimeError as error:
            if "captur" not in str(error):
                raise
            raise NotCapturable(str(error)) from None
        self.grads = [p.grad for p in self.parameters]

    def __call__(self, images: Tensor, lam: float) -> Tensor:
        """Run on `images`: return the loss of every layer and leave the gradients in place."""
        # Into the memory of the capture: a graph knows addresses, not tensors.
        self.images.copy_(images, non_blocking=True)
        self.lam.fill_(lam)
        for p, grad in zip(self.parameters, self.grads):
            # The graph of another image size may have left its own gradients here.
            p.grad = grad
        self.graph.replay()
        # The next replay writes over this memory.
        return self.layer_losses.clone()

    def _run(self) -> Tensor:
        enabled = self.precision == "bf16"
        # Without a cache: a replay would not round weights again that were taken from it.
        with torch.autocast("cuda", torch.bfloat16, enabled=enabled, cache_enabled=False):
            loss, layer_losses = self.module(self.images, self.stage, self.lam, self.parts)
        loss.backward()
        return layer_losses.detach()


@contextmanager
def _no_host_sync() -> Iterator[None]:
    """Inside the context a call that waits for the device raises `NotCapturable`."""
    mode = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings(action="ignore"):  # torch warns that it does not find every wait
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    except RuntimeError as error:
        if "synchroniz" not in str(error):
            raise
        raise NotCapturable(str(error)) from None
    finally:
        torch.cuda.set_sync_debug_mode(mode)
