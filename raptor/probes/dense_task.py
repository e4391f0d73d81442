"""The common part of segmentation and depth: frames, features of patches, the loss of one head at a time, scores."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from raptor.data.dense import DenseData, FrameStore
from raptor.data.split import choice_split
from raptor.data.stream import stable_seed
from raptor.devices import ONE_PROCESS, Ranks
from raptor.probes.classify import grid_logits
from raptor.probes.features import check_finite, normed_tokens, view_at
from raptor.probes.frames import Geometry, crop_images, draw_boxes
from raptor.vit.trajectory import autocast
from raptor.vit.view import ViT

_LOOKED_AT = 8  # so many frames together, until one has a target
MAX_ELEMENTS = 2**28
"""Numbers in the largest tensor of upsampled logits."""


class DenseTask:
    """A task with a target per pixel; see `raptor.probes.grid.Task`. Subclasses say features, loss and scores."""

    metric: str
    higher_is_better: bool
    num_outputs: int
    num_features: int
    no_target: float
    """What a pixel without a target holds."""
    crop_scale = (0.5, 1.0)

    def __init__(
        self,
        vit: ViT,
        layer: int,
        train_data: DenseData,
        val_data: DenseData,
        *,
        batch_size: int,
        precision: str,
        size: int | tuple[int, int] | None = None,
        ranks: Ranks = ONE_PROCESS,
    ) -> None:
        if train_data.frame != val_data.frame:
            raise ValueError(
                f"targets of {train_data.frame} for training and {val_data.frame} for scores; use one frame"
            )
        self.device = vit.device
        self.layer = layer
        self.precision = precision
        self.size = train_data.frame
        if isinstance(size, tuple):
            self.size = size
        elif size is not None:
            if size < 1:
                raise ValueError(f"--size must be at least 1; got {size}")
            # The data's frame with its shorter side at `size`.
            height, width = (round(side * size / min(train_data.frame)) for side in train_data.frame)
            self.size = (height, width)
        self.geometry = Geometry(*self.size, vit.patch_size, train_data.frame)
        self.vit = view_at(vit, *self.geometry.padded)
        fit, held = choice_split(train_data.keys)
        self.num_fit = len(fit)
        self.fit = FrameStore(train_data.select(fit), self.size, self.device, ranks.size)
        self.parts = {
            "split": FrameStore(train_data.select(held), self.size, self.device, ranks.size),
            "reported": FrameStore(val_data, self.size, self.device, ranks.size),
        }
        self.batch_size = min(batch_size, len(fit))
        self.steps_per_epoch = len(fit) // self.batch_size
        self.ranks = ranks
        first = ranks.rank * self.batch_size // ranks.size
        last = (ranks.rank + 1) * self.batch_size // ranks.size
        # A rank without images of its own, in a batch with fewer images than ranks, runs one that does not count: all
        # ranks must meet where gradients are summed.
        self.is_idle = first == last
        self.rows = slice(0, 1) if self.is_idle else slice(first, last)

    # A task says these five.

    def features(self, tokens_btd: Tensor) -> Tensor:
        """Features (B, P, F) of the patches."""
        raise NotImplementedError

    def gradient(self, logits_bhwc: Tensor, targets_bhw: Tensor) -> Tensor:
        """Gradient of a head's loss in its logits on the grid of patches, given the targets of `train_targets`."""
        raise NotImplementedError

    def train_targets(self, targets: Tensor, boxes: Tensor) -> Tensor:
        """Targets of the crops `boxes`, where the loss wants them."""
        raise NotImplementedError

    def has_target(self, targets: Tensor) -> Tensor:
        """Which pixels count."""
        raise NotImplementedError

    def floors(self) -> dict[str, float]:
        """The metric of predictors that see no image, fitted on the training targets, on the reported frames."""
        raise NotImplementedError

    # It may say these.

    def augment(self, images: Tensor, _generator: torch.Generator) -> Tensor:
        """Changes of colour of the cropped images (B, 3, H, W) in 0..255: `rows` of what is drawn for the batch."""
        return images

    def gradients(self, logits_bhwgc: Tensor, targets_bhw: Tensor) -> Tensor:
        """`gradient` of every head. Upsampled logits are large: they exist for one head at a time."""
        gradients = torch.empty_like(logits_bhwgc)
        for g in range(logits_bhwgc.shape[3]):
            gradients[..., g, :] = self.gradient(logits_bhwgc[..., g, :], targets_bhw)
        return gradients

    def start(self, seed: int) -> None:
        """As in `Task`. Raise where no pixel of a part has a target: nothing could be learned, or scored."""
        self.seed = seed
        # Another seed has other orders.
        self._order: tuple[int, Tensor] | None = None
        for store, use in (
            (self.fit, "learn from"),
            (self.parts["split"], "choose by"),
            (self.parts["reported"], "score"),
        ):
            chunks = torch.arange(len(store.data)).split(_LOOKED_AT)
            if not any(bool(self.has_target(store.batch(chunk)[1]).any()) for chunk in chunks):
                raise ValueError(
                    f"no pixel of the {len(store.data)} images of {store.data.name} to {use} has a target: check their "
                    "label or depth pictures"
                )

    def indices(self, step: int) -> Tensor:
        """This rank's training images of a step: each epoch is a permutation drawn from (seed, epoch)."""
        epoch, place = divmod(step, self.steps_per_epoch)
        if self._order is None or self._order[0] != epoch:
            generator = torch.Generator().manual_seed(stable_seed(self.seed, "probe", "epoch", epoch))
            self._order = (epoch, torch.randperm(len(self.fit.data), generator=generator))
        return self._order[1][place * self.batch_size : (place + 1) * self.batch_size][self.rows]

    def logits(self, images: Tensor, weight_gcf: Tensor, bias_gc: Tensor, is_scored: bool = False) -> Tensor:
        """Logits (B, h, w, G, C) of all heads on the grid of patches, of images (B, 3, H, W) in 0..255."""
        with torch.no_grad():
            padded = self.geometry.pad(self.vit.preprocess.normalise(images))
            features = self.features(normed_tokens(self.vit, padded, self.layer, self.precision))
        if is_scored:
            check_finite(features, self.vit, self.layer)
        # One matrix product. A 1x1 head commutes with bilinear upsampling, so it runs on the coarse grid.
        with autocast(self.precision, features.device):
            logits_bpgc = grid_logits(features, weight_gcf, bias_gc).float()
        return logits_bpgc.unflatten(1, self.geometry.grid)

    def backward(self, weight_gcf: Tensor, bias_gc: Tensor, step: int) -> None:
        generator = torch.Generator().manual_seed(stable_seed(self.seed, "probe", "crop", step))
        # One generator for the whole step: ranks draw the boxes of the global batch and take their own rows.
        images_u8, targets = self.fit.batch(self.indices(step))
        # The next epoch has another order, which is drawn when it begins.
        if (step + 1) % self.steps_per_epoch:
            self.fit.prefetch(self.indices(step + 1))
        boxes = draw_boxes(self.batch_size, generator, self.crop_scale)[self.rows].to(self.device)
        images = self.augment(crop_images(images_u8, boxes), generator)
        targets = self.train_targets(targets, boxes)
        if self.is_idle:
            targets = torch.full_like(targets, self.no_target)  # no pixel counts
        coarse = self.logits(images, weight_gcf, bias_gc)
        # The gradient in the logits is known in closed form: autograd would keep the upsampled logits of every head.
        coarse.backward(self.gradients(coarse.detach(), targets))

    def scored_batches(self, weight_gcf: Tensor, bias_gc: Tensor, part: str) -> Iterator[tuple[Tensor, Tensor]]:
        """Logits (B, h, w, G, C) of this rank's frames of a part, whole and in order, and their targets (B, *frame)."""
        store = self.parts[part]
        height, width = self.fit.data.frame
        num = max(1, min(self.batch_size, MAX_ELEMENTS // (self.num_outputs * height * width)))
        for indices in self.ranks.share(torch.arange(len(store.data)).split(num)):
            images, targets = store.batch(indices)
            with torch.no_grad():
                yield self.logits(images.float(), weight_gcf, bias_gc, is_scored=True), targets

    def targets_of(self, store: FrameStore) -> Iterator[Tensor]:
        """This rank's share of the targets (B, *frame) of a part."""
        for indices in self.ranks.share(torch.arange(len(store.data)).split(self.batch_size)):
            yield store.batch(indices)[1]
