"""Streaming error curves over depth between a teacher's states and a student's.

Every batch is reduced on its device to a few numbers per image and per coordinate, added to float64 sums. Nothing is
read back before `result`, and memory does not grow with the number of images: beyond `_RESERVOIR_IMAGES` the per-image
values are a uniform sample.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from raptor.devices import Ranks, free_bytes, full_precision
from raptor.streaming import Array, Moments, Record, Reservoir, decode, jsonable
from raptor.vit.groups import TokenGroups

_RESERVOIR_IMAGES = 10_000
METRICS = ("r2", "r2_uniform", "absolute", "relative", "cosine", "bounded_r2", "pearson")
_IMAGE_VALUES = ("image_error", "image_norm", "image_deviation", "image_cosine")
# Per image, layer and group: |s - t|^2, |t|^2, |t - centre|^2, sums of cosine, Pearson, Pearson^2.
_NUM_IMAGE_VALUES = 6
STACKED_VALUES = {"cuda": 2**27, "cpu": 1}  # how many numbers of a model's states are measured at once, at most
_BYTES_EACH = 400  # free memory required per number: each takes about 20
_TINY = 1e-30


@dataclass
class Curves(Record):
    """Error curves over the layers 1..L, one array (L,) for each group: `all` and the groups that are present.

    Attributes:
        r2: 1 - sum |s - t|^2 / sum |t - mean|^2 over the whole set, the mean per coordinate.
        r2_uniform: the same for each coordinate, then the plain average over coordinates.
        absolute: E |a_l - ã_l|_F, the Frobenius norm over one image's tokens, mean over images.
        relative: absolute / E |a_l|_F.
        cosine: mean over tokens.
        bounded_r2: squared Pearson correlation over coordinates, mean over tokens.
        pearson: the correlation itself, mean over tokens.
        image_error, image_norm: |a_l - ã_l|_F and |a_l|_F of each kept image, (N, L, G) in the order of `groups`.
        image_deviation: each image's share of sum |t - mean|^2, (N, L, G); the mean of the first batch is used,
            rescaled to the exact total. For bootstrap intervals of R2.
        image_cosine: mean cosine over the tokens of each kept image, (N, L, G).
        image_places: the place of each kept image in the stream, (N,).
    """

    groups: tuple[str, ...]
    num_layers: int
    num_images: int
    r2: dict[str, Array]
    r2_uniform: dict[str, Array]
    absolute: dict[str, Array]
    relative: dict[str, Array]
    cosine: dict[str, Array]
    bounded_r2: dict[str, Array]
    pearson: dict[str, Array]
    image_error: Array
    image_norm: Array
    image_deviation: Array
    image_cosine: Array
    image_places: Array

    @property
    def image_relative(self) -> Array:
        """|a_l - ã_l|_F / |a_l|_F of each kept image, (N, L, G)."""
        return self.image_error / np.maximum(self.image_norm, _TINY)

    def to_dict(self) -> dict[str, Any]:
        """Group -> metric -> list over layers, without the per-image values. Numbers that are not finite are None."""
        found: dict[str, Any] = {}
        for group in self.groups:
            found[group] = {metric: jsonable(getattr(self, metric)[group]) for metric in METRICS}
        return found

    @classmethod
    def from_dict(cls, saved: Any) -> Curves:
        """The curves of parsed JSON, with no per-image values."""
        found: dict[str, dict[str, Array]] = decode(dict[str, dict[str, Array]], saved)
        none = np.zeros(0)
        num_layers = max((of_group.get("r2", none).size for of_group in found.values()), default=0)
        curves: dict[str, Any] = {metric: {} for metric in METRICS}
        for group, of_group in found.items():
            for metric in METRICS:
                values = of_group.get(metric, none)
                if values.shape != (num_layers,):
                    raise ValueError(f"{group}.{metric}: Input should be a number for each of {num_layers} layers")
                curves[metric][group] = values
        none_nlg = np.zeros((0, num_layers, len(found)))
        of_images: dict[str, Any] = dict.fromkeys(_IMAGE_VALUES, none_nlg)
        return cls(tuple(found), num_layers, 0, **curves, **of_images, image_places=none)


def _layer_sums(
    t_lbtd: Tensor, s_lbtd: Tensor, centre_lgd: Tensor, spans: Sequence[tuple[int, int]]
) -> tuple[Tensor, Tensor]:
    """Sums of some layers over one batch, in float32 and in as few passes over the states as eager torch allows.

    Products of two vectors come from the norms of both and of their difference, which loses no digits when the two are
    close; norms come from `var_mean`, which loses none to a large mean.

    Args:
        t_lbtd, s_lbtd: teacher and student states.
        centre_lgd: a point near each group's mean.
        spans: first token and one past the last of each group; the first group is all tokens.

    Returns:
        per image (L, B, G, 6), see `_NUM_IMAGE_VALUES`; per coordinate (L, G - 1, 3, D), without all tokens: mean of t
        and sum of (t - mean)^2 over the batch's images and tokens, and sum of (s - t)^2.
    """
    t = t_lbtd.float()
    s = s_lbtd.float()
    error = s - t
    t_square, t_spread = _row_squares(t)
    s_square, s_spread = _row_squares(s)
    e_square, e_spread = _row_squares(error)
    cosine = _cosine(t_square, s_square, e_square)
    pearson = _cosine(t_spread, s_spread, e_spread)
    products = (t.flatten(1, 2) @ centre_lgd.mT).unflatten(1, t.shape[1:3])
    from_centre_lbtg = t_square[..., None] - 2 * products + centre_lgd.square().sum(-1)[:, None, None]
    # The place of the distance from the centre is filled below: the centre is another one for each group.
    not_yet = torch.zeros_like(cosine)
    token_lbtv = torch.stack([e_square, t_square, not_yet, cosine, pearson, pearson.square()], dim=-1)
    image_lbgv = torch.stack([token_lbtv[:, :, a:b].sum(2) for a, b in spans], dim=2)
    for g, (a, b) in enumerate(spans):
        # Rounding may take the expanded square below zero.
        image_lbgv[:, :, g, 2] = from_centre_lbtg[:, :, a:b, g].clamp_min(0).sum(2)
    columns = []
    for a, b in spans[1:]:
        var, mean = torch.var_mean(t[:, :, a:b], dim=(1, 2), correction=0)
        squares = torch.linalg.vector_norm(error[:, :, a:b], dim=(1, 2)).square()
        columns.append(torch.stack([mean, var * (t.shape[1] * (b - a)), squares], dim=1))
    return image_lbgv, torch.stack(columns, dim=1)


def _row_squares(x: Tensor) -> tuple[Tensor, Tensor]:
    """Squared norm of each token, (L, B, T), about zero and about the mean of its coordinates."""
    var, mean = torch.var_mean(x, dim=-1, correction=0)
    dim = x.shape[-1]
    return dim * (var + mean.square()), dim * var


def _cosine(x_square: Tensor, y_square: Tensor, difference_square: Tensor) -> Tensor:
    """Cosine of two vectors given the squared norms of both and of their difference; 0 where one is zero."""
    product = x_square.sqrt() * y_square.sqrt()
    cosine = 0.5 * (x_square + y_square - difference_square) / product.clamp_min(_TINY)
    # Rounding may take it beyond 1, and with it the bounded R2, which is its square.
    return cosine.clamp(-1, 1)


class ErrorCurves:
    """Accumulates the error curves of a student against its teacher.

    Args:
        num_layers: L.
        groups: the token groups of both models.
        reservoir: how many images' own values are kept.
        seed: of the choice of those images.
    """

    def __init__(
        self,
        num_layers: int,
        groups: TokenGroups,
        *,
        reservoir: int = _RESERVOIR_IMAGES,
        seed: int = 0,
    ) -> None:
        self.num_layers = num_layers
        self.groups = groups
        self.names = ["all"]
        self.spans = [(0, groups.num_tokens)]
        for name, where in groups.present():
            self.names.append(name)
            self.spans.append((where.start, where.stop))
        self.num_images = 0
        self._reservoir = Reservoir(reservoir, seed)
        self._coordinates = Moments()  # of the teacher's states, (L, G - 1, D)
        self._centre: Tensor | None = None  # (L, G, D)
        # Sums over all images; they get their shape with the first batch.
        self._image_sums = torch.zeros((), dtype=torch.float64)
        self._norm_sums = self._image_sums
        self._residuals = self._image_sums

    @torch.no_grad()
    def centre_of(self, teacher_states: Sequence[Tensor]) -> Tensor:
        """The mean of each layer and group over a batch, (L, G, D)."""
        layers = []
        for x_btd in teacher_states[1:]:
            layers.append(torch.stack([x_btd.float()[:, a:b].mean((0, 1)) for a, b in self.spans]))
        return torch.stack(layers)

    def start(self, centre_lgd: Tensor) -> None:
        """Measure the images' deviations from this centre; by default the first batch's."""
        device = centre_lgd.device
        _, num, dim = centre_lgd.shape
        self._centre = centre_lgd
        self._num_stacked = min(STACKED_VALUES.get(device.type, 1), free_bytes(device) // _BYTES_EACH)
        double = torch.float64
        self._num_tokens = torch.tensor([[b - a] for a, b in self.spans[1:]], device=device, dtype=double)  # (G - 1, 1)
        self._image_sums = torch.zeros(self.num_layers, num, _NUM_IMAGE_VALUES, device=device, dtype=double)
        self._norm_sums = self._image_sums[..., :2].clone()
        self._residuals = torch.zeros(self.num_layers, num - 1, dim, device=device, dtype=double)

    @torch.no_grad()
    def update(
        self, teacher_states: Sequence[Tensor], student_states: Sequence[Tensor], places: Sequence[int] | None = None
    ) -> None:
        """Add a batch: the states `a_0..a_L` of both, each (B, T, D); `a_0` is not compared.

        places: of its images in the stream, by default those that follow.
        """
        for who, states in (("teacher", teacher_states), ("student", student_states)):
            if len(states) != self.num_layers + 1:
                raise ValueError(f"the {who} gave {len(states)} states, not a_0..a_{self.num_layers}")
        shapes = [tuple(states[-1].shape) for states in (student_states, teacher_states)]
        if shapes[0] != shapes[1] or shapes[0][1] != self.groups.num_tokens:
            raise ValueError(f"student and teacher states have the shapes {shapes[0]} and {shapes[1]}")
        # An empty batch has no mean to start from.
        if len(teacher_states[0]) == 0:
            return
        if self._centre is None:
            self.start(self.centre_of(teacher_states))
        assert self._centre is not None
        image_parts = []
        coordinate_parts = []
        # TF32 keeps ten bits of a factor, and autocast fewer: too few for the distance between close states.
        with full_precision(teacher_states[0].device):
            # Several layers at once on a GPU, which would otherwise wait for kernel launches.
            together = max(1, self._num_stacked // teacher_states[1].numel())
            for first in range(0, self.num_layers, together):
                where = slice(first, min(first + together, self.num_layers))
                t_lbtd = _stacked(teacher_states[1:][where])
                s_lbtd = _stacked(student_states[1:][where])
                image_lbgv, coordinate_lg3d = _layer_sums(t_lbtd, s_lbtd, self._centre[where], self.spans)
                image_parts.append(image_lbgv)
                coordinate_parts.append(coordinate_lg3d)
        image_blgv = torch.cat(image_parts).transpose(0, 1)
        self._image_sums += image_blgv.sum(0, dtype=torch.float64)
        # Roots before sums: E |a - s|_F is a mean of norms, not the root of a mean.
        self._norm_sums += image_blgv[..., :2].sqrt().sum(0, dtype=torch.float64)
        mean_lgd, square_lgd, residual_lgd = torch.cat(coordinate_parts).double().unbind(2)
        self._coordinates.add(mean_lgd, square_lgd, len(image_blgv) * self._num_tokens)
        self._residuals += residual_lgd
        self._reservoir.add(image_blgv, places)
        self.num_images += len(image_blgv)

    def reduce(self, ranks: Ranks) -> None:
        """Merge the sums of all ranks; the images' own values are then on rank 0."""
        self._image_sums = ranks.sum(self._image_sums)
        self._norm_sums = ranks.sum(self._norm_sums)
        self._residuals = ranks.sum(self._residuals)
        self._coordinates.reduce(ranks)
        self._reservoir.reduce(ranks)
        self.num_images = sum(ranks.gather(self.num_images))

    def first_not_finite(self) -> tuple[int, bool] | None:
        """The first layer with a state that is not finite, of any image, and whether the teacher's is; None if none."""
        if self.num_images == 0:
            return None
        finite_lv = self._norm_sums.isfinite().all(dim=1)  # of |s - t| and |t|, over the groups
        bad = (~finite_lv.all(dim=1)).nonzero()
        if not len(bad):
            return None
        first = int(bad[0])
        return first + 1, not bool(finite_lv[first, 1])

    def result(self) -> Curves:
        """The curves over everything seen so far."""
        if self.num_images == 0:
            raise ValueError("no images were measured: the data is empty")
        counts_g = np.array([b - a for a, b in self.spans], dtype=np.float64)
        mean_lgd = self._coordinates.mean.cpu().numpy()
        about_mean_lgd = self._coordinates.squares.cpu().numpy()
        # Sums of squares of the groups become that of all tokens by what their means differ.
        num_g1 = (counts_g[1:] * self.num_images)[None, :, None]
        grand_mean = (mean_lgd * num_g1).sum(1, keepdims=True) / num_g1.sum()
        whole = (about_mean_lgd + num_g1 * (mean_lgd - grand_mean) ** 2).sum(1, keepdims=True)
        total_lgd = np.concatenate([whole, about_mean_lgd], axis=1)
        residual_lgd = self._residuals.cpu().numpy()
        residual_lgd = np.concatenate([residual_lgd.sum(1, keepdims=True), residual_lgd], axis=1)
        image_lgv = self._image_sums.cpu().numpy()
        norms_lgv = self._norm_sums.cpu().numpy() / self.num_images
        per_token = image_lgv / (self.num_images * counts_g)[None, :, None]
        kept = self._reservoir.values().double().cpu().numpy()
        # A group with one state for all images has no variance and no R2. NaN says so.
        with np.errstate(divide="ignore", invalid="ignore"):
            # A constant coordinate counts 1 if it is predicted exactly, else 0, as in scikit-learn.
            is_constant = total_lgd <= _TINY
            of_constant = (residual_lgd <= _TINY).astype(np.float64)
            r2_lgd = np.where(is_constant, of_constant, 1 - residual_lgd / np.where(is_constant, 1.0, total_lgd))
            curves = {
                "r2": 1 - residual_lgd.sum(-1) / total_lgd.sum(-1),
                "r2_uniform": r2_lgd.mean(-1),
                "absolute": norms_lgv[..., 0],
                "relative": norms_lgv[..., 0] / norms_lgv[..., 1],
                "cosine": per_token[..., 3],
                "pearson": per_token[..., 4],
                "bounded_r2": per_token[..., 5],
            }
            # The deviations of single images are from the centre, which is only near the mean. The total is exact.
            rescale = total_lgd.sum(-1) / image_lgv[..., 2]
        return Curves(
            groups=tuple(self.names),
            num_layers=self.num_layers,
            num_images=self.num_images,
            **{metric: {name: lg[:, g] for g, name in enumerate(self.names)} for metric, lg in curves.items()},
            image_error=np.sqrt(kept[..., 0]),
            image_norm=np.sqrt(kept[..., 1]),
            image_deviation=kept[..., 2] * rescale,
            image_cosine=kept[..., 3] / counts_g,
            image_places=np.array(self._reservoir.places()),
        )


def _stacked(states: Sequence[Tensor]) -> Tensor:
    """States (B, T, D) of some layers as (l, B, T, D); a single one, as on a CPU, is not copied."""
    return states[0][None] if len(states) == 1 else torch.stack(list(states))
