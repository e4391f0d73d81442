"""One image inside a model: where its tokens attend, what its patches have in common, what the head sees, what turns.

`look_inside` measures one image, and a function for each picture draws it, as `raptor show` writes them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from raptor.dynamics.states import angle
from raptor.report.strips import components, shown_picture, teacher_colours
from raptor.report.style import use_style
from raptor.vit.view import ViT

PICTURES = ("attention", "pca", "lens", "turn")
_NUM_SHOWN = 6  # layers, where none are named
_NUM_CLASSES = 5  # lines of the logit lens
_CELL = 1.25  # inches of a map
_LEAST = 1e-5  # of the axis of probabilities
_NAME = 28  # characters of a class name


@dataclass
class InsideImage:
    """One image in one model, at all of its layers.

    Attributes:
        picture: what the model sees of the image, (S, S, 3) in 0..1.
        grid: patches along height and width.
        layers: the layers that are drawn, among 1..L.
        query: whose attention the maps show: the cls token's, or the mean over the patches'.
        attention: softmax weights on the patches by layer and head, (L, heads, P), nan where a block has fewer heads;
            None if it was not asked for.
        rollout: attention rolled out from the image to each layer, (L, P); likewise.
        patches: states of the patches after the final norm, (L+1, P, D).
        turns: angle between a patch's states before and after each block, (L, P), in degrees.
        probabilities: of the classes, by the final norm and head on each state, (L+1, classes); None if not asked for.
        classes: names of the classes.
    """

    name: str
    picture: np.ndarray
    grid: tuple[int, int]
    layers: list[int]
    query: str
    patches: Tensor
    turns: Tensor
    attention: Tensor | None = None
    rollout: Tensor | None = None
    probabilities: Tensor | None = None
    classes: list[str] = field(default_factory=list)

    def top(self) -> list[tuple[int, str, float]]:
        """The most probable class at every layer, 0..L: layer, name, probability; empty without the lens."""
        if self.probabilities is None:
            return []
        found = []
        for layer, row in enumerate(self.probabilities):
            best = int(row.argmax())
            found.append((layer, self.classes[best], float(row[best])))
        return found


@torch.no_grad()
def look_inside(
    vit: ViT, image: Image.Image, what: Sequence[str] = PICTURES, layers: Sequence[int] | None = None
) -> InsideImage:
    """Follow one image through a model. `layers` (1..L) are drawn, by default six spread over depth."""
    if not vit.groups.patches:
        raise ValueError(f"{vit.name} has no patch tokens to show")
    if "lens" in what and not vit.num_classes:
        raise ValueError(f"{vit.name} has no classifier for a logit lens: leave lens out of --what")
    num = vit.num_layers
    if layers is None:
        num_shown = min(num, _NUM_SHOWN)
        layers = np.linspace(num / num_shown, num, num_shown).round().astype(int).tolist()
    if not layers or min(layers) < 1 or max(layers) > num:
        raise ValueError(f"--layers must be from 1 to {num}, got {' '.join(map(str, layers))}")
    pixels = vit.preprocess(image)[None].to(vit.device)
    # Attention patterns cost memory, so they are recorded only if they are drawn.
    parts = ("attn",) if "attention" in what else ()
    states, _, inside = vit.record(pixels, parts)
    where = vit.groups.slice("patches")
    patches_lpd = torch.stack([state[0, where] for state in states])
    found = InsideImage(
        name=vit.name,
        picture=shown_picture(pixels[0], vit, None).cpu().numpy(),
        grid=vit.grid,
        layers=sorted(set(layers)),
        query="cls" if vit.groups.cls else "patches",
        patches=vit.norm(patches_lpd).float().cpu(),
        turns=angle(patches_lpd[:-1], patches_lpd[1:]).rad2deg().cpu(),
    )
    if "attention" in what:
        queries = vit.groups.slice(found.query)
        heads = []
        means = []
        for layer in range(1, num + 1):
            pattern_htt = inside.attn[layer][0].float()
            heads.append(pattern_htt[:, queries, where].mean(1))
            means.append(pattern_htt.mean(0))
        rolled = torch.stack(rollout(means))
        # Some blocks may have fewer heads than others: nan stands in their place.
        found.attention = torch.full((num, max(map(len, heads)), heads[0].shape[-1]), torch.nan)
        for row, pattern_hp in enumerate(heads):
            found.attention[row, : len(pattern_hp)] = pattern_hp.cpu()
        # The same queries as in the maps beside it.
        found.rollout = rolled[:, queries, where].mean(1).cpu()
    if "lens" in what:
        logits = [vit.finish(state)[0].float() for state in states]
        found.probabilities = torch.stack(logits).softmax(-1).cpu()
        found.classes = class_names(vit)
    return found


def class_names(vit: ViT) -> list[str]:
    """The classes of a head: by the model's own names, by ImageNet's words where their number fits, or by numbers."""
    if vit.classes:
        return list(vit.classes)
    from timm.data import ImageNetInfo
    from timm.data.imagenet_info import infer_imagenet_subset

    subset = infer_imagenet_subset({"num_classes": vit.num_classes})
    if subset is None:
        return [f"class {number}" for number in range(vit.num_classes)]
    return list(ImageNetInfo(subset).label_descriptions())


def rollout(patterns: Sequence[Tensor]) -> list[Tensor]:
    """How much of each token of the image reaches each token after every block (T, T), by Abnar and Zuidema (2020).

    `patterns` are the blocks' attention (T, T), averaged over heads. Half of every step stays in place, which stands
    for the residual connection.
    """
    found: list[Tensor] = []
    total = torch.eye(len(patterns[0]), dtype=patterns[0].dtype, device=patterns[0].device)
    stay = total
    for pattern in patterns:
        step = (pattern + stay) / 2
        total = step / step.sum(-1, keepdim=True) @ total
        found.append(total)
    return found


def foreground(patches_pd: Tensor, grid: tuple[int, int]) -> Tensor:
    """Which patches belong to the object, (P,): one side of their first principal component, as in DINOv2's paper.

    A component has no sign. The object is the side with the smaller share of the picture's border.
    """
    mean, axes, _ = components(patches_pd.double())
    is_side = (patches_pd.double() - mean) @ axes[:, 0] > 0
    border = torch.ones(grid, dtype=torch.bool)
    border[1:-1, 1:-1] = False
    on_border = border.flatten()
    share = is_side[on_border].double().mean()
    return is_side if share <= 0.5 else ~is_side


def object_colours(patches: Sequence[Tensor], is_object: Tensor) -> list[Tensor]:
    """Colours (P, 3) in 0..1 at every layer: components of the object's patches (P, D); other patches are black."""
    found = torch.zeros(len(patches), len(is_object), 3, dtype=torch.float64)
    if int(is_object.sum()) > 3:  # as many patches as components could be coloured at random
        colours, _, _ = teacher_colours([patches_pd[is_object][None] for patches_pd in patches])
        found[:, is_object] = torch.cat(colours)
    return list(found)


