"""Definition 1 as a verdict: the layer that decides, the worst image, and bounds that cover."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from scipy.optimize import brentq
from tiny_certified import image_batches

from raptor.certificate.bootstrap import statistic_interval
from raptor.certificate.certificate import Certificate
from raptor.certificate.definition import bernstein_bound, judge_definition
from raptor.certificate.measure import certify
from raptor.vit.view import ViT

HARD = 0.03  # share of images whose error is 1; all others have .05, and every norm is 1
TRUE_MEAN = HARD * 1 + (1 - HARD) * 0.05


def test_the_smallest_eps_holds_and_any_smaller_one_fails(certificate: Certificate) -> None:
    found = certificate.definition
    assert found is not None and found.holds and not found.is_given
    upper = certificate.intervals["relative"]["all"][1]
    assert found.eps == found.upper == upper.max() and found.layer == upper.argmax() + 1
    assert found.value == certificate.curves.relative["all"][found.layer - 1]
    ends = np.stack([certificate.intervals["relative"][g] for g in certificate.curves.groups], axis=-1)
    names = [f"image {i}" for i in range(certificate.num_images)]
    same = judge_definition(certificate.curves, ends, names, found.eps)
    less = judge_definition(certificate.curves, ends, names, found.eps * 0.999)
    assert same is not None and same.holds and same.layer == found.layer
    assert less is not None and not less.holds and upper[less.layer - 1] > less.eps
    assert (upper[: less.layer - 1] <= less.eps).all()  # the first layer that fails
    tiny = judge_definition(certificate.curves, ends, names, 1e-9)
    assert tiny is not None and (tiny.holds, tiny.layer) == (False, 1)
    assert tiny.line().startswith("Definition 1 fails for eps 1e-09 at layer 1: ")


def test_quantiles_and_the_worst_image_by_brute_force(certificate: Certificate) -> None:
    found = certificate.definition
    assert found is not None
    ratio = certificate.curves.image_relative[:, found.layer - 1, 0]
    ranked = sorted(ratio.tolist())
    assert (found.q95, found.q99) == (ranked[19], ranked[20])  # of 21 images: the 20th (19.95) and the 21st (20.79)
    assert found.worst == ranked[-1] and found.worst_image == f"image {ratio.argmax()}"
    assert [image.error for image in found.hardest] == ranked[:-5:-1]
    curves = certificate.curves
    error, norm = (
        values[:, found.layer - 1, curves.groups.index("all")] for values in (curves.image_error, curves.image_norm)
    )
    assert found.bernstein == bernstein_bound(error, norm)
    assert "with 21 images, fewer than 200, a bootstrap interval undercovers" in found.line()
    assert "undercovers" not in replace(found, num_images=200).line()


def test_without_resamples_the_value_decides(teacher: ViT, surrogate: ViT) -> None:
    found = certify(surrogate, teacher, image_batches(1), eps=9.0, null_models=False, bootstrap=0).definition
    assert found is not None and found.holds and found.is_given and found.upper is None
    assert "no interval" in found.line()


def test_the_bernstein_bound_solves_its_inequality() -> None:
    rng = np.random.default_rng(0)
    norm = rng.uniform(1, 2, 300)
    error = norm * rng.uniform(0, 0.5, 300)
    log_term = np.log(2 / 0.025)

    def excess(t: float) -> float:
        x = error - t * norm
        return float(x.mean() + np.sqrt(2 * x.var(ddof=1) * log_term / 300) + 7 * 2 * norm.max() * log_term / (3 * 299))

    assert bernstein_bound(error, norm) == pytest.approx(brentq(excess, 0.1, 5), rel=1e-9)
    assert bernstein_bound(error[:1], norm[:1]) == np.inf


def test_the_bernstein_bound_of_two_images_in_closed_form() -> None:
    """Equal errors of .3 and norms of 2 have no variance: only the range is left, 7 * 4 * log(2 / .025) / 3."""
    bound = bernstein_bound(np.array([0.3, 0.3]), np.array([2.0, 2.0]))
    assert bound == pytest.approx((0.3 + 7 * 4 * np.log(80) / 3) / 2)
    # Norms of which one is nearly zero exclude no ratio.
    assert bernstein_bound(np.array([0.3, 0.3]), np.array([1e-3, 2.0])) == np.inf


def test_the_bernstein_bound_has_no_unit() -> None:
    error, norm = np.array([0.3, 0.4, 0.3] * 50), np.array([1.0, 1.2, 0.9] * 50)
    bound = bernstein_bound(error, norm)
    assert np.isfinite(bound) and bernstein_bound(0.01 * error, 0.01 * norm) == pytest.approx(bound)


def test_a_layer_at_eps_holds(certificate: Certificate) -> None:
    curves = certificate.curves
    ends = np.zeros((2, curves.num_layers, len(curves.groups)))
    ends[1, :3, 0] = (0.5, 0.4, 0.6)
    names = [f"image {i}" for i in range(certificate.num_images)]
    found = judge_definition(curves, ends, names, 0.5)
    assert found is not None and (found.holds, found.layer, found.upper) == (False, 3, 0.6)


def test_states_of_norm_zero_give_no_verdict(certificate: Certificate) -> None:
    curves = certificate.curves
    relative = {**curves.relative, "all": np.full(curves.num_layers, np.nan)}
    ends = np.zeros((2, curves.num_layers, len(curves.groups)))
    names = [f"image {i}" for i in range(certificate.num_images)]
    assert judge_definition(replace(curves, relative=relative), ends, names) is None


@pytest.mark.parametrize("num_images", [16, 96])
def test_where_few_images_are_hard_only_the_bernstein_bound_covers(num_images: int) -> None:
    """A sample without a hard image, .97^N of all samples, puts every resampled mean at .05: the bootstrap misses."""
    rng = np.random.default_rng(1)
    covered = {"bootstrap": 0, "bernstein": 0}
    for _ in range(400):
        error = np.where(rng.random(num_images) < HARD, 1.0, 0.05)
        norm = np.ones(num_images)
        upper = statistic_interval([error, norm], lambda e, n: e / n, 200)[1]
        covered["bootstrap"] += bool(upper >= TRUE_MEAN)
        covered["bernstein"] += bernstein_bound(error, norm) >= TRUE_MEAN
    assert covered["bernstein"] >= 0.975 * 400
    no_hard_image = (1 - HARD) ** num_images
    deviation = np.sqrt(no_hard_image * (1 - no_hard_image) / 400)
    assert covered["bootstrap"] / 400 <= 1 - no_hard_image + 3 * deviation
