"""The measurements behind a certificate: one streaming pass over the images through both models."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np
import torch
from torch import Tensor

from raptor.certificate.autonomy import count_conditioning
from raptor.certificate.bootstrap import resampled_means
from raptor.certificate.certificate import Certificate, Cost, Eps
from raptor.certificate.complexity import count_flops, run_times
from raptor.certificate.definition import judge_definition
from raptor.certificate.error_curves import Curves
from raptor.certificate.follow import check_finite, check_pair, curve_intervals, follow
from raptor.certificate.heads import Head
from raptor.certificate.null_models import fit_null_models
from raptor.certificate.refit import Refitted
from raptor.certificate.verdict import Training, judge
from raptor.data.stream import Batch, sharing
from raptor.devices import device_name
from raptor.phases.cut import Phases
from raptor.streaming import Array, jsonable
from raptor.subject import Subject
from raptor.surrogate.surrogate import block_parameters
from raptor.vit.view import ViT

_FEW_DECIDE = 0.15  # by how much R2 is above that of single coordinates when a few of them decide it


@torch.no_grad()
def certify(
    surrogate: ViT,
    teacher: ViT,
    batches: Iterable[Batch],
    *,
    eps: float | None = None,
    null_models: bool = True,
    head: Head | None = None,
    refitted: Refitted | None = None,
    precision: str = "fp32",
    bootstrap: int = 1000,
    seed: int = 0,
    train_batches: Iterable[Batch] | None = None,
    training: Training | None = None,
    split: str = "val",
) -> Certificate:
    """Certify `surrogate` against `teacher` on held-out `batches`, in one streaming pass over both.

    Where ranks share the batches, all of them call this and get the same certificate.

    Args:
        batches: held-out images (labels, where there are any, give accuracies), such as `raptor.iterate(...)` or a list
            of batches. They are gone through more than once.
        eps: the relative error of Definition 1; None for the smallest one that holds.
        null_models: whether to measure the null models too; this adds a pass over `train_batches` and one more forward
            pass of the teacher's cost.
        head: from `raptor.certificate.heads.resolve_head`; None leaves accuracy and agreement out.
        refitted: norm and head of the surrogate after `raptor head`, which are then judged beside the untouched ones.
        precision: `fp32`, or `bf16` autocast for all models alike.
        bootstrap: resamples of the intervals; 0 for none.
        train_batches: what the mean and the linear maps of the null models are fitted on; the held-out images
            themselves when it is None (the nulls are then at their best).
        training: how the surrogate was trained, for the verdict; see `read_training`.
        split: what the images are called in it: `val` for held-out ones, `train`, `all`, or a part of the data.
    """
    check_pair(surrogate, teacher)
    if isinstance(batches, Iterator):
        raise ValueError("batches are gone through more than once: give raptor.iterate(...) or a list, not an iterator")
    # A plain model has no phases: the null models then take its depth as one.
    phases = Phases.from_lengths(surrogate.phases or [teacher.num_layers])
    notes = []
    nulls = None
    if null_models:
        which = "training"
        if train_batches is None:
            which = "held-out"
            train_batches = batches
        nulls = fit_null_models(teacher, phases, train_batches, precision)
        notes.append(f"mean and linear maps of the null models fitted on {nulls.num_images} {which} images")
    measured = follow(surrogate, teacher, batches, head, precision, nulls, refitted)
    classes = measured.classes
    if head is None:
        notes.append("no accuracy or agreement: no head")
    elif not head.fits(classes):
        other = ""
        if len(classes) == head.num_classes:
            other = f" of other names, such as {classes[0]}"
        notes.append(f"no accuracy: the head has {head.num_classes} classes, the data {len(classes)}{other}")
    elif head.source == "file" and head.classes is None and classes:
        notes.append("the head names no classes: its outputs were taken in the order of the data's")

    def finish() -> Certificate:
        assert measured.images is not None
        check_finite(measured.curves["surrogate"], surrogate, teacher)
        null_curves = {name: accumulated.result() for name, accumulated in measured.curves.items()}
        curves = null_curves.pop("surrogate")
        intervals = curve_intervals(curves, bootstrap, seed)
        by_group: dict[str, dict[str, Array]] = {}
        for metric, ends_2lg in intervals.items():
            by_group[metric] = {group: ends_2lg[..., g] for g, group in enumerate(curves.groups)}
        # Sums over all coordinates are ruled by those with the largest variance; the mean of single R2 is not.
        pooled = float(curves.r2["all"][-1])
        single = float(curves.r2_uniform["all"][-1])
        if pooled > 0 and pooled - single > _FEW_DECIDE:
            notes.append(
                f"a few large coordinates decide R2 of the last layer ({pooled:.2f}; the mean of single coordinates is "
                f"{single:.2f}); raptor distill --normalise coordinate weighs all alike"
            )
        return Certificate(
            surrogate=surrogate.name,
            teacher=teacher.name,
            phases=phases,
            image_size=teacher.preprocess.size,
            precision=precision,
            device=device_name(teacher.device),
            batch_size=len(measured.images),
            num_images=curves.num_images,
            curves=curves,
            intervals=by_group,
            eps=_curve_eps(curves, bootstrap, seed),
            definition=judge_definition(curves, intervals["relative"], measured.names_of(curves), eps),
            nulls=null_curves,
            predictions=measured.predictions(bootstrap, seed),
            floors=measured.floors(),
            # A model may be certified against itself.
            conditioning=count_conditioning(surrogate) if surrogate.phases else None,
            costs=_costs({"surrogate": surrogate, "teacher": teacher}, measured.images, precision),
            notes=notes,
            verdict=judge(curves, null_curves, intervals, training, bootstrap, seed, split),
            split=split,
            subject=Subject.of(teacher, getattr(batches, "data", None), surrogate),
        )

    # After the reduction only rank 0 has the values of all images.
    return sharing(batches).first(finish)


def _costs(sides: dict[str, ViT], images: Tensor, precision: str) -> dict[str, Cost]:
    # On one batch: run time needs no more images, and both sides must get the same ones.
    seconds = run_times(sides, images, precision)
    costs = {}
    for side, vit in sides.items():
        costs[side] = Cost(
            num_parameters=sum(p.numel() for p in vit.model.parameters()),
            block_parameters=block_parameters(vit),
            flops=count_flops(vit),
            seconds_per_image=seconds[side],
        )
    return costs


def _curve_eps(curves: Curves, bootstrap: int, seed: int) -> dict[str, dict[str, Eps]]:
    """The eps that holds for every layer: the largest mean error over depth, and how large it is at 95 % confidence.

    The upper end is the 95th percentile over resamples of that maximum.
    """
    shape = curves.image_error.shape[1:]
    both = np.concatenate([x.reshape(len(x), -1) for x in (curves.image_error, curves.image_norm)], axis=1)
    error, norm = resampled_means(both, bootstrap, seed).reshape(bootstrap, 2, *shape).swapaxes(0, 1)
    with np.errstate(divide="ignore", invalid="ignore"):
        resampled = {"absolute": error, "relative": error / norm}
    eps: dict[str, dict[str, Eps]] = {}
    for metric, estimates_rlg in resampled.items():
        eps[metric] = {}
        for g, group in enumerate(curves.groups):
            curve = getattr(curves, metric)[group]
            # Without resamples there is no upper end, and `np.maximum` below lets NaN pass.
            upper = np.nan
            if bootstrap:
                # The maximum is taken within each resample, because another layer may decide in another one.
                upper = np.quantile(estimates_rlg[:, :, g].max(1), 0.95)
            # Resamples hold the images of the reservoir, the curve all of them: "at most" must not be below the value.
            eps[metric][group] = Eps(
                value=jsonable(curve.max()),
                layer=int(curve.argmax()) + 1,
                upper=jsonable(np.maximum(upper, curve.max())),
            )
    return eps
