"""A ridge classifier on a model's pooled features, in closed form."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from raptor.certificate.linear_head import LinearHead
from raptor.data.stream import Batch, sharing
from raptor.progress import track
from raptor.streaming import Rows
from raptor.vit.calls import first_tensor
from raptor.vit.trajectory import autocast
from raptor.vit.view import ViT

ALPHAS = (0.1, 1.0, 10.0, 100.0, 1e3, 1e4, 1e5)
_CHOICE_SHARE = 0.2  # of the images, to choose alpha on


def fit_ridge(
    features_nf: Tensor,
    labels_n: Tensor,
    num_classes: int,
    alphas: Sequence[float] = ALPHAS,
) -> LinearHead:
    """Ridge regression of one-hot labels on standardised features, in closed form and float64.

    Minimises `|Y - Z W - b|^2 + alpha |W|^2` with Z the standardised features. Alpha is chosen on a random fifth of the
    features after a fit on the rest, by accuracy, and by squared error where several alphas are equally accurate. The
    head is then fitted on all features.
    """
    if len(features_nf) != len(labels_n) or len(features_nf) < 2:
        raise ValueError(f"a ridge head needs at least two images with one label each, not {len(features_nf)}")
    if int(labels_n.min()) < 0 or int(labels_n.max()) >= num_classes:
        raise ValueError(f"labels must be 0..{num_classes - 1}, not {int(labels_n.min())}..{int(labels_n.max())}")
    labels_n = labels_n.to(features_nf.device)
    alpha = alphas[0]
    if len(alphas) > 1:
        # On the CPU, so that alpha is chosen on the same images whatever the device is.
        generator = torch.Generator().manual_seed(0)
        order = torch.randperm(len(features_nf), generator=generator).to(features_nf.device)
        held_out, rest = order.tensor_split([max(1, round(_CHOICE_SHARE * len(order)))])
        # The largest first: of equally good ones the first is kept, and a stronger penalty is the safer one.
        heads = ridge_path(features_nf[rest], labels_n[rest], num_classes, sorted(alphas, reverse=True))
        best = (-1.0, 0.0)
        for one, head in heads.items():
            logits = head(features_nf[held_out])
            error = (logits - F.one_hot(labels_n[held_out].long(), num_classes)).square().mean().item()
            # A far too large penalty may be as accurate, but not any more after the shares of the classes change.
            goodness = (accuracy(logits, labels_n[held_out]), -error)
            if goodness > best:
                alpha, best = one, goodness
    # On all features, because the choice of alpha is made and a head on more images is better.
    return ridge_path(features_nf, labels_n, num_classes, [alpha])[alpha]


def ridge_path(
    features_nf: Tensor, labels_n: Tensor, num_classes: int, alphas: Sequence[float]
) -> dict[float, LinearHead]:
    """A head for every alpha from one eigendecomposition of the features' covariance."""
    z, mean, scale = standardised(features_nf)
    y = F.one_hot(labels_n.long(), num_classes).double()
    # With centred labels the offset is their mean, and the penalty leaves it alone.
    target = y.mean(0)
    # Features are at most a few thousand, images many: F x F matrices, and every alpha costs only a product.
    values, vectors = torch.linalg.eigh(z.T @ z)
    projected = vectors.T @ (z.T @ (y - target))
    heads = {}
    for alpha in alphas:
        # Rounding may leave eigenvalues below zero where there are more features than images.
        weight_cf = (vectors @ (projected / (values.clamp_min(0) + alpha)[:, None])).T / scale
        heads[alpha] = LinearHead(weight_cf, target - weight_cf @ mean, alpha)
    return heads


def standardised(features_nf: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Features (N, F) with mean 0 and deviation 1, their mean and their scale (F,), in float64.

    The scale of a feature that does not vary is 1.
    """
    x_nf = features_nf.double()
    mean = x_nf.mean(0)
    scale = x_nf.std(0, correction=0)
    # A feature that never varies would be divided by rounding noise.
    scale = torch.where(scale > 1e-12 * scale.max(), scale, torch.ones_like(scale))
    return (x_nf - mean) / scale, mean, scale


@torch.no_grad()
def _pooled_features(vit: ViT, batches: Iterable[Batch], precision: str) -> Iterator[tuple[Tensor, Batch]]:
    """Pooled features (B, F) of the last state in float32, batch by batch."""
    # A hook on the last block only: a head reads no other state, and keeping all would take L times the memory.
    last: list[Tensor] = []
    handle = vit.blocks[-1].register_forward_hook(lambda _module, _args, output: last.append(first_tensor(output)))
    try:
        for batch in track(batches, f"features of {vit.name}", quiet=True):
            with torch.no_grad(), autocast(precision, vit.device):
                vit(batch.images.to(vit.device, non_blocking=True))
                features = vit.features(last.pop()).float()
            yield features, batch
    finally:
        handle.remove()


def collect_features(vit: ViT, batches: Iterable[Batch], precision: str = "fp32") -> tuple[Tensor, Tensor | None]:
    """Pooled features (N, F) of the last state in float32, and labels (N,) or None, on the model's device.

    Where ranks share the batches, all of them call this, and rank 0 gets the rows of all.
    """
    features = Rows()
    labels = Rows()
    ranks = sharing(batches)
    for some, batch in _pooled_features(vit, batches, precision):
        features.add(some, batch.places)
        if batch.labels is not None:
            labels.add(batch.labels.to(vit.device), batch.places)
    if not any(ranks.gather(len(features))):
        raise ValueError("no images to take features from: the data is empty")
    features.reduce(ranks)
    labels.reduce(ranks)
    if not len(features):  # rank 0 has them
        return torch.empty(0, device=vit.device), None
    return features.values(), labels.values() if len(labels) else None


def fit_ridge_head(
    vit: ViT, batches: Iterable[Batch], num_classes: int | None = None, precision: str = "fp32"
) -> tuple[LinearHead, int] | None:
    """A ridge head on the CPU and the number of images that it was fitted on; None without labels.

    It is fitted on the features of `batches`, of all ranks that share them. `num_classes` is by default one more than
    the largest label.
    """
    features, labels = collect_features(vit, batches, precision)

    def fit() -> tuple[LinearHead, int] | None:
        if labels is None:
            return None
        return fit_ridge(features, labels, num_classes or int(labels.max()) + 1).cpu(), len(features)

    return sharing(batches).first(fit)


def head_accuracy(vit: ViT, head: LinearHead, batches: Iterable[Batch], precision: str = "fp32") -> float:
    """Accuracy of a head on the features of labelled batches, of all ranks that share them."""
    head = head.to(vit.device)
    num_right = torch.zeros((), dtype=torch.int64, device=vit.device)
    num = 0
    for features, batch in _pooled_features(vit, batches, precision):
        assert batch.labels is not None
        num_right += is_right(head(features), batch.labels).sum()
        num += len(features)
    ranks = sharing(batches)
    # Counts before the ratio, because ranks may have different numbers of images.
    return int(ranks.sum(num_right)) / sum(ranks.gather(num))


def is_right(logits_nc: Tensor, labels_n: Tensor) -> Tensor:
    """Whether each largest logit is that of the label, (N,) bool on the device of the logits."""
    return logits_nc.argmax(-1) == labels_n.to(logits_nc.device)


def accuracy(logits_nc: Tensor, labels_n: Tensor) -> float:
    """Share of images whose largest logit is that of their label."""
    return is_right(logits_nc, labels_n).float().mean().item()
