"""What is a ViT, and what is refused, for every supported family."""

from __future__ import annotations

import pytest
import timm
import torch
import torchvision
import transformers
from families import (
    ZOO,
    Block,
    Unheard,
    each_family,
    opened,
)
from tiny_models import noise_images, shake, tiny_timm
from torch import Tensor, nn

from raptor.data.preprocess import Preprocess
from raptor.open import open_vit
from raptor.vit.structure import NotAViT
from raptor.vit.view import TokenGroups, image_vectors

SMALL = dict(hidden_size=48, num_hidden_layers=3, num_attention_heads=3, intermediate_size=96, patch_size=16)


@each_family
def test_blocks_groups_and_preprocessing(family: str) -> None:
    vit, expected = opened(family), ZOO[family]
    assert vit.num_layers == len(vit.blocks) == 3
    assert (vit.groups.cls, vit.groups.registers, vit.groups.patches) == expected.groups
    assert vit.grid == (2, 2)
    assert vit.patch_size == vit.preprocess.size // 2
    assert vit.dim == 48
    assert vit.num_classes == expected.num_classes
    assert vit.preprocess.mean == pytest.approx(expected.mean)
    assert vit.depth_conditioned is (family == "rope-mixed")
    assert not vit.model.training


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


class Skipping(nn.Module):
    """A U-shaped stream: the output uses a middle state beside the last one."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = timm.create_model(
            "vit_tiny_patch16_224", depth=3, embed_dim=48, num_heads=3, img_size=32, num_classes=0
        )
        shake(self.inner)
        self.image_size = 32

    def forward(self, images: Tensor) -> Tensor:
        x, middle = self.inner.forward_intermediates(images, indices=[1], output_fmt="NLC")
        return x.mean(1) + middle[0].mean(1)


def test_output_of_more_than_the_last_state_is_refused() -> None:
    with pytest.raises(NotAViT, match="depends on more than the last state"):
        open_vit(Skipping())


@torch.no_grad()
class Encoder(nn.Module):
    """Uses torch's own container, which reads attributes of its layers."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, norm_first=True)
        self.patches, self.cls = nn.Conv2d(3, 16, 8, 8), nn.Parameter(torch.randn(1, 1, 16))
        self.encoder = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)

    def forward(self, images: Tensor) -> Tensor:
        patches = self.patches(images).flatten(2).mT
        return self.encoder(torch.cat([self.cls.expand(len(patches), -1, -1), patches], dim=1))[:, 0]


def test_a_forward_that_looks_inside_its_blocks_is_refused_with_the_remedy() -> None:
    with pytest.raises(NotAViT, match=r"reads `self_attn` of its blocks.*loop over `encoder\.layers`"):
        open_vit(Encoder(), size=32)


def test_unheard_of_module_with_everything_given() -> None:
    model, images = Unheard(), Preprocess(size=32, resize=32)
    vit = open_vit(model, blocks="trunk.stack", norm="last", head="answer", cls=1, registers=1, preprocess=images)
    assert vit.groups == TokenGroups(1, 1, 16)
    assert (vit.num_layers, vit.blocks_path, vit.num_classes, vit.dim) == (5, "trunk.stack", 4, 24)
    assert vit.norm is model.last
    x = noise_images(vit)
    states, output = vit.record(x)
    assert torch.equal(vit.finish(states[-1]), output)
    normed = model.last(states[-1])
    assert torch.equal(vit.features(states[-1]), torch.cat([normed[:, 0], normed[:, 2:].mean(1)], -1))


@pytest.mark.parametrize("pool", ["avg", "max", "avgmax"])
def test_the_final_norm_after_pooling(pool: str) -> None:
    vit = tiny_timm(global_pool=pool, depth=2)
    assert vit.norm is vit.model.fc_norm


