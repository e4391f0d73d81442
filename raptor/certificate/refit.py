"""Norm and head of a surrogate after they were fitted to its teacher's outputs; `raptor.train.refit` fits them.

The teacher's norm and head were trained on its own last states. Those of a surrogate differ from them, so that the
untouched head may miss what they still hold. The paper's scores are with a fine-tuned head; here both are reported.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from raptor.certificate.heads import Head
from raptor.certificate.linear_head import LinearHead, head_logits
from raptor.certificate.verdict import Estimate
from raptor.files import RunError, replacing
from raptor.provenance import Provenance
from raptor.run import ResultFile
from raptor.subject import Subject
from raptor.vit.view import ViT
from raptor.vit.weights import load_tensors

TENSORS = "head-refitted.safetensors"
_LINEAR = "linear."  # begins the names of a linear head's weights; the norm's weights are in the same file


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
        # Put back afterwards: the untouched head is judged in the same pass.
        with replaced_weights(own, list(self.tensors.values())):
            return head_logits(surrogate, self.linear, state_btd)

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


def after_blocks(vit: ViT, head: Head) -> dict[str, nn.Parameter]:
    """The parameters behind the last block: the norm's, and the own head's where `head` is that one."""
    named = dict(vit.model.named_parameters())
    if head.linear is not None:
        of_norm = set(vit.norm.parameters())
        return {name: parameter for name, parameter in named.items() if parameter in of_norm}
    required = [parameter.requires_grad for parameter in named.values()]
    # Zeros will do: only whether a parameter is in the graph matters, not its gradient.
    state_btd = torch.zeros(1, vit.groups.num_tokens, vit.dim, device=vit.device, dtype=vit.dtype)
    try:
        # Asked of the model, because every library has another name for its norm, pooling and head.
        with torch.inference_mode(False), torch.enable_grad():
            # A frozen parameter would not appear in the graph.
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

    @torch.no_grad()
    def put(tensors: Sequence[Tensor]) -> None:
        for parameter, tensor in zip(parameters, tensors):
            parameter.copy_(tensor)
        # Autocast keeps half-precision copies of weights that take gradients, and would go on with the old ones.
        torch.clear_autocast_cache()

    try:
        put(values)
        yield
    finally:
        put(saved)
