"""The measurements behind a certificate: one streaming pass over the images through both models."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from raptor.certificate.bootstrap import interval, quantile_intervals, resampled_means, statistic_interval
from raptor.certificate.certificate import Certificate, Cost, Eps, Quantile
from raptor.certificate.complexity import block_list, count_flops, run_times
from raptor.certificate.definition import judge_definition
from raptor.certificate.error_curves import Curves, ErrorCurves
from raptor.certificate.heads import Head, prediction_hits
from raptor.certificate.null_models import NULL_NAMES, NullModels, fit_null_models
from raptor.certificate.verdict import Estimate, Training, judge
from raptor.data.stream import Batch, ImageStream, sharing
from raptor.devices import device_name
from raptor.phases.cut import Phases
from raptor.streaming import QUANTILE_KEYS, QUANTILES, Array, Rows, jsonable, reduce_all
from raptor.subject import Subject
from raptor.vit.trajectory import NonFiniteStates, Trajectories, autocast
from raptor.vit.view import ViT

_CENTRE_IMAGES = 256
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
    phases = Phases.from_lengths(surrogate.phases or [teacher.num_layers])
    notes = []
    nulls = None
    if null_models:
        which = "held-out" if train_batches is None else "training"
        nulls = fit_null_models(teacher, phases, batches if train_batches is None else train_batches, precision)
        notes.append(f"mean and linear maps of the null models fitted on {nulls.num_images} {which} images")
    measured = _measure(surrogate, teacher, batches, nulls, head, precision)
    notes += _head_notes(head, measured.classes)

    def finish() -> Certificate:
        assert measured.images is not None
        _check_finite(measured.curves["surrogate"], surrogate, teacher)
        curves = measured.curves["surrogate"].result()
        null_curves = {name: each.result() for name, each in measured.curves.items() if name in NULL_NAMES}
        intervals = _curve_intervals(curves, bootstrap, seed)
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
            intervals={metric: _by_group(ends, curves.groups) for metric, ends in intervals.items()},
            quantiles=_curve_quantiles(curves, bootstrap, seed),
            eps=_curve_eps(curves, bootstrap, seed),
            definition=judge_definition(curves, intervals["relative"], measured.names_of(curves), eps),
            nulls=null_curves,
            predictions=_predictions(measured.hits, bootstrap, seed),
            costs=_costs(surrogate, teacher, measured.images, precision),
            notes=notes + _few_coordinates(curves),
            verdict=judge(curves, null_curves, intervals, training, bootstrap, seed, split),
            split=split,
            subject=Subject.of(teacher, getattr(batches, "data", None), surrogate),
        )

    return sharing(batches).first(finish)


def check_pair(surrogate: ViT, teacher: ViT) -> None:
    """Raise unless the states of both can be compared layer by layer."""
    for what, ours, theirs in (
        ("layers", surrogate.num_layers, teacher.num_layers),
        ("dimensions", surrogate.dim, teacher.dim),
        ("token groups", surrogate.groups, teacher.groups),
        ("device", surrogate.device, teacher.device),
    ):
        if ours != theirs:
            raise ValueError(
                f"{surrogate.name} cannot be certified against {teacher.name}: {what} {ours}, not {theirs}"
            )


@dataclass
class _Measured:
    """The results of one pass.

    Attributes:
        curves: of the surrogate and of the null models.
        hits: right or wrong, of each image, (N, 1 or 3).
        indices: the number of each image in the data, (N,).
        images: the first batch.
        image_names, classes: of the data; empty where it has none.
    """

    curves: dict[str, ErrorCurves]
    hits: Rows
    indices: Rows
    images: Tensor | None
    image_names: Sequence[str]
    classes: Sequence[str]

    def names_of(self, curves: Curves) -> list[str]:
        """The names of the images that `curves` keeps."""
        places = curves.image_places.tolist()
        if not self.image_names:
            return [f"image {place}" for place in places]
        index_at = dict(zip(self.indices.places, self.indices.values().tolist()))
        return [self.image_names[index_at[place]] for place in places]


def _measure(
    surrogate: ViT,
    teacher: ViT,
    batches: Iterable[Batch],
    nulls: NullModels | None,
    head: Head | None,
    precision: str,
) -> _Measured:
    names = ["surrogate"]
    if nulls is not None:
        names += NULL_NAMES
    curves = {name: ErrorCurves(teacher.num_layers, teacher.groups) for name in names}
    data = getattr(batches, "data", None)
    found = _Measured(curves, Rows(), Rows(), None, getattr(data, "names", ()), getattr(data, "classes", None) or ())
    is_scored = head is not None and head.fits(found.classes)
    ranks = sharing(batches)
    centre = ranks.first(lambda: _centre(curves["surrogate"], teacher, batches, precision))
    if centre is not None:
        for each in curves.values():
            each.start(centre.to(teacher.device))
    for batch in batches:
        images = batch.images.to(teacher.device, non_blocking=True)
        if found.images is None:
            found.images = images
        with autocast(precision, teacher.device):
            teacher_states, teacher_output = teacher.record(images)
            student_states, student_output = surrogate.record(images)
            if head is not None:
                of_teacher = head.logits(teacher, teacher_states[-1], teacher_output).argmax(-1)
                of_student = head.logits(surrogate, student_states[-1], student_output).argmax(-1)
                labels = batch.labels if is_scored else None
                found.hits.add(prediction_hits(of_teacher, of_student, labels), batch.places)
        curves["surrogate"].update(teacher_states, student_states, batch.places)
        found.indices.add(batch.indices.to(teacher.device), batch.places)
        del student_states  # null models need the memory
        if nulls is not None:
            for name, states in nulls.states(images, teacher_states, precision).items():
                curves[name].update(teacher_states, states, batch.places)
    if not any(ranks.gather(found.images is not None)):
        raise ValueError("no images to certify on: the held-out data is empty")
    reduce_all(ranks, *curves.values(), found.hits, found.indices)
    return found


def _head_notes(head: Head | None, classes: Sequence[str]) -> list[str]:
    """What must be known of the head beside its accuracy, or why there is none."""
    if head is None:
        return ["no accuracy or agreement: no head"]
    if not head.fits(classes):
        other = ""
        if len(classes) == head.num_classes:
            other = f" of other names, such as {classes[0]}"
        return [f"no accuracy: the head has {head.num_classes} classes, the data {len(classes)}{other}"]
    if head.source == "file" and head.classes is None and classes:
        return ["the head names no classes: its outputs were taken in the order of the data's"]
    return []


def _centre(curves: ErrorCurves, teacher: ViT, batches: Iterable[Batch], precision: str) -> Tensor | None:
    """The mean state of images spread over all batches; None where that cannot be seen without reading all of them.

    The first batch of a folder may be all of one class, and deviations from its mean would make intervals too wide.
    """
    if isinstance(batches, ImageStream):
        stream = batches.whole().sample(min(_CENTRE_IMAGES, batches.num_images))
        stream.progress = None  # these images are counted when they are measured
        sample: Iterable[Batch] = stream
    elif isinstance(batches, Sequence):
        sample = _spread(batches, _CENTRE_IMAGES)
    else:
        return None
    sums_lgd: Tensor | None = None
    num_images = 0
    for states, _, batch in Trajectories(teacher, sample, precision):
        added_lgd = len(batch.images) * curves.centre_of(states).double()
        sums_lgd = added_lgd if sums_lgd is None else sums_lgd + added_lgd
        num_images += len(batch.images)
    return None if sums_lgd is None else (sums_lgd / num_images).float().cpu()


def _spread(batches: Sequence[Batch], num_images: int) -> list[Batch]:
    """About `num_images` images, as many of each batch."""
    chosen = batches[:: max(1, -(-len(batches) // num_images))]
    share = max(1, num_images // max(1, len(chosen)))
    found = []
    for batch in chosen:
        rows = torch.linspace(0, len(batch.images) - 1, min(share, len(batch.images))).long()
        found.append(Batch(batch.images[rows.to(batch.images.device)], None, batch.indices[rows]))
    return found


def _predictions(rows: Rows, bootstrap: int, seed: int) -> dict[str, Estimate]:
    if not len(rows):
        return {}
    hits_nc = rows.values().double().cpu().numpy()
    mean_c = hits_nc.mean(0)
    lower_c, upper_c = interval(resampled_means(hits_nc, bootstrap, seed))
    found = {}
    # Without labels there is only the first column.
    for name, *estimate in zip(("agreement", "teacher_accuracy", "surrogate_accuracy"), mean_c, lower_c, upper_c):
        value, lower, upper = (jsonable(number) for number in estimate)
        found[name] = Estimate(value, lower, upper)
    return found


def _curve_intervals(curves: Curves, bootstrap: int, seed: int) -> dict[str, Array]:
    """Bootstrap intervals (2, L, G) over images of absolute and relative error, R2 and cosine."""
    error = curves.image_error
    norm = curves.image_norm
    return {
        "absolute": statistic_interval([error], lambda e: e, bootstrap, seed),
        "relative": statistic_interval([error, norm], lambda e, n: e / n, bootstrap, seed),
        "r2": statistic_interval([error**2, curves.image_deviation], lambda e, d: 1 - e / d, bootstrap, seed),
        "cosine": statistic_interval([curves.image_cosine], lambda c: c, bootstrap, seed),
    }


def _by_group(values_lg: Array, groups: Sequence[str]) -> dict[str, Array]:
    """(..., L, G) as group -> (..., L)."""
    return {group: values_lg[..., g] for g, group in enumerate(groups)}


def _curve_quantiles(curves: Curves, bootstrap: int, seed: int) -> dict[str, dict[str, Quantile]]:
    """Quantiles over images of error, relative error and cosine, with their intervals."""
    by_metric = {"absolute": curves.image_error, "relative": curves.image_relative, "cosine": curves.image_cosine}
    found: dict[str, dict[str, Quantile]] = {}
    for metric, values_nlg in by_metric.items():
        value_qlg, ends_q2lg = quantile_intervals(values_nlg, QUANTILES, bootstrap, seed)
        found[metric] = {}
        for key, value_lg, ends_2lg in zip(QUANTILE_KEYS, value_qlg, ends_q2lg):
            found[metric][key] = Quantile(_by_group(value_lg, curves.groups), _by_group(ends_2lg, curves.groups))
    return found


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
            upper = np.nan
            if bootstrap:
                upper = np.quantile(estimates_rlg[:, :, g].max(1), 0.95)
            eps[metric][group] = Eps(
                value=jsonable(curve.max()),
                layer=int(curve.argmax()) + 1,
                upper=jsonable(np.maximum(upper, curve.max())),
            )
    return eps


def _few_coordinates(curves: Curves) -> list[str]:
    """A note where R2 of the last layer is far above the mean R2 of its coordinates: a few large ones decide it."""
    pooled = float(curves.r2["all"][-1])
    single = float(curves.r2_uniform["all"][-1])
    if not (pooled > 0 and pooled - single > _FEW_DECIDE):
        return []
    return [
        f"a few large coordinates decide R2 of the last layer ({pooled:.2f}; the mean of single coordinates is "
        f"{single:.2f}); raptor distill --normalise coordinate weighs all alike"
    ]


def _costs(surrogate: ViT, teacher: ViT, images: Tensor, precision: str) -> dict[str, Cost]:
    sides = {"surrogate": surrogate, "teacher": teacher}
    seconds = run_times(sides, images, precision)
    costs = {}
    for side, vit in sides.items():
        costs[side] = Cost(
            num_parameters=sum(p.numel() for p in vit.model.parameters()),
            block_parameters=sum(p.numel() for p in block_list(vit).parameters()),
            flops=count_flops(vit),
            seconds_per_image=seconds[side],
        )
    return costs


def _check_finite(curves: ErrorCurves, surrogate: ViT, teacher: ViT) -> None:
    """Raise if states of any image are not finite: its prediction, and with it every score, would mean nothing."""
    bad = curves.first_not_finite()
    if bad is not None:
        layer, is_teacher = bad
        name = teacher.name if is_teacher else surrogate.name
        raise NonFiniteStates.of(name, f"from layer {layer} on, for one image or more")
