"""Classification on cls and mean patch: heads trained on random crops and flips, or fitted in closed form."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from raptor.certificate.heads import num_features
from raptor.certificate.linear_head import LinearHead, own_linear_head
from raptor.certificate.ridge import ridge_path
from raptor.data.images import ImageData
from raptor.data.preprocess import Preprocess
from raptor.data.split import choice_split
from raptor.data.stream import TrainStream, iterate
from raptor.devices import ONE_PROCESS, Ranks
from raptor.probes.features import check_finite, normed_tokens, view_at
from raptor.probes.grid import Choice
from raptor.probes.result import HeadTensors, SeedRun
from raptor.streaming import Rows, reduce_all
from raptor.vit.groups import pool
from raptor.vit.view import ViT

_CROP_SCALE = (0.08, 1.0)
_SCORE_ELEMENTS = 2**26


class Classify:
    """The classification task on one view and layer; see `raptor.probes.grid.Task`."""

    metric = "accuracy"
    higher_is_better = True

    def __init__(
        self,
        vit: ViT,
        layer: int,
        train_data: ImageData,
        val_data: ImageData,
        *,
        batch_size: int,
        precision: str,
        size: int | None = None,
        num_workers: int | None = None,
        ranks: Ranks = ONE_PROCESS,
    ) -> None:
        self.device = vit.device
        self.layer = layer
        self.precision = precision
        self.num_workers = num_workers
        self.ranks = ranks
        self.preprocess = vit.preprocess
        if size is not None:
            self.preprocess = Preprocess.for_native(size, vit.preprocess.mean, vit.preprocess.std, size=size)
        self.vit = view_at(vit, self.preprocess.size, self.preprocess.size)
        classes = _classes(train_data)
        # By a hash of the image's name: the split is the same whatever else is in the folder.
        fit, held = choice_split(train_data.keys)
        if len(train_data.present()) < 2:
            raise ValueError(f"all training images of {train_data.name} are of one class: a probe needs two or more")
        self.fit_data = train_data.select(fit)
        self.num_fit = len(fit)
        self.size = (self.preprocess.size, self.preprocess.size)
        # A batch larger than the data would leave an epoch without a step.
        self.batch_size = min(batch_size, len(fit))
        self.num_outputs = len(classes)
        self.num_features = num_features(vit)
        split = self.features(train_data.select(held))
        reported, labels = self.features(val_data)
        own = _classes(val_data)
        number_of = {name: number for number, name in enumerate(classes)}
        # A data set may name classes that none of its images has.
        for i in sorted(val_data.present()):
            if own[i] not in number_of:
                raise ValueError(f"class {own[i]} of {val_data.name} does not occur in the training data")
        # Renumbered to the order of training. A -1 stands only for classes without images: no label becomes one.
        table = torch.tensor([number_of.get(name, -1) for name in own])
        self.parts = {"split": split, "reported": (reported, table.to(labels.device)[labels])}
        self.steps_per_epoch = len(fit) // self.batch_size

    def features(self, data: ImageData, collect: bool = False) -> tuple[Tensor, Tensor]:
        """Pooled features (N, F) of centre crops and labels (N,), on the device, of this rank's share of the images.

        collect: those of all ranks, on rank 0.
        """
        _classes(data)
        features = Rows()
        labels = Rows()
        where: dict[str, Any] = {"device": self.device, "num_workers": self.num_workers, "ranks": self.ranks}
        for batch in iterate(data, self.preprocess, self.batch_size, **where):
            features.add(check_finite(self._pooled(batch.images), self.vit, self.layer), batch.places)
            assert batch.labels is not None
            labels.add(batch.labels, batch.places)
        if collect:
            reduce_all(self.ranks, features, labels)
        # A rank without images still takes part in the sums over ranks.
        if not len(features):
            none = torch.zeros(0, device=self.device)
            return none.view(0, self.num_features), none.long()
        return features.values(), labels.values()

    def floors(self) -> dict[str, float]:
        """The accuracy of the class that is commonest in training, given to every image."""
        assert self.fit_data.labels is not None
        commonest = torch.tensor(self.fit_data.labels).bincount().argmax()
        reported = self.parts["reported"][1]
        num_right = self.ranks.add_((reported == commonest.to(reported.device)).sum())
        return {"majority class": float(num_right) / sum(self.ranks.gather(len(reported)))}

    def _pooled(self, images: Tensor) -> Tensor:
        return pool(normed_tokens(self.vit, images, self.layer, self.precision), self.vit.groups)

    def own_head(self) -> HeadTensors | None:
        """The model's own head, where it is linear in the features of this layer and has the data's classes."""
        if self.layer != self.vit.num_layers or self.vit.num_classes != self.num_outputs:
            return None
        # As many outputs are not the same classes: a head for other ones would start below chance.
        if self.vit.classes not in (None, self.fit_data.classes):
            return None
        # Whether the model's own end is linear in these features is found out on a few images.
        batch = next(iter(iterate(self.fit_data, self.preprocess, 8, device=self.device, limit=8)))
        head = own_linear_head(self.vit, batch.images)
        if head is None:
            return None
        return head.weight, head.bias

    def start(self, seed: int) -> None:
        self.stream = TrainStream(
            self.fit_data,
            self.preprocess,
            self.batch_size,
            seed=seed,
            augment="crop",
            crop_scale=_CROP_SCALE,
            device=self.device,
            even=False,
            num_workers=self.num_workers,
            ranks=self.ranks,
        )

    def backward(self, weight_gcf: Tensor, bias_gc: Tensor, step: int) -> None:
        labels_b = self.stream.labels(step, "probe")
        if not len(labels_b):
            return  # the batch has fewer images than there are ranks
        features_bf = self._pooled(self.stream.batch(step, "probe"))
        # Ranks may hold different numbers of images. Heads share no weights, so their losses are simply added.
        losses_g = classification_losses(features_bf, labels_b, weight_gcf, bias_gc)
        (losses_g * (len(labels_b) / self.batch_size)).sum().backward()

    def scores(self, weight_gcf: Tensor, bias_gc: Tensor, part: str) -> list[dict[str, float]]:
        features_nf, labels_n = self.parts[part]
        # Logits of twelve heads and 1,000 classes for all of ImageNet's validation images would take 2.4 GB.
        chunk = max(1, _SCORE_ELEMENTS // bias_gc.numel())
        with torch.no_grad():
            guesses = [grid_logits(x, weight_gcf, bias_gc).argmax(dim=-1) for x in features_nf.split(chunk)]
        num_right_g = (torch.cat(guesses) == labels_n[:, None]).sum(dim=0)
        # A head that diverged has no score: its guesses would all be class 0.
        accuracy_g = self.ranks.add_(num_right_g) / sum(self.ranks.gather(len(labels_n)))
        finite_g = weight_gcf.flatten(1).isfinite().all(dim=1) & bias_gc.isfinite().all(dim=1)
        accuracy_g = torch.where(finite_g, accuracy_g, torch.nan)
        return [{"accuracy": accuracy} for accuracy in accuracy_g.tolist()]


def grid_logits(features_bf: Tensor, weight_gcf: Tensor, bias_gc: Tensor) -> Tensor:
    """Logits (B, G, C) of every head in one matrix product."""
    num_heads, num_classes, _ = weight_gcf.shape
    logits = F.linear(features_bf, weight_gcf.flatten(0, 1), bias_gc.flatten())
    return logits.view(*features_bf.shape[:-1], num_heads, num_classes)


def classification_losses(features_bf: Tensor, labels_b: Tensor, weight_gcf: Tensor, bias_gc: Tensor) -> Tensor:
    """Mean cross-entropy (G,) of each head over the batch."""
    logits_bgc = grid_logits(features_bf, weight_gcf, bias_gc)
    labels_bg = labels_b[:, None].expand(logits_bgc.shape[:2])
    losses = F.cross_entropy(logits_bgc.flatten(0, 1), labels_bg.flatten(), reduction="none")
    return losses.view(labels_bg.shape).mean(0)


def read_head(source: str | Path | LinearHead, classes: Sequence[str], num_features: int) -> HeadTensors:
    """A published linear head (`weight` (C, F) and `bias` (C,)) that fits the probe, from a file or a module.

    A head that names its classes gives the output of each of `classes`; of any other head all outputs are taken, in
    their order.
    """
    if isinstance(source, LinearHead):
        head = source
        name = "the given head"
    else:
        head = LinearHead.load(source)
        name = str(source)
    own_features = head.weight.shape[1]
    if own_features != num_features:
        hint = ""
        # DINOv2 publishes heads on four layers too: four cls tokens and one mean patch.
        if 2 * own_features == 5 * num_features:
            hint = "; use the one-layer head, on cls and mean patch"
        raise ValueError(f"{name} takes {own_features} features, but the probe has {num_features}{hint}")
    if head.classes is None:
        if head.num_classes != len(classes):
            raise ValueError(f"{name} knows {head.num_classes} classes, but the data has {len(classes)}")
        return head.weight.clone(), head.bias.clone()
    count = Counter(head.classes)
    for one in classes:
        if count[one] != 1:
            num = f"{count[one] or 'no'} output{'s' * (count[one] > 1)}"
            raise ValueError(f"{name} has {num} for the class {one} of the data: give another --init_head, or random")
    rows = [list(head.classes).index(one) for one in classes]
    return head.weight[rows], head.bias[rows]


def _classes(data: ImageData) -> list[str]:
    if data.labels is None or data.classes is None:
        raise ValueError(
            f"{data.name} gives no labels; use image folders with one folder per class, the same classes in each"
        )
    return data.classes


def fit_ridge_heads(task: Classify, penalties: Sequence[float]) -> SeedRun:
    """Fit a ridge head per penalty on centre crops of the training images and choose on the split."""
    features_nf, labels_n = task.features(task.fit_data, collect=True)

    def fit() -> HeadTensors:
        heads = ridge_path(features_nf, labels_n, task.num_outputs, penalties)
        weights = [heads[alpha].weight for alpha in penalties]
        biases = [heads[alpha].bias for alpha in penalties]
        return torch.stack(weights).cpu(), torch.stack(biases).cpu()

    weight_gcf, bias_gc = task.ranks.first(fit)
    choice = Choice(task, penalties)
    choice.see(weight_gcf.to(task.device), bias_gc.to(task.device), 0)
    return choice.finish(seed=0)
