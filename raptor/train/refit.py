"""Norm and head of a surrogate, fitted to its teacher's outputs without labels."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from raptor.certificate.heads import Head
from raptor.certificate.linear_head import LinearHead, head_logits
from raptor.certificate.refit import Refitted, after_blocks, replaced_weights
from raptor.data.stream import TrainStream
from raptor.devices import ONE_PROCESS, Ranks
from raptor.train.loop import learning_rate
from raptor.train.stage import time_steps
from raptor.vit.trajectory import autocast
from raptor.vit.view import ViT

_NUM_TIMED = 3  # steps, after one that is not timed
_WARMUP = 0.05
_LAST_RATE = 0.01  # of the peak


def fit_head(
    surrogate: ViT,
    teacher: ViT,
    stream: TrainStream,
    head: Head,
    *,
    lr: float,
    num_steps: int | None = None,
    seconds: float = 60.0,
    precision: str = "fp32",
    progress: Callable[[int, int], None] | None = None,
    ranks: Ranks = ONE_PROCESS,
) -> tuple[Refitted, list[float]]:
    """Fit norm and head of `surrogate` by AdamW on KL(teacher || surrogate); also the loss of each step, in nats.

    Neither model is changed.

    Args:
        head: of the teacher; its outputs are the target.
        lr: peak learning rate; a cosine takes it to a hundredth.
        num_steps: by default as many as fit into `seconds`, by the time of the first few.
        ranks: the processes that share each batch.
    """
    own = after_blocks(surrogate, head)
    linear = None
    fitted: list[Tensor] = list(own.values())
    if head.linear is not None:
        # A copy, because the head itself gives the targets.
        linear = LinearHead(head.linear.weight.clone(), head.linear.bias.clone()).to(surrogate.device)
        fitted += [linear.weight, linear.bias]

    def backward(step: int) -> Tensor:
        images = stream.batch(step, stage="head")
        with autocast(precision, teacher.device):
            with torch.no_grad():
                states, output = teacher.record(images)
                target_bc = head.logits(teacher, states[-1], output).log_softmax(-1)
                # Without a graph: the blocks are frozen, and only what follows is fitted.
                state_btd = surrogate.record(images)[0][-1]
            log_q_bc = head_logits(surrogate, linear, state_btd).log_softmax(-1)
        # Divided by the global batch, so that ranks sum to what one process would have.
        loss = F.kl_div(log_q_bc, target_bc, reduction="sum", log_target=True) / stream.batch_size
        loss.backward()
        for tensor in fitted:
            assert tensor.grad is not None
            ranks.add_(tensor.grad)
        return ranks.add_(loss.detach())

    untouched = [parameter.detach().clone() for parameter in own.values()]
    # A program that trains the surrogate goes on with its own gradients, which must not be in the first step here.
    before = [(tensor, tensor.requires_grad, tensor.grad) for tensor in fitted]
    with torch.inference_mode(False), torch.enable_grad(), replaced_weights(list(own.values()), untouched):
        for tensor in fitted:
            tensor.requires_grad_()
            tensor.grad = None
        # Without weight decay, which would pull a good head towards 0.
        optimizer = torch.optim.AdamW(fitted, lr=lr, weight_decay=0.0)
        try:
            if num_steps is None:
                each, _ = time_steps(lambda step: float(backward(step)), 1, _NUM_TIMED, time.perf_counter, ranks)
                num_steps = max(1, round(seconds / ranks.first(lambda: each)))
                # The timed passes have left gradients.
                optimizer.zero_grad()
            losses = []
            for step in range(num_steps):
                optimizer.param_groups[0]["lr"] = learning_rate(step, num_steps, lr, _LAST_RATE * lr, _WARMUP)
                losses.append(backward(step))
                optimizer.step()
                optimizer.zero_grad()
                if progress is not None:
                    progress(step + 1, num_steps)
            tensors = {name: parameter.detach().clone() for name, parameter in own.items()}
        finally:
            for tensor, required, gradient in before:
                tensor.requires_grad_(required)
                tensor.grad = gradient
    if not all(bool(tensor.isfinite().all()) for tensor in (*tensors.values(), *fitted)):
        raise ValueError(f"the refitted head of {surrogate.name} is not finite: give a smaller --lr")
    return Refitted(tensors, linear), torch.stack(losses).tolist()
