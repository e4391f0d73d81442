"""The surrogate (Raptor): the teacher with its L blocks replaced by steps over k shared blocks.

The k tied blocks live once in `model.shared_blocks`; the model's own block list holds L distinct `Step` modules that
refer to them, so a surrogate is a ViT like any other: `forward_features`, heads, hooks, probes and interventions work
on it unchanged. The layer number enters as a tensor, so a compiled block serves every depth with one graph.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from raptor.devices import seeded
from raptor.phases import Phases, check_phases
from raptor.surrogate.adapters import DepthAdapters, Weights
from raptor.surrogate.blocks import (
    CopiedBlock,
    DepthMLP,
    DepthTable,
    PaperBlock,
    adapted_layers,
    num_heads_of,
    own_layers,
    start_table,
    uses_places,
)
from raptor.vit.view import ViT
from raptor.vit.weights import fingerprint

BLOCKS = ("teacher", "paper")
CONDITIONINGS = ("table", "mlp", "none")
COPIES = ("middle", "first", "last")
TABLE_STARTS = ("plain", "teacher")


@dataclass(frozen=True)
class SurrogateSpec:
    """What a surrogate is made of.

    Attributes:
        phases: their lengths are the repetition counts n_1..n_k, and sum to the teacher's L.
        block: `teacher` copies a block of each phase, `paper` is the paper's own block from scratch.
        conditioning: how the layer number enters: `table` (learned scales and shifts per depth), `mlp` (the paper's
            depth scaling) or `none` (autonomous).
        copy: which teacher block of a phase is copied: `middle`, `first` or `last`.
        adapters: rank of what each depth adds to the matrices of a copied block, and an own addition to their biases;
            0 ties the matrices of a phase.
    """

    phases: Phases
    block: str = "teacher"
    conditioning: str = "table"
    copy: str = "middle"
    adapters: int = 0

    def __post_init__(self) -> None:
        for value, choices, what in (
            (self.block, BLOCKS, "block"),
            (self.conditioning, CONDITIONINGS, "conditioning"),
            (self.copy, COPIES, "copy"),
        ):
            if value not in choices:
                raise ValueError(f"unknown {what} {value!r}: choose from {', '.join(choices)}")
        if type(self.adapters) is not int or self.adapters < 0:
            raise ValueError(f"adapters must be a rank of 0 or more, got {self.adapters!r}")

    def to_dict(self) -> dict[str, Any]:
        """As JSON; the phases are the list of their lengths."""
        return {**vars(self), "phases": list(self.phases)}


class TiedBlock(nn.Module):
    """One phase's shared block: `block` modulated by `conditioning` at the depth it is asked to produce.

    With `adapters`, its matrices are those of that depth too.
    """

    def __init__(self, block: nn.Module, conditioning: nn.Module | None, adapters: DepthAdapters | None = None):
        super().__init__()
        self.block = block
        self.conditioning = conditioning
        self.adapters = adapters

    def weights(self, depth: Tensor) -> Weights | None:
        """The weights of the block's layers at the depths `(n,)`, or at one, a 0-d tensor; None without adapters."""
        return None if self.adapters is None else self.adapters(self.block.layers, depth)

    def forward(self, x_btd: Tensor, depth: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """State after the layer `depth`: one number as a 0-d tensor, or one a row, `(B,)`."""
        modulation = None if self.conditioning is None else self.conditioning(depth)
        if self.adapters is not None:
            kwargs["weights"] = self.weights(depth)
        return self.block(x_btd, modulation, *args, **kwargs)


class Step(nn.Module):
    """The block that produces layer `layer`: a shared block at that depth. It owns no weights."""

    depth: Tensor

    def __init__(self, tied: TiedBlock, layer: int, returns_tuple: bool = False):
        super().__init__()
        self._tied = (tied,)  # in a tuple, so that it is not registered a second time
        self.returns_tuple = returns_tuple
        self.register_buffer("depth", torch.tensor(float(layer)), persistent=False)

    @property
    def tied(self) -> TiedBlock:
        return self._tied[0]

    def own(self) -> None:
        """Register the block as this step's own, for a step copied out of its model."""
        self.block = self.tied

    def forward(self, x_btd: Tensor, *args: Any, **kwargs: Any) -> Any:
        state = self.tied(x_btd, self.depth, *args, **kwargs)
        return (state,) if self.returns_tuple else state


def make_surrogate(
    teacher: ViT,
    phases: Sequence[int],
    *,
    block: str = "teacher",
    conditioning: str = "table",
    copy: str = "middle",
    adapters: int = 0,
    table_start: str = "plain",
    seed: int = 0,
    made_from: dict[str, Any] | None = None,
) -> ViT:
    """A surrogate of `teacher`, untrained, as a separate view; the teacher is not changed.

    Args:
        phases: repetition counts of the k blocks, e.g. `find_phases(similarity, 3)` or `[7, 3, 2]`.
        block, conditioning, copy, adapters: see `SurrogateSpec`.
        table_start: where table and adapters start: `plain` (the copied block as it is at every depth) or `teacher`
            (the norms and LayerScale of each depth's own block, and its matrices as near as the rank allows).
        seed: of the random initialisation.
        made_from: what the surrogate says about its teacher; by default what it was opened as, and its fingerprint.
    """
    spec = SurrogateSpec(check_phases(teacher, phases), block, conditioning, copy, adapters)
    check_parts(spec.block, spec.conditioning, spec.adapters, table_start)
    if block == "paper" and uses_places(teacher):
        raise ValueError(
            f"the blocks of {teacher.name} use the places of patches (rotary embedding, position bias or mask), "
            "which the paper's block does not know: take --block teacher"
        )
    if made_from is None:
        made_from = {**teacher.opened, "fingerprint": fingerprint(teacher.model)}
    with seeded(seed):
        shared = nn.ModuleList(_tied_block(teacher, spec, span) for span in spec.phases.spans)
        if table_start == "teacher":
            for tied, (first, last) in zip(shared, spec.phases.spans):
                _start(tied, teacher, range(first, last + 1))  # type: ignore[arg-type]
    model = _without_blocks(teacher)
    model.requires_grad_(False)
    shared.to(teacher.device)
    steps = [
        Step(shared[j], layer, teacher.returns_tuple)  # type: ignore[arg-type]
        for j, (first, last) in enumerate(spec.phases.spans)
        for layer in range(first, last + 1)
    ]
    _put_blocks(model, teacher.blocks_path, steps)
    model.shared_blocks = shared
    model.eval()
    return dataclasses.replace(
        teacher,
        model=model,
        name=f"raptor k={spec.phases.k} of {teacher.name}",
        norm=_same_place(teacher.norm, teacher.model, model),
        phases=spec.phases,
        source={"base": teacher.source, "surrogate": spec.to_dict(), "teacher": made_from},
        opened={},
    ).to(teacher.device)


def surrogate_spec(vit: ViT) -> SurrogateSpec:
    """What the surrogate `vit` is made of."""
    if "surrogate" not in vit.source:
        raise ValueError(f"{vit.name} is not a surrogate")
    fields = dict(vit.source["surrogate"])
    return SurrogateSpec(**{**fields, "phases": Phases.from_lengths(fields["phases"])})


def shared_blocks(vit: ViT) -> nn.ModuleList:
    """The k tied blocks of a surrogate."""
    blocks = getattr(vit.model, "shared_blocks", None)
    if not isinstance(blocks, nn.ModuleList):
        raise ValueError(f"{vit.name} is not a surrogate")
    return blocks


def block_parameters(vit: ViT) -> int:
    """Parameters of only the blocks: the k shared ones of a surrogate, the L of a teacher."""
    blocks = shared_blocks(vit) if vit.phases else vit.blocks
    return sum(p.numel() for p in blocks.parameters())


def _tied_block(teacher: ViT, spec: SurrogateSpec, span: tuple[int, int]) -> TiedBlock:
    first, last = span
    if spec.block == "paper":
        block: nn.Module = PaperBlock(teacher.dim, num_heads_of(teacher.blocks[0], teacher.dim))
    else:
        layer = {"first": first, "middle": (first + last) // 2, "last": last}[spec.copy]
        names = adapted_layers(teacher, layer, spec.adapters) if spec.adapters else []
        block = CopiedBlock(teacher, layer, modulated=spec.conditioning != "none", adapted=names)
    adapters = DepthAdapters(block.layers, spec.adapters, first, last) if spec.adapters else None  # type: ignore[arg-type]
    if spec.conditioning == "mlp":
        return TiedBlock(block, DepthMLP(teacher.dim), adapters)
    if spec.conditioning == "table":
        return TiedBlock(block, DepthTable(teacher.dim, first, last), adapters)
    return TiedBlock(block, None, adapters)


def _start(tied: TiedBlock, teacher: ViT, layers: range) -> None:
    """Start the table and the adapters from each depth's own block of the teacher.

    Both or neither: matrices near a depth's own with another depth's norms are further from it than the copied block.
    """
    if tied.adapters is not None:
        block: CopiedBlock = tied.block  # type: ignore[assignment]
        tied.adapters.start(block.layers, [own_layers(teacher, layer, block.adapted) for layer in layers])
    start_table(tied.conditioning, tied.block, teacher, layers[0])  # type: ignore[arg-type]


def check_parts(block: str, conditioning: str, adapters: int, table_start: str) -> None:
    """Raise for parts of a surrogate that do not go together."""
    if adapters and block == "paper":
        raise ValueError("adapters change the matrices of a teacher's block: take --block teacher, or no --adapters")
    if table_start not in TABLE_STARTS:
        raise ValueError(f"unknown table_start {table_start!r}: choose from {', '.join(TABLE_STARTS)}")
    if table_start == "teacher" and (block, conditioning) != ("teacher", "table"):
        raise ValueError("table_start teacher is of a copied block's table: take --block teacher --conditioning table")


def _without_blocks(teacher: ViT) -> nn.Module:
    """A deep copy of the teacher's model whose block list is empty (the blocks themselves are not copied)."""
    blocks = teacher.blocks
    memo: dict[int, Any] = {id(blocks): type(blocks)()}
    return copy.deepcopy(teacher.model, memo)


def _put_blocks(model: nn.Module, path: str, steps: list[Step]) -> None:
    container = model.get_submodule(path)
    for i, step in enumerate(steps):
        container.add_module(str(i), step)


def _same_place(module: nn.Module, old: nn.Module, new: nn.Module) -> nn.Module:
    """The module of `new` that stands where `module` stands in `old`; `module` itself when it is outside."""
    for name, candidate in old.named_modules():
        if candidate is module:
            return new.get_submodule(name)
    return module
