"""`raptor.vit.block_list`: which list of modules is depth, and what is refused with the condition that failed."""

from __future__ import annotations

import pytest
import torchvision
import transformers
from families import (
    Block,
    Unheard,
)
from torch import Tensor, nn

from raptor.data.preprocess import Preprocess
from raptor.vit.open import open_vit
from raptor.vit.view import NotAViT

SMALL = dict(hidden_size=48, num_hidden_layers=3, num_attention_heads=3, intermediate_size=96, patch_size=16)


@pytest.mark.parametrize(
    ("name", "condition"),
    [
        ("resnet18", r"not \(batch, tokens, dim\)"),
        ("swin_tiny_patch4_window7_224", r"not \(batch, tokens, dim\)"),
        ("samvit_base_patch16", r"not \(batch, tokens, dim\)"),
        ("cait_xxs24_224", "continues in another list, `blocks_token_only`"),
        ("xcit_nano_12_p16_224", "continues in another list"),
        ("hiera_tiny_224", "changes the state's shape"),
        ("pit_ti_224", "continues in another list"),
        ("levit_128s", "continues in another list"),
        ("volo_d1_224", r"`network\.3` holds more of its weights than `post_network`"),
    ],
)
def test_refused(name: str, condition: str) -> None:
    kwargs = dict(depth=2, embed_dim=48, num_heads=2, img_size=224) if name.startswith("samvit") else {}
    kwargs |= dict(depth=2) if name.startswith(("cait", "xcit")) else {}
    with pytest.raises(NotAViT, match=condition) as error:
        open_vit(f"timm/{name}", pretrained=False, **kwargs)
    assert "\n" not in str(error.value)
    assert name in str(error.value)


def test_refused_modules() -> None:
    swin = transformers.SwinModel(
        transformers.SwinConfig(image_size=64, embed_dim=12, depths=[2, 2], num_heads=[2, 2], window_size=4)
    )
    for model in (torchvision.models.resnet18(), swin, nn.Conv2d(3, 8, 3)):
        with pytest.raises(NotAViT) as error:
            open_vit(model)
        assert "\n" not in str(error.value)


class InPlace(Block):
    def forward(self, x: Tensor) -> Tensor:
        x += self.mix(self.normed(x))
        return x


class OfTheFirst(Block):
    """Adds what the first block has computed, as a value residual does, past what the model hands on."""

    values: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        update = self.mix(self.normed(x))
        self.values.append(update)
        return x + update + self.values[0]


class Told(Block):
    def forward(self, x: Tensor, more: Tensor) -> Tensor:
        return super().forward(x) + more


class Running(Unheard):
    """Calls its blocks in one of five ways, with four blocks of any kind."""

    def __init__(self, kind: type[Block], how: str = "plain") -> None:
        super().__init__()
        self.trunk.stack = nn.ModuleList(kind(24) for _ in range(4))
        self.how = how
        if how == "tied":
            self.trunk.stack = nn.ModuleList([kind(24)] * 4)

    def forward(self, images: Tensor) -> Tensor:
        OfTheFirst.values.clear()
        x = self.lift(nn.functional.unfold(images, 8, stride=8).transpose(1, 2))
        for block in self.trunk.stack:
            if self.how == "named":
                x = block(x=x)
                continue
            x = block(x, x.mean(1, keepdim=True)) if self.how == "told" else block(x)
            if self.how == "between":
                x += self.scratch  # into the tensor that a hook on the block has seen
        return self.answer(self.last(x).mean(1))


class Residual(Block):
    """One of the parts of a block; they may be called the same and differ in shape."""

    def __init__(self, dim: int, width: int) -> None:
        super().__init__(dim)
        self.mix = nn.Sequential(nn.Linear(dim, width), nn.GELU(), nn.Linear(width, dim))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mix(x)


class InADict(Unheard):
    def __init__(self, key: str) -> None:
        super().__init__()
        self.key = key

    def forward(self, images: Tensor) -> dict[str, Tensor]:
        return {self.key: super().forward(images)}


def test_an_output_that_cannot_be_read_says_what_to_return() -> None:
    images = Preprocess(size=32, resize=32)
    assert open_vit(InADict("last_hidden_state"), preprocess=images).num_layers == 5
    with pytest.raises(ValueError, match="output of type dict: return a tensor, or a dict with logits") as error:
        open_vit(InADict("mine"), preprocess=images)
    assert "size" not in str(error.value)


def test_blocks_in_groups_are_no_layers() -> None:
    """Two groups of two blocks would be a model of two layers; two parts that make up a block are one layer."""
    model, options = Running(Block), dict(preprocess=Preprocess(size=32, resize=32))
    blocks = list(model.trunk.stack)
    model.trunk.stack = nn.ModuleList([nn.Sequential(*blocks[:2]), nn.Sequential(*blocks[2:])])
    with pytest.raises(NotAViT, match=r"`trunk.stack` holds groups of blocks, such as `trunk.stack.0`: .*one list"):
        open_vit(model, **options)
    assert open_vit(model, blocks="trunk.stack", **options).num_layers == 2
    model.trunk.stack = nn.ModuleList(nn.Sequential(Residual(24, 8), Residual(24, 16)) for _ in range(3))
    assert open_vit(model, **options).num_layers == 3


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (Running(InPlace), r"block 1 of `trunk\.stack` writes into its input"),
        (Running(Block, "between"), "block 2 of `trunk.stack` does not start from block 1's output"),
        (Running(Told, "told"), "block 4 of `trunk.stack` takes more from other blocks than the state"),
        (Running(Block, "named"), "`trunk.stack` are not given the state as their first argument"),
        (Running(Block, "tied"), "`trunk.stack` holds one module at several places .*deepcopy"),
        (Running(OfTheFirst), "block 4 of `trunk.stack` takes more from other blocks than the state"),
    ],
)
def test_states_that_would_be_recorded_wrongly_are_refused(model: nn.Module, message: str) -> None:
    """Written over, changed after the hook, or not a function of the state before: nothing else would notice."""
    with pytest.raises(NotAViT, match=message) as error:
        open_vit(model, preprocess=Preprocess(size=32, resize=32))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(blocks="trunk.nope"), "has no `trunk.nope`"),
        (dict(blocks="last"), "not a list of blocks"),
        (dict(blocks="normed"), "`normed` holds a LayerNorm beside its blocks: move it out of the list"),
        (dict(blocks="single"), "`single` has 1 blocks: a study of depth needs two or more"),
        (dict(cls=2), "do not fit"),
        (dict(cls=1, registers=99), "do not fit"),
    ],
)
def test_wrong_structure_options(options: dict, message: str) -> None:
    model = Unheard()
    model.single = nn.ModuleList([Block(24)])
    model.normed = nn.Sequential(Block(24), Block(24), nn.LayerNorm(24))
    with pytest.raises(ValueError, match=message):
        open_vit(model, preprocess=Preprocess(size=32, resize=32), **options)
