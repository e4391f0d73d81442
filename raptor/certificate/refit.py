"""Norm and head of a surrogate, fitted to its teacher's outputs without labels.

The teacher's norm and head were trained on its own last states. Those of a surrogate differ from them, so that the
untouched head may miss what they still hold. The paper's scores are with a fine-tuned head; here both are reported.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn

from raptor.certificate.heads import Head
from raptor.certificate.linear_head import LinearHead
from raptor.certificate.verdict import Estimate
from raptor.data.stream import TrainStream
from raptor.devices import ONE_PROCESS, Ranks
from raptor.files import RunError, replacing
from raptor.provenance import Provenance
from raptor.run import ResultFile
from raptor.subject import Subject
from raptor.vit.trajectory import autocast
from raptor.vit.view import ViT
from raptor.vit.weights import load_tensors

TENSORS = "head-refitted.safetensors"
_LINEAR = "linear."  # names of a linear head's weights, beside those of the surrogate's norm
_NUM_TIMED = 3
_WARMUP = 0.05
_LAST_RATE = 0.01  # of the peak


@dataclass
class Refitted:
    """The weights of a surrogate's norm and head after the fit.

    Attributes:
        tensors: of the surrogate's own parameters, by their names in its model.
        linear: the linear head that reads its features; None where its own head is refitted.
    """

    tensors: dict[str, Tensor]
    linear: LinearHead | None = None

    def logits(self, surrogate: ViT, state_btd: Tensor) -> Tensor:
        """Logits (B, C) for a last state of the surrogate, in float32."""
        parameters = dict(surrogate.model.named_parameters())
        own = [parameters[name] for name in self.tensors]
        with replaced_weights(own, list(self.tensors.values())):
            return _logits(surrogate, self.linear, state_btd)

    def save(self, folder: Path) -> None:
        tensors = dict(self.tensors)
        if self.linear is not None:
            tensors[f"{_LINEAR}weight"] = self.linear.weight
            tensors[f"{_LINEAR}bias"] = self.linear.bias
        with replacing(folder / TENSORS) as partial:
            save_file({name: tensor.cpu().contiguous() for name, tensor in tensors.items()}, partial)

    @classmethod
    def load(cls, folder: Path, surrogate: ViT) -> Refitted:
        """The weights in `folder`; RunError where they are not those of this surrogate's norm and head."""
        path = folder / TENSORS
        remedy = "fit it again with raptor head"
        try:
            tensors = load_tensors(path)
        except (OSError, ValueError) as error:
            raise RunError(f"{path} cannot be read ({str(error)[:120]}): {remedy}") from None
        linear = None
        if f"{_LINEAR}weight" in tensors:
            linear = LinearHead(tensors.pop(f"{_LINEAR}weight"), tensors.pop(f"{_LINEAR}bias")).to(surrogate.device)
        parameters = dict(surrogate.model.named_parameters())
        for name, tensor in tensors.items():
            if name not in parameters or parameters[name].shape != tensor.shape:
                raise RunError(f"{path} does not fit {surrogate.name} ({name}): {remedy}")
        return cls({name: tensor.to(surrogate.device) for name, tensor in tensors.items()}, linear)