def draw_attention(found: InsideImage) -> Any:
    """A row per layer: the attention of each head, and the rollout up to this layer."""
    assert found.attention is not None and found.rollout is not None
    num_heads = found.attention.shape[1]
    rows = []
    for layer in found.layers:
        cells: list[tuple[Tensor | None, str]] = []
        for weights_p in found.attention[layer - 1]:
            if weights_p.isnan().any():  # this block has fewer heads than others
                cells.append((None, ""))
            else:
                cells.append((weights_p, f"{float(weights_p.sum()):.0%}"))
        rows.append((f"block {layer}", [*cells, (found.rollout[layer - 1], "")]))
    whose = {"cls": "the cls token attends", "patches": "the patches attend (mean)"}[found.query]
    title = f"{found.name}: where {whose}. Each map has its own scale; % is what falls on patches"
    return _draw_grid(found, title, [*(f"head {head + 1}" for head in range(num_heads)), "rollout"], rows)


def draw_pca(found: InsideImage) -> Any:
    """Three principal components of the patches as colours: of all, and of the object's as in DINOv2's paper."""
    shown = list(found.patches[found.layers])
    colours, _, explained = teacher_colours([patches_pd[None] for patches_pd in shown])
    # The last layer tells the object: the sign of a component, and so its side, would differ between layers.
    of_object = object_colours(shown, foreground(found.patches[-1], found.grid))
    whole = [(colours_npc[0], f"{share:.0%} of variance") for colours_npc, share in zip(colours, explained)]
    rows = [("all patches", whole), ("object", [(colours_pc, "") for colours_pc in of_object])]
    title = f"{found.name}: three principal components of the patches, after the final norm"
    return _draw_grid(found, title, [f"layer {layer}" for layer in found.layers], rows)


