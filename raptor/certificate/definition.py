"""Definition 1 as a verdict: is the surrogate within a relative eps of its teacher at every layer?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from raptor.certificate.bootstrap import LEVEL
from raptor.certificate.error_curves import Curves
from raptor.streaming import Array, Record, jsonable

# Below this number of images a bootstrap interval is too narrow when few images are hard: at 16, 32 and 96 images a
# nominal 95 % interval covered in .52, .65 and .91 of simulated samples.
ENOUGH_IMAGES = 200
_LARGEST_ERROR = 2.0  # of an image, as a multiple of its norm
_NUM_HARDEST = 4


@dataclass
class HardImage(Record):
    """An image that the surrogate follows badly: its relative error, and its picture as a PNG in base64."""

    name: str
    error: float
    picture: str = ""


@dataclass(frozen=True)
class Definition(Record):
    """Whether E |a_l - ã_l|_F <= eps E |a_l|_F holds at every layer l, by the upper end of its 95 % interval.

    Attributes:
        eps: the eps asked for, else the smallest one that holds.
        is_given: whether eps was asked for.
        layer: the first layer that fails; if none does, the layer with the largest upper end.
        value, upper: the relative error at this layer, and the upper end of its bootstrap interval; None for `upper`
            without resamples or of a single image. The value itself decides then.
        bernstein: an upper end that holds for any number of images; see `bernstein_bounds`.
        q95, q99: quantiles over images of |a_l - ã_l|_F / |a_l|_F at this layer.
        worst, worst_image: the largest of these ratios, and the name of its image.
        hardest: the images with the largest ratios, the worst one first.
    """

    holds: bool
    eps: float
    is_given: bool
    layer: int
    value: float
    upper: float | None
    bernstein: float | None
    q95: float
    q99: float
    worst: float
    worst_image: str
    num_images: int
    hardest: list[HardImage] = field(default_factory=list)

    def line(self) -> str:
        """The verdict in one line."""
        if not self.is_given:
            verdict = f"holds for eps {self.eps:.3f} and above, layer {self.layer} decides"
        elif self.holds:
            verdict = f"holds for eps {self.eps:g}, closest at layer {self.layer}"
        else:
            verdict = f"fails for eps {self.eps:g} at layer {self.layer}"
        parts = [f"relative error {self.value:.3f}"]
        if self.upper is None:
            parts.append("no interval")
        else:
            parts.append(f"at most {self.upper:.3f} by the bootstrap")
        if self.bernstein is not None:
            parts.append(f"{self.bernstein:.3f} by the empirical Bernstein bound")
        of_images = f"q95 {self.q95:.3f}, q99 {self.q99:.3f}, worst {self.worst:.3f} ({self.worst_image})"
        line = f"Definition 1 {verdict}: {', '.join(parts)}; single images: {of_images}"
        if self.num_images < ENOUGH_IMAGES:
            line += f"; with {self.num_images} images, fewer than {ENOUGH_IMAGES}, a bootstrap interval undercovers"
        return line


def judge_definition(
    curves: Curves, ends_2lg: Array, names: Sequence[str], eps: float | None = None
) -> Definition | None:
    """The verdict for all tokens; None where a relative error is undefined, because the teacher's states are zero.

    A surrogate that fails at a layer is passed with a probability of at most 2.5 %, because every layer has to pass:
    several layers need no correction.

    Args:
        ends_2lg: the 95 % intervals of the relative error, (2, L, G).
        names: of the kept images.
        eps: None for the smallest one that holds.
    """
    value_l = curves.relative["all"]
    if not np.isfinite(value_l).all():
        return None
    upper_l = ends_2lg[1, :, 0]  # of all tokens, which Definition 1 is about
    decides_l = np.where(np.isfinite(upper_l), upper_l, value_l)
    layer = int(decides_l.argmax())
    limit = float(decides_l[layer]) if eps is None else eps
    holds = bool(decides_l[layer] <= limit)
    if not holds:  # the first layer, because later ones inherit its error
        layer = int((decides_l > limit).argmax())
    # Single images are looked at where the verdict is decided, not where each of them is worst.
    error_n = curves.image_error[:, layer, 0]
    norm_n = curves.image_norm[:, layer, 0]
    ratio_n = curves.image_relative[:, layer, 0]
    # A ratio that some image has, not a point between two of them.
    q95, q99 = np.quantile(ratio_n, (0.95, 0.99), method="inverted_cdf")
    hardest = []
    # A stable sort names the same image every time where ratios are equal.
    for row in (-ratio_n).argsort(kind="stable")[:_NUM_HARDEST]:
        hardest.append(HardImage(names[row], float(ratio_n[row])))
    return Definition(
        holds=holds,
        eps=limit,
        is_given=eps is not None,
        layer=layer + 1,
        value=float(value_l[layer]),
        upper=jsonable(upper_l[layer]),
        bernstein=jsonable(bernstein_bound(error_n, norm_n)),
        q95=float(q95),
        q99=float(q99),
        worst=hardest[0].error,
        worst_image=hardest[0].name,
        num_images=len(error_n),
        hardest=hardest,
    )


def bernstein_bound(error_n: Array, norm_n: Array, level: float = LEVEL) -> float:
    """The upper end of an interval for E error / E norm that covers at any number of images; inf where there is none.

    The empirical Bernstein inequality (Maurer and Pontil, 2009, theorem 4) bounds the mean of error - t norm by

        mean + sqrt(2 V log(2 / p) / N) + 7 R log(2 / p) / (3 (N - 1)),    p = (1 - level) / 2,

    with V its variance over images and R its range. The bound on the ratio is the smallest t where this is not
    positive. R is twice the largest norm: an error of twice an image's norm, that of a state of opposite sign, is
    taken as the largest one possible.
    """
    num_images = len(error_n)
    # The range term divides by N - 1.
    if num_images < 2:
        return float("inf")
    log_term = np.log(2 / ((1 - level) / 2))
    slack = 7 * _LARGEST_ERROR * norm_n.max() * log_term / (3 * (num_images - 1))
    error = error_n.mean() + slack
    norm = norm_n.mean()
    variance = np.cov(error_n, norm_n) * 2 * log_term / num_images
    # The larger root of (t norm - error)^2 = V(error) - 2 t Cov(error, norm) + t^2 V(norm), variances scaled as above.
    # Squared on both sides, the condition on t is a quadratic inequality.
    square = norm**2 - variance[1, 1]
    if square <= 0:  # the norms vary so much that no ratio can be excluded
        return float("inf")
    half = error * norm - variance[0, 1]
    return float((half + np.sqrt(half**2 - square * (error**2 - variance[0, 0]))) / square)
