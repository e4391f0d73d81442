"""The surrogate (Raptor): the teacher with its L blocks replaced by steps over k shared blocks.

The k tied blocks live once in `model.shared_blocks`; the model's own block list holds L distinct `Step` modules that
refer to them, so a surrogate is a ViT like any other: `forward_features`, heads, hooks, probes and interventions work
on it unchanged. The layer number enters as a tensor, so a compiled block serves every depth with one graph.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from raptor.devices import seeded, torch_defaults
from raptor.phases.cut import Phases, check_phases
from raptor.surrogate.adapters import DepthAdapters
from raptor.surrogate.block import CopiedBlock, DepthMLP, DepthTable, PaperBlock, TiedBlock
from raptor.surrogate.fast import FastBlock, view_of_copy
from raptor.surrogate.teacher_blocks import (
    adapted_layers,
    modulation_points,
    num_heads_of,
    own_copy,
    uses_places,
)
from raptor.vit.calls import copied
from raptor.vit.origin import Opened, Origin, SurrogateSpec
from raptor.vit.view import ViT
from raptor.vit.weights import fingerprint


class Step(nn.Module):
    """The block that produces layer `layer`: a shared block at that depth. It owns no weights."""

    depth: Tensor

    def __init__(self, tied: TiedBlock, layer: int, returns_tuple: bool = False):
        super().__init__()
        self._tied = (tied,)  # in a tuple, so that it is not registered a second time
        self.returns_tuple = returns_tuple
        # A tensor, because a block would be compiled again for each number. The place of the step tells it again.
        self.register_buffer("depth", torch.tensor(float(layer)), persistent=False)

    @property
    def tied(self) -> TiedBlock:
        return self._tied[0]

    def own(self) -> None:
        """Register the block as this step's own, for a step copied out of its model."""
        self.block = self.tied

    def forward(self, x_btd: Tensor, *args: Any, **kwargs: Any) -> Any:
        state = self.next_state(x_btd, *args, **kwargs)
        if self.returns_tuple:
            return (state,)
        return state

    def next_state(self, x_btd: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return self.tied(x_btd, self.depth, *args, **kwargs)


@torch_defaults()
def make_surrogate(
    teacher: ViT,
    phases: Sequence[int],
    *,
    block: str = "teacher",
    conditioning: str = "table",
    copy: str | Sequence[int] = "middle",
    adapters: int = 0,
    adapted: str = "all",
    seed: int = 0,
    made_from: Opened | None = None,
) -> ViT:
    """A surrogate of `teacher`, untrained, as a separate view; the teacher is not changed.

    Args:
        phases: repetition counts of the k blocks, e.g. `find_phases(similarity, 3)` or `[7, 3, 2]`.
        block, conditioning, copy, adapters, adapted: see `SurrogateSpec`.
        seed: of the random initialisation.
        made_from: what the surrogate says about its teacher; by default what it was opened as, and its fingerprint.
    """
    phases = check_phases(teacher, phases)
    if not isinstance(copy, str):
        copy = tuple(copy)
    spec = SurrogateSpec(tuple(phases), block, conditioning, copy, adapters, adapted)
    check_parts(spec.block, spec.adapters, spec.adapted)
    if block == "paper" and uses_places(teacher):
        raise ValueError(
            f"the blocks of {teacher.name} use the places of patches (rotary embedding, position bias or mask), "
            "which the paper's block does not know: take --block teacher"
        )
    if made_from is None:
        made_from = dataclasses.replace(teacher.opened, fingerprint=fingerprint(teacher.model))
    with seeded(seed):
        shared = nn.ModuleList(_tied_block(teacher, spec, phase) for phase in range(phases.k))
    # A deep copy of the model whose block list is empty: the teacher's blocks themselves are not copied.
    blocks = teacher.blocks
    model = copied(teacher.model, teacher.name, {id(blocks): type(blocks)()})
    # Before the shared blocks are put in: only they are trained.
    model.requires_grad_(False)
    shared.to(teacher.device)
    container = model.get_submodule(teacher.blocks_path)
    for j, (first, last) in enumerate(phases.spans):
        for layer in range(first, last + 1):
            step = Step(shared[j], layer, teacher.returns_tuple)  # type: ignore[arg-type]
            container.add_module(str(layer - 1), step)
    # Registered once, here. Under its steps as well a weight would have several names, which safetensors refuses.
    model.shared_blocks = shared
    model.eval()
    return dataclasses.replace(
        teacher.around(model),
        name=f"raptor k={phases.k} of {teacher.name}",
        phases=phases,
        origin=Origin(base=teacher.origin.base, surrogates=(*teacher.origin.surrogates, spec), teacher=made_from),
        opened=Opened(),
    ).to(teacher.device)


def surrogate_spec(vit: ViT) -> SurrogateSpec:
    """What the surrogate `vit` is made of."""
    if not vit.origin.surrogates:
        raise ValueError(f"{vit.name} is not a surrogate")
    return vit.origin.surrogates[-1]


def shared_blocks(vit: ViT) -> nn.ModuleList:
    """The k tied blocks of a surrogate."""
    blocks = getattr(vit.model, "shared_blocks", None)
    if not isinstance(blocks, nn.ModuleList):
        raise ValueError(f"{vit.name} is not a surrogate")
    return blocks


@torch_defaults()
def check_trainable(vit: ViT) -> None:
    """Raise for a surrogate whose blocks give their weights no gradient.

    A model of the user's own may compute under `no_grad` or `inference_mode`; training would change nothing in it.
    """
    size = vit.preprocess.size
    with torch.no_grad():
        x_btd, context = vit.embed(torch.zeros(1, 3, size, size, device=vit.device))
    if x_btd.is_inference():  # torch lets no gradient pass by such a tensor
        raise ValueError(
            f"the forward of {vit.name} runs under inference_mode: let it run without, to train its blocks"
        )
    for tied, (layer, _) in zip(shared_blocks(vit), vit.phases.spans):  # type: ignore[union-attr]
        weights = [parameter for parameter in tied.block.parameters() if parameter.requires_grad]  # type: ignore[union-attr]
        output_btd = vit.step(layer, x_btd, context)
        gradients: Sequence[Tensor | None] = [None]
        if output_btd.requires_grad and weights:
            gradients = torch.autograd.grad(output_btd.sum(), weights, allow_unused=True)
        if all(gradient is None for gradient in gradients):
            raise ValueError(
                f"block {layer} of {vit.name} gives its weights no gradients: let its forward run without no_grad and "
                "inference_mode"
            )


def block_parameters(vit: ViT) -> int:
    """Parameters of only the blocks: the k shared ones of a surrogate, the L of a teacher."""
    blocks: nn.Module = vit.blocks
    if vit.phases:
        blocks = shared_blocks(vit)
    return sum(p.numel() for p in blocks.parameters())


def _tied_block(teacher: ViT, spec: SurrogateSpec, phase: int) -> TiedBlock:
    """The block of a phase, before training."""
    first, last = Phases.from_lengths(spec.phases).spans[phase]
    # The order of what follows is the order in which random weights are drawn: another one gives other surrogates.
    block: PaperBlock | CopiedBlock
    adapters = None
    if spec.block == "paper":
        block = PaperBlock(teacher.dim, num_heads_of(teacher.blocks[0], teacher.dim))
        view: FastBlock | None = FastBlock(block)
    else:
        if isinstance(spec.copy, str):
            layer = {"first": first, "middle": (first + last) // 2, "last": last}[spec.copy]
        else:
            layer = spec.copy[phase]
        adapted: Sequence[str] = ()
        if spec.adapters:
            adapted = adapted_layers(teacher, layer, spec.adapters, spec.adapted)
        block = copied_block(teacher, layer, spec.conditioning != "none", adapted)
        view = view_of_copy(block, teacher)
        if spec.adapters:
            adapters = DepthAdapters(block.layers, spec.adapters, first, last)
    conditioning: nn.Module | None = None
    if spec.conditioning == "mlp":
        conditioning = DepthMLP(teacher.dim)
    elif spec.conditioning == "table":
        conditioning = DepthTable(teacher.dim, first, last)
    return TiedBlock(block, conditioning, adapters, view)


def copied_block(teacher: ViT, layer: int, modulated: bool, adapted: Sequence[str] = ()) -> CopiedBlock:
    """A copy of the teacher's block of a layer."""
    points: Sequence[str] = ()
    if modulated:
        points = modulation_points(teacher, layer)
    return CopiedBlock(own_copy(teacher.blocks[layer - 1], teacher.name), points, adapted)


def check_parts(block: str, adapters: int, adapted: str) -> None:
    """Raise for parts of a surrogate that do not go together."""
    if adapted != "all" and not adapters:
        raise ValueError(f"--adapted {adapted} says which matrices adapters change: give --adapters, such as 16")
    if adapters and block == "paper":
        raise ValueError("adapters change the matrices of a teacher's block: take --block teacher, or no --adapters")
