"""The certificate of a surrogate: the whole error curve over depth, as data, as JSON and as tables."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from raptor.data.stream import Batch, ImageStream, sharing
from raptor.devices import device_name
from raptor.fidelity.bootstrap import interval, quantile_intervals, resampled_means, statistic_interval
from raptor.fidelity.complexity import block_list, count_flops, run_times
from raptor.fidelity.error_curves import METRICS, Array, Curves, ErrorCurves
from raptor.fidelity.heads import Head, prediction_hits
from raptor.fidelity.null_models import NULL_NAMES, NullModels, fit_null_models
from raptor.fidelity.verdict import Estimate, Training, Verdict, images_of, judge
from raptor.open import OTHER_TEACHER
from raptor.phases import Phases
from raptor.provenance import Provenance
from raptor.run import ResultFile
from raptor.streaming import QUANTILE_KEYS, QUANTILES, Record, Rows, jsonable, reduce_all
from raptor.vit.trajectory import NonFiniteStates, Trajectories, autocast
from raptor.vit.view import ViT

if TYPE_CHECKING:
    from rich.table import Table

_CENTRE_IMAGES = 256
_FEW_DECIDE = 0.15  # by how much R2 is above that of single coordinates when a few of them decide it


@dataclass(frozen=True)
class Eps(Record):
    """An error that holds for every layer, the layer that decides it, and its upper end at 95 % confidence."""

    value: float | None
    layer: int
    upper: float | None = None


@dataclass(frozen=True)
class Cost(Record):
    """What one side costs: parameters, FLOPs of one image, measured seconds per image."""

    num_parameters: int
    block_parameters: int
    flops: int
    seconds_per_image: float


@dataclass
class Certificate(ResultFile):
    """certificate.json: evidence that a surrogate is eps-BRH, or how far it is from it.

    Attributes:
        curves: the error curves over layers 1..L and groups.
        intervals: metric -> (2, L, G) bootstrap intervals over images, in the order of `curves.groups`.
        quantiles: `absolute`, `relative` and `cosine` -> ((Q, L, G) quantiles over images, (Q, 2, L, G) intervals).
        eps: `absolute` and `relative` -> group -> the error that holds for every layer.
        nulls: the null models' curves on the same images; empty when left out.
        predictions: `agreement`, `teacher_accuracy`, `surrogate_accuracy` with their intervals; empty without a head.
        costs: `surrogate` and `teacher`.
        notes: what a reader must know: the head, what the null models were fitted on, what was left out.
        data, split, bad_images, provenance: where it came from.
        verdict: what a reader must know first.
        fingerprints: of the weights of `surrogate` and `teacher`, where they are known; empty in older files.
    """

    FILE: ClassVar[str] = "certificate.json"

    surrogate: str
    teacher: str
    phases: Phases
    image_size: int
    precision: str
    device: str
    batch_size: int
    curves: Curves
    intervals: dict[str, Array]
    quantiles: dict[str, tuple[Array, Array]]
    eps: dict[str, dict[str, Eps]]
    nulls: dict[str, Curves] = field(default_factory=dict)
    predictions: dict[str, Estimate] = field(default_factory=dict)
    costs: dict[str, Cost] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    data: str = "the data"
    split: str = "val"
    bad_images: list[str] = field(default_factory=list)
    provenance: Provenance = field(default_factory=Provenance)
    verdict: Verdict | None = None
    fingerprints: dict[str, str] = field(default_factory=dict)

    @property
    def judged(self) -> Verdict:
        """The verdict; that of an older file is made from its curves."""
        found = self.verdict or judge(self.curves, self.nulls, self.intervals, split=self.split)
        data = None if self.data == Certificate.data else self.data
        return replace(found, data=data, against=self.other_teacher)

    @property
    def other_teacher(self) -> str | None:
        """The name of the teacher where it is not the one that the surrogate was made from."""
        return self.teacher if self.teacher.endswith(OTHER_TEACHER) else None

    @property
    def head(self) -> str:
        """The head that the predictions are made by, as the notes say it."""
        notes = (note.removeprefix("head: ") for note in self.notes if note.startswith("head: "))
        return next(notes, "the same head for both")

    @property
    def run_time_ratio(self) -> float:
        """Measured run time, surrogate / teacher."""
        return self.costs["surrogate"].seconds_per_image / self.costs["teacher"].seconds_per_image

    def to_dict(self) -> dict[str, Any]:
        """Everything but the per-image values, as JSON can hold it."""
        return {
            "verdict": self.judged.to_dict(),
            "surrogate": self.surrogate,
            "teacher": self.teacher,
            "phases": list(self.phases),
            "image_size": self.image_size,
            "precision": self.precision,
            "device": self.device,
            "batch_size": self.batch_size,
            "num_images": self.curves.num_images,
            "layers": list(range(1, self.curves.num_layers + 1)),
            "curves": self.curves.to_dict(),
            "intervals": {metric: self._by_group(ends) for metric, ends in self.intervals.items()},
            "quantiles": {
                metric: {
                    key: {"value": self._by_group(values[i]), "interval": self._by_group(ends[i])}
                    for i, key in enumerate(QUANTILE_KEYS)
                }
                for metric, (values, ends) in self.quantiles.items()
            },
            "eps": jsonable(self.eps),
            "nulls": {name: curves.to_dict() for name, curves in self.nulls.items()},
            "predictions": jsonable(self.predictions),
            "costs": jsonable(self.costs),
            "run_time_ratio": self.run_time_ratio,
            "notes": self.notes,
            "data": self.data,
            "split": self.split,
            "bad_images": self.bad_images,
            "fingerprints": self.fingerprints,
            "provenance": self.provenance.to_dict(),
        }

    @classmethod
    def from_dict(cls, saved: Any, where: str = "") -> Certificate:
        """The certificate of parsed JSON, with no per-image values."""
        found = _SavedCertificate.from_dict(saved, where)
        curves = Curves.from_dict(found.curves, "curves", found.num_images)
        values = {f.name: getattr(found, f.name) for f in fields(found) if f.name != "num_images"}
        values |= {"curves": curves, "phases": Phases.from_lengths(found.phases)}
        values["nulls"] = {name: Curves.from_dict(null, f"nulls.{name}") for name, null in found.nulls.items()}
        values["intervals"] = {metric: _stacked(ends, curves.groups) for metric, ends in found.intervals.items()}
        values["quantiles"] = {
            metric: (
                np.stack([_stacked(quantile.value, curves.groups) for quantile in quantiles.values()]),
                np.stack([_stacked(quantile.interval, curves.groups) for quantile in quantiles.values()]),
            )
            for metric, quantiles in found.quantiles.items()
        }
        return cls(**values)

    def _by_group(self, values: Array) -> dict[str, Any]:
        """(L, G) or (2, L, G) as group -> list over layers, or [lower list, upper list]."""
        pick = {group: values[..., g] for g, group in enumerate(self.curves.groups)}
        return {group: jsonable(v) for group, v in pick.items()}

    def rows(self, group: str = "all") -> list[dict[str, float]]:
        """One row per layer: its phase, every metric of `group`, and the R2 of each null model."""
        return [
            {
                "layer": layer + 1,
                "phase": self.phases.phase_of(layer + 1) + 1,
                **{metric: float(getattr(self.curves, metric)[group][layer]) for metric in METRICS},
                **{f"r2 of {name}": float(null.r2[group][layer]) for name, null in self.nulls.items()},
            }
            for layer in range(self.curves.num_layers)
        ]

    def table(self, group: str = "all") -> Table:
        """A rich table of `rows`."""
        from rich.table import Table

        eps = self.eps["relative"][group]
        against = f" against {self.other_teacher}" if self.other_teacher else ""
        images = f"{self.curves.num_images} {images_of(self.split)} of {self.data}"
        title = (
            f"{self.surrogate}{against}\n{images}, {self.image_size} px, tokens: {group}"
            f"; relative eps {_number(eps.value)} (layer {eps.layer}, at most {_number(eps.upper)})"
        )
        table = Table(title=title)
        rows = self.rows(group)
        for name in rows[0]:
            table.add_column(name.replace("_", " "), justify="right")
        for row in rows:
            table.add_row(*(_number(v) for v in row.values()))
        return table

    def summary_table(self) -> Table:
        """A rich table of predictions and costs of both sides."""
        from rich.table import Table

        table = Table("", "teacher", "surrogate", "surrogate / teacher")
        teacher, surrogate = self.costs["teacher"], self.costs["surrogate"]
        for label, name, scale in (
            ("parameters (M)", "num_parameters", 1e6),
            ("block parameters (M)", "block_parameters", 1e6),
            ("GFLOPs per image", "flops", 1e9),
            ("run time per image (ms)", "seconds_per_image", 1e-3),
        ):
            old, new = getattr(teacher, name) / scale, getattr(surrogate, name) / scale
            table.add_row(label, _number(old), _number(new), _number(new / old))
        scores = {name: entry.value or 0.0 for name, entry in self.predictions.items()}
        if "teacher_accuracy" in scores:
            old, new = scores["teacher_accuracy"], scores["surrogate_accuracy"]
            table.add_row(f"accuracy ({self.head})", _number(old), _number(new), _number(new / old if old else None))
        if "agreement" in scores:
            table.add_row(f"agreement ({self.head})", "", _number(scores["agreement"]), "")
        return table


@dataclass
class _SavedQuantile(Record):
    """A quantile over images and its interval, by group: (L,) and (2, L)."""

    value: dict[str, Array]
    interval: dict[str, Array]


@dataclass
class _SavedCertificate(Record):
    """A certificate as JSON holds it: curves and intervals by group."""

    surrogate: str
    teacher: str
    phases: list[int]
    image_size: int
    precision: str
    device: str
    batch_size: int
    num_images: int
    curves: dict[str, Any]
    intervals: dict[str, dict[str, Array]]
    quantiles: dict[str, dict[str, _SavedQuantile]]
    eps: dict[str, dict[str, Eps]]
    nulls: dict[str, Any]
    predictions: dict[str, Estimate]
    costs: dict[str, Cost]
    notes: list[str]
    data: str = "the data"
    split: str = "val"
    bad_images: list[str] = field(default_factory=list)
    provenance: Provenance = field(default_factory=Provenance)
    verdict: Verdict | None = None
    fingerprints: dict[str, str] = field(default_factory=dict)


def _stacked(by_group: dict[str, Array], groups: tuple[str, ...]) -> Array:
    """Arrays (..., L) by group as one (..., L, G)."""
    missing = [group for group in groups if group not in by_group]
    if missing:
        raise ValueError(f"no values of the tokens {missing[0]}")
    return np.stack([by_group[group] for group in groups], axis=-1)


def _number(value: float | None) -> str:
    """A number for a table: whole ones as they are, others with three figures after the point."""
    if value is None:
        return "-"
    return str(value) if isinstance(value, int) else f"{value:.3f}"


@torch.no_grad()
def certify(
    surrogate: ViT,
    teacher: ViT,
    batches: Iterable[Batch],
    *,
    null_models: bool = True,
    head: Head | None = None,
    precision: str = "fp32",
    bootstrap: int = 1000,
    seed: int = 0,
    train_batches: Iterable[Batch] | None = None,
    null_every: int = 1,
    training: Training | None = None,
    split: str = "val",
) -> Certificate:
    """Certify `surrogate` against `teacher` on held-out `batches`, in one streaming pass over both.

    Where ranks share the batches, all of them call this and get the same certificate.

    Args:
        batches: held-out images (labels, where there are any, give accuracies), such as `raptor.iterate(...)` or a list
            of batches. They are gone through more than once.
        null_models: whether to measure the null models too; this adds a pass over `train_batches` and one more forward
            pass of the teacher's cost.
        head: from `raptor.fidelity.heads.resolve_head`; None leaves accuracy and agreement out.
        precision: `fp32`, or `bf16` autocast for all models alike.
        bootstrap: resamples of the intervals; 0 for none.
        train_batches: what the mean and the linear maps of the null models are fitted on; the held-out images
            themselves when it is None (the nulls are then at their best).
        null_every: measure the null models only on every n-th batch, to save their forward passes on large sets.
        training: how the surrogate was trained, for the verdict; see `read_training`.
        split: what the images are called in it: `val` for held-out ones, `train`, `all`, or a part of the data.
    """
    _check_pair(surrogate, teacher)
    if isinstance(batches, Iterator):
        raise ValueError("batches are gone through more than once: give raptor.iterate(...) or a list, not an iterator")
    if null_every < 1:
        raise ValueError(f"null_every must be at least 1; got {null_every}")
    phases = Phases.from_lengths(surrogate.phases or [teacher.num_layers])
    nulls, notes = None, []
    if null_models:
        fitting = batches if train_batches is None else train_batches
        nulls = fit_null_models(teacher, phases, fitting, precision)
        which = "held-out" if train_batches is None else "training"
        notes.append(f"mean and linear maps of the null models fitted on {nulls.num_images} {which} images")
    if head is None:
        notes.append("no accuracy or agreement: no head")
    measured = _measure(surrogate, teacher, batches, nulls, head, precision, null_every)
    return sharing(batches).first(
        lambda: _certificate(surrogate, teacher, phases, precision, measured, notes, bootstrap, seed, training, split)
    )


def _certificate(
    surrogate: ViT,
    teacher: ViT,
    phases: Phases,
    precision: str,
    measured: _Measured,
    notes: list[str],
    bootstrap: int,
    seed: int,
    training: Training | None,
    split: str,
) -> Certificate:
    """The certificate of what was measured."""
    assert measured.images is not None
    _check_finite(measured.curves["surrogate"], surrogate, teacher)
    curves = measured.curves["surrogate"].result()
    null_curves = {name: measured.curves[name].result() for name in NULL_NAMES if name in measured.curves}
    intervals = _curve_intervals(curves, bootstrap, seed)
    weights = {"surrogate": surrogate.fingerprint(), "teacher": teacher.fingerprint()}
    return Certificate(
        surrogate=surrogate.name,
        teacher=teacher.name,
        phases=phases,
        image_size=teacher.preprocess.size,
        precision=precision,
        device=device_name(teacher.device),
        batch_size=len(measured.images),
        curves=curves,
        intervals=intervals,
        quantiles=_curve_quantiles(curves, bootstrap, seed),
        eps=_curve_eps(curves, bootstrap, seed),
        nulls=null_curves,
        predictions=_predictions(measured.hits, bootstrap, seed),
        costs=_costs(surrogate, teacher, measured.images, precision),
        notes=notes + measured.notes + _few_coordinates(curves),
        verdict=judge(curves, null_curves, intervals, training, bootstrap, seed, split),
        split=split,
        fingerprints={side: known for side, known in weights.items() if known},
    )


def _few_coordinates(curves: Curves) -> list[str]:
    """A note where R2 of the last layer is far above the mean R2 of its coordinates: a few large ones decide it."""
    pooled, single = (float(values["all"][-1]) for values in (curves.r2, curves.r2_uniform))
    if not (pooled > 0 and pooled - single > _FEW_DECIDE):
        return []
    return [
        f"a few large coordinates decide R2 of the last layer ({pooled:.2f}; the mean of single coordinates is "
        f"{single:.2f}); raptor distill --normalise coordinate weighs all alike"
    ]


@dataclass
class _Measured:
    """What one pass leaves: curves of the surrogate and the nulls, hits of each image (N, 1 or 3), the first images."""

    curves: dict[str, ErrorCurves]
    hits: Rows
    images: Tensor | None
    notes: list[str]


def _measure(
    surrogate: ViT,
    teacher: ViT,
    batches: Iterable[Batch],
    nulls: NullModels | None,
    head: Head | None,
    precision: str,
    null_every: int = 1,
) -> _Measured:
    names = ("surrogate", *(NULL_NAMES if nulls is not None else ()))
    curves = {name: ErrorCurves(teacher.num_layers, teacher.groups) for name in names}
    data = getattr(batches, "data", None)
    classes: Sequence[str] = getattr(data, "classes", None) or ()
    scored = head is not None and (not classes or head.is_of(classes))
    hits, ranks = Rows(), sharing(batches)
    first: Tensor | None = None
    centre = ranks.first(lambda: _centre(curves["surrogate"], teacher, batches, precision))
    if centre is not None:
        for each in curves.values():
            each.start(centre.to(teacher.device))
    for number, batch in enumerate(batches):
        images = batch.images.to(teacher.device, non_blocking=True)
        first = images if first is None else first
        with autocast(precision, teacher.device):
            teacher_states, teacher_output = teacher.record(images)
            student_states, student_output = surrogate.record(images)
            if head is not None:
                chosen = head.logits(teacher, teacher_states[-1], teacher_output).argmax(-1)
                student = head.logits(surrogate, student_states[-1], student_output).argmax(-1)
                hits.add(prediction_hits(chosen, student, batch.labels if scored else None), batch.places)
        curves["surrogate"].update(teacher_states, student_states, batch.places)
        del student_states
        if nulls is not None and (number * ranks.size + ranks.rank) % null_every == 0:
            for name, states in nulls.states(images, teacher_states, precision).items():
                curves[name].update(teacher_states, states, batch.places)
    if not any(ranks.gather(first is not None)):
        raise ValueError("no images to certify on: the held-out data is empty")
    reduce_all(ranks, *curves.values(), hits)
    notes = []
    if null_every > 1 and nulls is not None:
        notes.append(f"null models measured on {curves['mean'].num_images} of the images")
    if head is not None and head.source == "file" and head.classes is None and classes and scored:
        notes.append("the head names no classes: its outputs were taken in the order of the data's")
    if head is not None and not scored:
        other = "" if len(classes) != head.num_classes else f" of other names, such as {classes[0]}"
        notes.append(f"no accuracy: the head has {head.num_classes} classes, the data {len(classes)}{other}")
    return _Measured(curves, hits, first, notes)


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
    sums_lgd, num_images = None, 0
    for states, _, batch in Trajectories(teacher, sample, precision):
        added = len(batch.images) * curves.centre_of(states).double()
        sums_lgd, num_images = added if sums_lgd is None else sums_lgd + added, num_images + len(batch.images)
    return None if sums_lgd is None else (sums_lgd / num_images).float().cpu()


def _spread(batches: Sequence[Batch], num_images: int) -> list[Batch]:
    """About `num_images` images, as many of each batch."""
    chosen = batches[:: max(1, -(-len(batches) // num_images))]
    share = max(1, num_images // max(1, len(chosen)))
    rows = [torch.linspace(0, len(b.images) - 1, min(share, len(b.images))).long() for b in chosen]
    return [Batch(b.images[row.to(b.images.device)], None, b.indices[row]) for b, row in zip(chosen, rows)]


def _predictions(rows: Rows, bootstrap: int, seed: int) -> dict[str, Estimate]:
    if not len(rows):
        return {}
    hits = rows.values().double().cpu().numpy()
    ends = interval(resampled_means(hits, bootstrap, seed))
    names = ("agreement", "teacher_accuracy", "surrogate_accuracy")[: hits.shape[1]]
    return {
        name: Estimate(float(hits[:, i].mean()), jsonable(ends[0, i]), jsonable(ends[1, i]))
        for i, name in enumerate(names)
    }


def _curve_intervals(curves: Curves, bootstrap: int, seed: int) -> dict[str, Array]:
    """Bootstrap intervals (2, L, G) over images of absolute and relative error, R2 and cosine."""
    error, norm = curves.image_error, curves.image_norm
    return {
        "absolute": statistic_interval([error], lambda e: e, bootstrap, seed),
        "relative": statistic_interval([error, norm], lambda e, n: e / n, bootstrap, seed),
        "r2": statistic_interval([error**2, curves.image_deviation], lambda e, d: 1 - e / d, bootstrap, seed),
        "cosine": statistic_interval([curves.image_cosine], lambda c: c, bootstrap, seed),
    }


def _curve_quantiles(curves: Curves, bootstrap: int, seed: int) -> dict[str, tuple[Array, Array]]:
    """Quantiles over images (Q, L, G) of error, relative error and cosine, with their intervals (Q, 2, L, G)."""
    values = {"absolute": curves.image_error, "relative": curves.image_relative, "cosine": curves.image_cosine}
    return {metric: quantile_intervals(v, QUANTILES, bootstrap, seed) for metric, v in values.items()}


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
    for metric, estimates in resampled.items():
        eps[metric] = {}
        for g, group in enumerate(curves.groups):
            curve = getattr(curves, metric)[group]
            upper = np.quantile(estimates[:, :, g].max(1), 0.95) if bootstrap else np.nan
            eps[metric][group] = Eps(
                value=jsonable(curve.max()),
                layer=int(curve.argmax()) + 1,
                upper=jsonable(np.maximum(upper, curve.max())),
            )
    return eps


def _costs(surrogate: ViT, teacher: ViT, images: Tensor, precision: str) -> dict[str, Cost]:
    sides = {"surrogate": surrogate, "teacher": teacher}
    seconds = run_times(sides, images, precision)
    return {
        side: Cost(
            num_parameters=sum(p.numel() for p in vit.model.parameters()),
            block_parameters=sum(p.numel() for p in block_list(vit).parameters()),
            flops=count_flops(vit),
            seconds_per_image=seconds[side],
        )
        for side, vit in sides.items()
    }


def _check_finite(curves: ErrorCurves, surrogate: ViT, teacher: ViT) -> None:
    """Raise if states of any image are not finite: its prediction, and with it every score, would mean nothing."""
    bad = curves.first_not_finite()
    if bad is not None:
        layer, of_teacher = bad
        vit = teacher if of_teacher else surrogate
        raise NonFiniteStates.of(vit.name, f"from layer {layer} on, for one image or more")


def _check_pair(surrogate: ViT, teacher: ViT) -> None:
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