def test_unheard_of_module_found_by_its_structure() -> None:
    vit = open_vit(Unheard(), preprocess=Preprocess(size=32, resize=32))
    assert (vit.blocks_path, vit.num_layers, vit.groups.num_tokens) == ("trunk.stack", 5, 18)
    assert vit.groups.patches == 16 and vit.grid == (4, 4)


def test_a_last_linear_layer_is_a_classifier_only_by_the_users_word() -> None:
    images = Preprocess(size=32, resize=32)
    assert open_vit(Unheard(), preprocess=images).num_classes == 0
    assert open_vit(Unheard(), preprocess=images, head_classes=4).num_classes == 4
    with pytest.raises(ValueError, match="gives 4 numbers per image, not 5 class scores: correct --head_classes"):
        open_vit(Unheard(), preprocess=images, head_classes=5)
    with pytest.raises(ValueError, match="has no `nope`"):
        open_vit(Unheard(), preprocess=images, head="nope")
    classifier = timm.create_model("vit_tiny_patch16_224", depth=2, embed_dim=48, num_heads=3, img_size=32)
    assert open_vit(classifier).num_classes == 1000
    assert open_vit(classifier, head_classes=0).num_classes == 0
    clip = transformers.CLIPVisionModelWithProjection(transformers.CLIPVisionConfig(**SMALL, image_size=32))
    assert open_vit(clip).num_classes == 0


class Laid(Unheard):
    """Its tokens in an order of one's choice; `image` is a token that depends on the whole image."""

    def __init__(self, order: str, rows_first: bool = True) -> None:
        super().__init__()
        self.order, self.rows_first = order.split(), rows_first
        if "cls_token" in order:
            self.cls_token = self.summary
        del self.summary

    def forward(self, images: Tensor) -> Tensor:
        patches = nn.functional.unfold(images, 8, stride=8).transpose(1, 2)
        if not self.rows_first:
            patches = patches.unflatten(1, (4, 4)).transpose(1, 2).flatten(1, 2)
        patches = self.lift(patches)
        parts = {"patches": patches, "image": patches.mean(1, keepdim=True) + 3}
        x = torch.cat(
            [parts[n] if n in parts else getattr(self, n).expand(len(images), -1, -1) for n in self.order], dim=1
        )
        for block in self.trunk.stack:
            x = block(x)
        return self.answer(self.last(x).mean(1))


@pytest.mark.parametrize(
    ("order", "counts", "patches"),
    [
        ("cls_token scratch patches", (1, 1), slice(2, 18)),
        ("cls_token patches scratch scratch", (1, 2), slice(1, 17)),
        ("patches scratch", (0, 1), slice(0, 16)),
        ("patches cls_token", (1, 0), slice(0, 16)),
        ("scratch patches", (0, 1), slice(1, 17)),
        ("patches", (0, 0), slice(0, 16)),
    ],
)
@torch.no_grad()
def test_tokens_are_placed_where_they_stand(order: str, counts: tuple[int, int], patches: slice) -> None:
    vit = open_vit(Laid(order), preprocess=Preprocess(size=32, resize=32))
    groups = vit.groups
    assert (groups.cls, groups.registers, groups.patches) == (*counts, 16) and groups.slice("patches") == patches
    x = torch.randn(2, groups.num_tokens, 24)
    expected = {"patches": x[:, patches].mean(1)}
    if groups.cls:
        expected["cls"] = x[:, order.split().index("cls_token") * (16 if order.startswith("patches") else 1)]
    found = image_vectors(x, groups)
    assert found.keys() == expected.keys() and all(torch.equal(found[k], expected[k]) for k in found)
    assert TokenGroups.from_dict(groups.to_dict()) == groups


