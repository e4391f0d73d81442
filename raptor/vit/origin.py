"""Where a model came from: what its config.json records, so that a folder can build the model again."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from pydantic import ConfigDict

from raptor.data.preprocess import Preprocess

Arguments = dict[str, Any]
"""Keyword arguments of a library's constructor, or of a call of a model or block."""

BLOCKS = ("teacher", "paper")
CONDITIONINGS = ("table", "mlp", "none")
ADAPTED = ("all", "mlp")
COPIES = ("middle", "first", "last")

_STRICT = ConfigDict(strict=True, extra="forbid")


@dataclass(frozen=True, kw_only=True)
class Structure:
    """The parts of a model where its own structure should not be asked; None where it should.

    Attributes:
        blocks, norm, head: dotted paths of the block list, the final norm and the classifier.
        cls, registers: counts of these tokens.
        head_classes: number of class scores that the model gives; 0 for none.
    """

    __pydantic_config__ = _STRICT

    blocks: str | None = None
    norm: str | None = None
    head: str | None = None
    cls: int | None = None
    registers: int | None = None
    head_classes: int | None = None

    def given(self) -> dict[str, Any]:
        """The entries that are not None."""
        return {name: value for name, value in vars(self).items() if value is not None}


@dataclass(kw_only=True)
class Base:
    """A plain model as `build_base` builds it.

    Attributes:
        source: `timm/NAME`, `hf/REPO` or `hub/REPO:ENTRY`.
        kwargs: arguments of its constructor (timm, torch.hub) or configuration (transformers).
        num_classes: classes of the head; None for the published ones.
        config: the configuration of a transformers model, which stands for its repository.
        add_pooling_layer: whether a transformers model has its pooler.
    """

    __pydantic_config__ = ConfigDict(strict=True)

    source: str
    kwargs: Arguments = field(default_factory=dict)
    num_classes: int | None = None
    config: dict[str, Any] | None = None
    add_pooling_layer: bool = True


@dataclass(frozen=True, kw_only=True)
class Opened:
    """How a model was opened: arguments of `open_vit`, and the fingerprint of the weights it then had.

    Attributes:
        model: the name or folder; None for a module of the user's own.
        structure: the options of that name.
        kwargs: arguments of the model's constructor.
        relative: in a saved surrogate, the places of `model` and `weights` relative to its folder.
    """

    __pydantic_config__ = _STRICT

    model: str | None = None
    weights: str | None = None
    size: int | None = None
    pretrained: bool = True
    layer_scale: float | None = None
    num_classes: int | None = None
    preprocess: Preprocess | None = None
    structure: Structure = Structure()
    dtype: str = "fp32"
    name: str | None = None
    kwargs: Arguments = field(default_factory=dict)
    fingerprint: str | None = None
    relative: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class SurrogateSpec:
    """What a surrogate is made of.

    Attributes:
        phases: the repetition counts n_1..n_k, which sum to the teacher's L.
        block: `teacher` copies a block of each phase, `paper` is the paper's own block from scratch.
        conditioning: how the layer number enters: `table` (learned scales and shifts per depth), `mlp` (the paper's
            depth scaling) or `none` (autonomous).
        copy: which teacher block of a phase is copied: `middle`, `first` or `last`, or of each phase the number of a
            block (1..L) that lies in it.
        adapters: rank of what each depth adds to the matrices of a copied block, and an own addition to their biases;
            0 ties the matrices of a phase.
        adapted: which matrices adapters change: `all`, or those of the `mlp`.
    """

    __pydantic_config__ = _STRICT

    phases: tuple[int, ...]
    block: str = "teacher"
    conditioning: str = "table"
    copy: str | tuple[int, ...] = "middle"
    adapters: int = 0
    adapted: str = "all"

    def __post_init__(self) -> None:
        named = {"block": BLOCKS, "conditioning": CONDITIONINGS, "adapted": ADAPTED}
        if isinstance(self.copy, str):
            named["copy"] = COPIES
        for name, choices in named.items():
            value = getattr(self, name)
            if value not in choices:
                raise ValueError(f"unknown {name} {value!r}: choose from {', '.join(choices)}")
        # True is an int as well, and would be a rank of 1.
        if type(self.adapters) is not int or self.adapters < 0:
            raise ValueError(f"adapters must be a rank of 0 or more, got {self.adapters!r}")
        if isinstance(self.copy, str):
            return
        if len(self.copy) != len(self.phases):
            raise ValueError(
                f"copy must name one block of each of the {len(self.phases)} phases, got {list(self.copy)}"
            )
        last = 0
        for layer, length in zip(self.copy, self.phases):
            first = last + 1
            last += length
            if not first <= layer <= last:
                raise ValueError(f"copy must name a block of its phase, {first} to {last}, got {layer}")


@dataclass(frozen=True, kw_only=True)
class Origin:
    """What a model was built from.

    Attributes:
        base: the plain model; None for a module of the user's own.
        surrogates: of a surrogate its spec; of a surrogate of a surrogate both, the outermost last.
        teacher: how the surrogate's teacher was opened, with its fingerprint.
    """

    base: Base | None = None
    surrogates: tuple[SurrogateSpec, ...] = ()
    teacher: Opened | None = None
