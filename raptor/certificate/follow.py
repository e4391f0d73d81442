"""One streaming pass of a teacher and a surrogate over the same images: error curves, and the classes both choose."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from raptor.certificate.bootstrap import interval, resampled_means, statistic_interval
from raptor.certificate.error_curves import Curves, ErrorCurves
from raptor.certificate.heads import Head
from raptor.certificate.null_models import NULL_NAMES, NullModels
from raptor.certificate.refit import Refitted
from raptor.certificate.verdict import Estimate
from raptor.data.stream import Batch, ImageStream, sharing
from raptor.streaming import Array, Rows, reduce_all
from raptor.vit.trajectory import NonFiniteStates, Trajectories, autocast
from raptor.vit.view import ViT

_CENTRE_IMAGES = 256


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
class Followed:
    """The results of one pass.

    Attributes:
        curves: of the surrogate and of the null models.
        chosen: for each image the class that each of `columns` gives, (N, columns).
        columns: `teacher`, `surrogate`, with a refitted head `refitted`, and `label` where the head knows the classes.
        indices: the number of each image in the data, (N,).
        images: the first batch.
        image_names, classes: of the data; empty where it has none.
    """

    curves: dict[str, ErrorCurves]
    image_names: Sequence[str]
    classes: Sequence[str]
    columns: list[str] = field(default_factory=list)
    chosen: Rows = field(default_factory=Rows)
    indices: Rows = field(default_factory=Rows)
    images: Tensor | None = None

    def names_of(self, curves: Curves) -> list[str]:
        """The names of the images that `curves` keeps."""
        places = curves.image_places.tolist()
        if not self.image_names:
            return [f"image {place}" for place in places]
        # Beyond the reservoir's size only some images are kept, and ranks mix their order: places tell which.
        index_at = dict(zip(self.indices.places, self.indices.values().tolist()))
        return [self.image_names[index_at[place]] for place in places]

    def predictions(self, bootstrap: int, seed: int) -> dict[str, Estimate]:
        """`agreement` and, with labels, `teacher_accuracy` and `surrogate_accuracy`; empty without a head.

        With a refitted head also `refitted_agreement` and `refitted_accuracy`, of the surrogate under that head.
        """
        if not len(self.chosen):
            return {}
        of = dict(zip(self.columns, self.chosen.values().T.cpu().numpy()))
        hits = {"agreement": of["surrogate"] == of["teacher"]}
        if "refitted" in of:
            hits["refitted_agreement"] = of["refitted"] == of["teacher"]
        if "label" in of:
            # The labels are the last column.
            for name in self.columns[:-1]:
                hits[f"{name}_accuracy"] = of[name] == of["label"]
        # Side by side, so that all shares are resampled with the same images.
        hits_nc = np.stack(list(hits.values()), axis=1).astype(np.float64)
        ends_2c = interval(resampled_means(hits_nc, bootstrap, seed))
        return {name: Estimate.of(hits_nc[:, i].mean(), ends_2c[:, i]) for i, name in enumerate(hits)}

    def floors(self) -> dict[str, float]:
        """`agreement` and, with labels, `accuracy` of a predictor that always gives one class, the best one there is.

        The class is chosen on these very images, so that no constant predictor is better on them.
        """
        found: dict[str, float] = {}
        if not len(self.chosen):
            return found
        for column, class_n in zip(self.columns, self.chosen.values().T.cpu().numpy()):
            if column in ("teacher", "label"):
                _, counts = np.unique(class_n, return_counts=True)
                found["agreement" if column == "teacher" else "accuracy"] = float(counts.max() / len(class_n))
        return found


@torch.no_grad()
def follow(
    surrogate: ViT,
    teacher: ViT,
    batches: Iterable[Batch],
    head: Head | None,
    precision: str,
    nulls: NullModels | None = None,
    refitted: Refitted | None = None,
) -> Followed:
    """Run both models, and the null models, over the images; of all ranks that share the batches, on rank 0.

    refitted: norm and head of the surrogate, whose classes are compared beside those of the untouched head.
    """
    names = ["surrogate"]
    if nulls is not None:
        names += NULL_NAMES
    curves = {name: ErrorCurves(teacher.num_layers, teacher.groups) for name in names}
    data = getattr(batches, "data", None)
    found = Followed(curves, getattr(data, "names", ()), getattr(data, "classes", None) or ())
    # A head of other classes still tells agreement, which needs no label.
    is_scored = head is not None and head.fits(found.classes)
    ranks = sharing(batches)
    centre = ranks.first(lambda: _centre(curves["surrogate"], teacher, batches, precision))
    # All ranks measure from one point, or their sums of deviations could not be added.
    if centre is not None:
        for each in curves.values():
            each.start(centre.to(teacher.device))
    for batch in batches:
        images = batch.images.to(teacher.device, non_blocking=True)
        if found.images is None:
            found.images = images
        with autocast(precision, teacher.device):
            # Whole models by hooks, not block by block: what is certified is what a user runs.
            teacher_states, teacher_output = teacher.record(images)
            student_states, student_output = surrogate.record(images)
            if head is not None:
                chosen = {
                    "teacher": head.logits(teacher, teacher_states[-1], teacher_output).argmax(-1),
                    "surrogate": head.logits(surrogate, student_states[-1], student_output).argmax(-1),
                }
                if refitted is not None:
                    chosen["refitted"] = refitted.logits(surrogate, student_states[-1]).argmax(-1)
                if is_scored and batch.labels is not None:
                    chosen["label"] = batch.labels.to(teacher.device)
                found.columns = list(chosen)
                found.chosen.add(torch.stack(list(chosen.values()), dim=1), batch.places)
        curves["surrogate"].update(teacher_states, student_states, batch.places)
        found.indices.add(batch.indices.to(teacher.device), batch.places)
        del student_states  # null models need the memory
        if nulls is not None:
            for name, states in nulls.states(images, teacher_states, precision).items():
                curves[name].update(teacher_states, states, batch.places)
    # All ranks ask together, because one of them may rightly have no image of a small set.
    if not any(ranks.gather(found.images is not None)):
        raise ValueError("no images to certify on: the held-out data is empty")
    reduce_all(ranks, *curves.values(), found.chosen, found.indices)
    return found


def curve_intervals(curves: Curves, bootstrap: int, seed: int) -> dict[str, Array]:
    """Bootstrap intervals (2, L, G) over images of absolute and relative error, R2 and cosine."""
    error = curves.image_error
    norm = curves.image_norm
    return {
        "absolute": statistic_interval([error], lambda e: e, bootstrap, seed),
        "relative": statistic_interval([error, norm], lambda e, n: e / n, bootstrap, seed),
        # Sums of squares are resampled together: images with large states weigh more in both of them.
        "r2": statistic_interval([error**2, curves.image_deviation], lambda e, d: 1 - e / d, bootstrap, seed),
        "cosine": statistic_interval([curves.image_cosine], lambda c: c, bootstrap, seed),
    }


def check_finite(curves: ErrorCurves, surrogate: ViT, teacher: ViT) -> None:
    """Raise if states of any image are not finite: its prediction, and with it every score, would mean nothing."""
    bad = curves.first_not_finite()
    if bad is not None:
        layer, is_teacher = bad
        name = teacher.name if is_teacher else surrogate.name
        raise NonFiniteStates.of(name, f"from layer {layer} on, for one image or more")


def _centre(curves: ErrorCurves, teacher: ViT, batches: Iterable[Batch], precision: str) -> Tensor | None:
    """The mean state of images spread over all batches; None where that cannot be seen without reading all of them.

    The first batch of a folder may be all of one class, and deviations from its mean would make intervals too wide.
    """
    sample: Iterable[Batch]
    if isinstance(batches, ImageStream):
        sample = stream = batches.whole().sample(min(_CENTRE_IMAGES, batches.num_images))
        stream.progress = None  # these images are counted when they are measured
    elif isinstance(batches, Sequence):
        chosen = batches[:: max(1, -(-len(batches) // _CENTRE_IMAGES))]
        share = max(1, _CENTRE_IMAGES // max(1, len(chosen)))  # as many images of each batch
        sample = some = []
        for batch in chosen:
            rows = torch.linspace(0, len(batch.images) - 1, min(share, len(batch.images))).long()
            some.append(Batch(batch.images[rows.to(batch.images.device)], None, batch.indices[rows]))
    else:
        return None
    sums_lgd: Tensor | None = None
    num_images = 0
    for states, _, batch in Trajectories(teacher, sample, precision):
        added_lgd = len(batch.images) * curves.centre_of(states).double()
        sums_lgd = added_lgd if sums_lgd is None else sums_lgd + added_lgd
        num_images += len(batch.images)
    return None if sums_lgd is None else (sums_lgd / num_images).float().cpu()