@pytest.mark.parametrize(
    ("model", "options", "message"),
    [
        (lambda: Laid("scratch patches scratch"), {}, "1 tokens stand before the patches and 1 after them"),
        (lambda: Laid("patches image"), {}, "17 patches are no square grid"),
        (lambda: Laid("patches scratch image"), {}, "do not stand together"),
        (lambda: Laid("scratch patches"), dict(cls=0, registers=0), "16 of 17 tokens depend on the image, not 17"),
        (lambda: Laid("scratch patches"), dict(cls=1, registers=1), "no square grid"),
        (lambda: Laid("patches", rows_first=False), {}, "do not stand row by row"),
        (
            lambda: Laid("scratch cls_token patches"),
            {},
            "cls token is number 2 of 18 tokens: put it first, or give cls=0",
        ),
        (lambda: Laid("patches scratch cls_token"), {}, "cls token is number 18 of 18 tokens"),
    ],
)
def test_tokens_that_cannot_be_placed_are_refused(model, options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message) as error:
        open_vit(model(), preprocess=Preprocess(size=32, resize=32), **options)
    assert "\n" not in str(error.value)


def test_a_cls_token_that_is_no_token_of_the_blocks_is_none() -> None:
    """The query of a pooling layer after the blocks may have such a name, too; weights stay as they are."""
    model = Laid("scratch patches")
    model.cls_token = nn.Parameter(torch.zeros(1, 1, 24))
    vit = open_vit(model, preprocess=Preprocess(size=32, resize=32))
    assert (vit.groups.cls, vit.groups.registers) == (0, 1) and not model.cls_token.any()
    held = Laid("cls_token patches")
    kept, pointer = held.cls_token.detach().clone(), held.cls_token.data_ptr()
    assert open_vit(held, preprocess=Preprocess(size=32, resize=32)).groups.cls == 1
    assert torch.equal(held.cls_token, kept) and held.cls_token.data_ptr() == pointer and held.cls_token.requires_grad


def test_tokens_before_the_patches_may_depend_on_the_image() -> None:
    options = dict(cls=0, registers=1, preprocess=Preprocess(size=32, resize=32))
    assert open_vit(Laid("image patches"), **options).groups == TokenGroups(0, 1, 16)


def test_trailing_detection_tokens_are_registers_and_packed_batches_are_refused() -> None:
    config = transformers.YolosConfig(
        **SMALL, image_size=[32, 32], num_detection_tokens=5, use_mid_position_embeddings=False
    )
    vit = open_vit(shake(transformers.YolosModel(config)), size=32)
    assert vit.groups == TokenGroups(1, 5, 4, ("cls", "patches", "registers"))
    assert vit.groups.slice("patches") == slice(1, 5) and vit.groups.slice("registers") == slice(5, 10)
    pixtral = transformers.PixtralVisionModel(transformers.PixtralVisionConfig(**SMALL, image_size=32))
    with pytest.raises(NotAViT, match="1 rows of tokens for 2 images"):
        open_vit(pixtral, size=32)


class Mixing(Unheard):
    """Normalises over the batch, as a batch norm in training mode would."""

    def forward(self, images: Tensor) -> Tensor:
        return super().forward(images - images.mean(0, keepdim=True) + images.mean())


def test_states_that_depend_on_the_batch_are_refused() -> None:
    with pytest.raises(NotAViT, match="depend on the other images of its batch"):
        open_vit(Mixing(), preprocess=Preprocess(size=32, resize=32))


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


@pytest.mark.parametrize("half", [torch.float16, torch.bfloat16])
@torch.no_grad()
def test_a_module_in_half_precision_is_opened_in_fp32_and_left_as_it_is(half: torch.dtype) -> None:
    model = timm.create_model("vit_tiny_patch16_224", depth=2, embed_dim=48, num_heads=3, img_size=32).to(half)
    vit = open_vit(model)
    assert vit.dtype == torch.float32 and next(model.parameters()).dtype == half
    assert vit(noise_images(vit)).dtype == torch.float32
    kept = open_vit(model, dtype="bf16")
    assert kept.dtype == torch.bfloat16 and kept(noise_images(kept)).dtype == torch.bfloat16
    with pytest.raises(ValueError, match="unknown dtype 'int8': choose from fp32, bf16, fp16"):
        open_vit(model, dtype="int8")


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