def draw_turn(found: InsideImage) -> Any:
    """By how many degrees each block turns each patch, on one scale."""
    shown = found.turns[np.array(found.layers) - 1]
    cells = [(turns_p, f"mean {float(turns_p.mean()):.0f}°") for turns_p in shown]
    # One patch may turn far more than the others, which would all be black.
    most = float(torch.quantile(shown, 0.99))
    columns = [f"block {layer}" for layer in found.layers]
    figure = _draw_grid(found, f"{found.name}: which patches still turn", columns, [("", cells)], most)
    figure.colorbar(figure.axes[-1].images[0], ax=list(figure.axes), label="turn in one block (°)", shrink=0.8)
    return figure


def draw_lens(found: InsideImage) -> Any:
    """The probabilities of the final classes, and the most probable class, when each layer's state goes to the head."""
    assert found.probabilities is not None
    plt = use_style()
    figure, (left, middle, right) = plt.subplots(1, 3, figsize=(9.6, 3.4), width_ratios=(1, 1.7, 1.1))
    left.imshow(found.picture)
    left.axis("off")
    layers = range(len(found.probabilities))
    for label in found.probabilities[-1].argsort(descending=True)[:_NUM_CLASSES].tolist():
        middle.plot(layers, found.probabilities[:, label], marker="o", label=found.classes[label][:_NAME])
    middle.set(xlabel="layer l", ylabel="probability", yscale="log", title="classes that are likely at the end")
    middle.set_ylim(_LEAST, 1.5)
    middle.legend()
    right.axis("off")
    right.set_title("most probable class")
    lines = []
    for layer, name, share in found.top():
        lines.append(f"{layer:>3}  {share:>6.1%}  {name[:_NAME]}")
    right.text(0, 1, "\n".join(lines), family="monospace", fontsize=7, va="top", transform=right.transAxes)
    figure.suptitle(f"{found.name}: final norm and head on every layer's state")
    return figure


def _draw_grid(
    found: InsideImage,
    title: str,
    columns: Sequence[str],
    rows: Sequence[tuple[str, Sequence[tuple[Tensor | None, str]]]],
    most: float | None = None,
) -> Any:
    """Rows of maps, each beside the image and under a name: numbers (P,) or colours (P, 3) of the patches, and words.

    most: the end of the scale of all maps of numbers; each has its own without it.
    """
    plt = use_style()
    size = (_CELL * (len(columns) + 1) + 0.4, _CELL * len(rows) + 0.6)
    figure, axes = plt.subplots(len(rows), len(columns) + 1, figsize=size, squeeze=False)
    for cell in axes.flat:
        cell.set(xticks=[], yticks=[])
        cell.spines[:].set_visible(False)
    for cell, name in zip(axes[0], ["image", *columns]):
        cell.set_title(name, fontsize=8)
    for (first, *others), (name, maps) in zip(axes, rows):
        first.imshow(found.picture)
        first.set_ylabel(name, fontsize=8)
        for cell, (values, words) in zip(others, maps):
            if values is not None:
                pixels = values.unflatten(0, found.grid).numpy()
                cell.imshow(pixels, cmap="inferno", vmin=0, vmax=most, interpolation="nearest")
            cell.set_xlabel(words, fontsize=7, labelpad=1)
    figure.suptitle(title, wrap=True)  # few layers make a narrow figure
    return figure
