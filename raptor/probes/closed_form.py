"""Quick looks: ridge and logistic regression on cached features, the penalty chosen on the split of train."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from raptor.fidelity.heads import ALPHAS, fit_ridge
from raptor.probes.classify import Classify
from raptor.probes.train import Choice, HeadTensors, Trained

PENALTIES = (1e-1, 1e-2, 1e-3, 1e-4, 1e-5)
CLOSED_FORMS = {"ridge": ALPHAS, "logistic": PENALTIES}


def fit_closed_form(task: Classify, kind: str, penalties: Sequence[float] | None = None) -> Trained:
    """Fit a head per penalty on centre crops of the training images and choose on the split."""
    if kind not in CLOSED_FORMS:
        raise ValueError(f"unknown closed form {kind!r}; use {' or '.join(CLOSED_FORMS)}")
    values = list(penalties or CLOSED_FORMS[kind])
    if min(values) <= 0:
        raise ValueError(f"penalties must be above 0; got {min(values)}")
    features_nf, labels_n = task.features(task.fit_data)
    if kind == "ridge":
        fitted = [fit_ridge(features_nf, labels_n, task.num_outputs, [alpha]) for alpha in values]
        heads = [(head.weight, head.bias) for head in fitted]
    else:
        heads = logistic_path(features_nf, labels_n, task.num_outputs, values)
    choice = Choice(task, values)
    weight_gcf, bias_gc = (torch.stack([head[i] for head in heads]) for i in (0, 1))
    choice.see(weight_gcf, bias_gc, 0)
    return choice.finish(seed=0)


def logistic_path(
    features_nf: Tensor, labels_n: Tensor, num_classes: int, penalties: Sequence[float], max_iter: int = 500
) -> list[HeadTensors]:
    """Multinomial logistic regression on standardised features for each penalty, each started from the one before.

    Minimises mean cross-entropy + penalty / 2 |W|^2 (biases are free) by L-BFGS in float64. weight (C, F) and bias (C,)
    apply to the features as they are.
    """
    x_nf = features_nf.double()
    mean, scale = x_nf.mean(0), x_nf.std(0, correction=0)
    scale = torch.where(scale > 1e-12 * scale.max(), scale, torch.ones_like(scale))
    z_nf = (x_nf - mean) / scale
    weight = torch.zeros(num_classes, z_nf.shape[1], dtype=torch.float64, device=z_nf.device, requires_grad=True)
    bias = torch.zeros(num_classes, dtype=torch.float64, device=z_nf.device, requires_grad=True)
    heads = []
    for penalty in penalties:
        _minimise(z_nf, labels_n, weight, bias, penalty, max_iter)
        own = (weight / scale).detach()
        heads.append((own.float(), (bias - own @ mean).detach().float()))
    return heads


def _minimise(z_nf: Tensor, labels_n: Tensor, weight: Tensor, bias: Tensor, penalty: float, max_iter: int) -> None:
    optimizer = torch.optim.LBFGS(
        [weight, bias],
        max_iter=max_iter,
        tolerance_grad=1e-7,
        tolerance_change=1e-12,
        history_size=20,
        line_search_fn="strong_wolfe",
    )

    def loss() -> Tensor:
        optimizer.zero_grad()
        value = F.cross_entropy(F.linear(z_nf, weight, bias), labels_n) + penalty / 2 * weight.square().sum()
        value.backward()
        return value

    optimizer.step(loss)