@dataclass
class HeadFit(ResultFile):
    """head.json: how norm and head were refitted, and what that changes on held-out images.

    Attributes:
        head: which head it started from.
        parameters: names of what was fitted.
        num_images: training images. num_judged: held-out images.
        first_loss, last_loss: KL(teacher || surrogate) in nats, mean over the first and the last tenth of the steps.
        untouched, refitted: agreement with the teacher on the held-out images, before and after.
    """

    FILE: ClassVar[str] = "head.json"

    head: str
    parameters: list[str]
    num_steps: int
    batch_size: int
    lr: float
    num_images: int
    first_loss: float
    last_loss: float
    untouched: Estimate
    refitted: Estimate
    num_judged: int
    data: str
    split: str = "val"
    provenance: Provenance = field(default_factory=Provenance)
    subject: Subject | None = None

    def line(self) -> str:
        """What the fit changed, in one line."""
        return (
            f"agreement with the teacher {self.untouched} with the untouched head, {self.refitted} with the refitted "
            f"one ({self.num_judged:,} images of {self.data}); KL fell from {self.first_loss:.3f} to "
            f"{self.last_loss:.3f} nats in {self.num_steps:,} steps of {self.batch_size} images"
        )


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
        linear = LinearHead(head.linear.weight.clone(), head.linear.bias.clone()).to(surrogate.device)
        fitted += [linear.weight, linear.bias]

    def backward(step: int) -> Tensor:
        images = stream.batch(step, stage="head")
        with autocast(precision, teacher.device):
            with torch.no_grad():
                states, output = teacher.record(images)
                target_bc = head.logits(teacher, states[-1], output).log_softmax(-1)
                state_btd = surrogate.record(images)[0][-1]
            log_q_bc = _logits(surrogate, linear, state_btd).log_softmax(-1)
        # Divided by the global batch, so that ranks sum to what one process would have.
        loss = F.kl_div(log_q_bc, target_bc, reduction="sum", log_target=True) / stream.batch_size
        loss.backward()
        for tensor in fitted:
            assert tensor.grad is not None
            ranks.add_(tensor.grad)
        return ranks.add_(loss.detach())

    untouched = [parameter.detach().clone() for parameter in own.values()]
    with torch.inference_mode(False), torch.enable_grad(), replaced_weights(list(own.values()), untouched):
        for tensor in fitted:
            tensor.requires_grad_()
        # Without weight decay, which would pull a good head towards 0.
        optimizer = torch.optim.AdamW(fitted, lr=lr, weight_decay=0.0)
        try:
            if num_steps is None:
                num_steps = max(1, round(seconds / _step_seconds(backward, ranks)))
                optimizer.zero_grad()
            losses = []
            for step in range(num_steps):
                optimizer.param_groups[0]["lr"] = lr * _share_of_rate(step, num_steps)
                losses.append(backward(step))
                optimizer.step()
                optimizer.zero_grad()
                if progress is not None:
                    progress(step + 1, num_steps)
            tensors = {name: parameter.detach().clone() for name, parameter in own.items()}
        finally:
            for tensor in fitted:
                tensor.requires_grad_(False)
    if not all(bool(tensor.isfinite().all()) for tensor in (*tensors.values(), *fitted)):
        raise ValueError(f"the refitted head of {surrogate.name} is not finite: give a smaller --lr")
    return Refitted(tensors, linear), torch.stack(losses).tolist()


def after_blocks(vit: ViT, head: Head) -> dict[str, nn.Parameter]:
    """The parameters that work on the last state: those of the norm, and those of the model's own head."""
    if head.linear is not None:
        of_norm = {id(parameter) for parameter in vit.norm.parameters()}
        return {name: p for name, p in vit.model.named_parameters() if id(p) in of_norm}
    named = dict(vit.model.named_parameters())
    required = [parameter.requires_grad for parameter in named.values()]
    state_btd = torch.zeros(1, vit.groups.num_tokens, vit.dim, device=vit.device, dtype=vit.dtype)
    try:
        # Asked of the model, because every library has another name for its norm, pooling and head.
        with torch.inference_mode(False), torch.enable_grad():
            vit.model.requires_grad_(True)
            output = vit.finish(state_btd).sum()
            gradients = torch.autograd.grad(output, list(named.values()), allow_unused=True)
    finally:
        for parameter, was_required in zip(named.values(), required):
            parameter.requires_grad_(was_required)
    return {name: p for (name, p), gradient in zip(named.items(), gradients) if gradient is not None}


@contextmanager
def replaced_weights(parameters: Sequence[Tensor], values: Sequence[Tensor]) -> Iterator[None]:
    """Inside the context the parameters hold `values`, in place; then they are put back."""
    saved = [parameter.detach().clone() for parameter in parameters]
    try:
        with torch.no_grad():
            for parameter, value in zip(parameters, values):
                parameter.copy_(value)
        yield
    finally:
        with torch.no_grad():
            for parameter, value in zip(parameters, saved):
                parameter.copy_(value)


def _logits(vit: ViT, linear: LinearHead | None, state_btd: Tensor) -> Tensor:
    if linear is None:
        return vit.finish(state_btd).float()
    return linear(vit.features(state_btd))


def _share_of_rate(step: int, num_steps: int) -> float:
    """Linear warm-up, then a cosine."""
    num_warm = max(1, round(_WARMUP * num_steps))
    if step < num_warm:
        return (step + 1) / num_warm
    progress = (step - num_warm + 1) / max(1, num_steps - num_warm)
    return _LAST_RATE + (1 - _LAST_RATE) * 0.5 * (1 + math.cos(math.pi * progress))


def _step_seconds(backward: Callable[[int], Tensor], ranks: Ranks) -> float:
    """The time of a step, the same on every rank."""
    backward(0)  # the first one also reads images ahead and warms kernels up
    begin = time.perf_counter()
    for step in range(_NUM_TIMED):
        float(backward(step))  # waits for the device
    return ranks.first(lambda: (time.perf_counter() - begin) / _NUM_TIMED)
