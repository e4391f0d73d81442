"""Heads for accuracy and agreement: the model's own, one given by file, or a ridge probe on the teacher's features."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from raptor.data.images import ImageData
from raptor.data.split import choice_split
from raptor.data.stream import Batch, ImageStream, iterate, sharing
from raptor.devices import ONE_PROCESS, Ranks
from raptor.progress import track
from raptor.provenance import hash_config
from raptor.run import replacing
from raptor.streaming import Rows
from raptor.vit.trajectory import autocast
from raptor.vit.view import POOLED, ViT, first_tensor
from raptor.vit.weights import check_weights, fingerprint, load_tensors, same_weights

_NUM_IMAGES, _NUM_IMAGES_PER_CLASS = 5000, 20  # a ridge head is fitted on 20 images per class, at least 5,000
_CHOICE_SHARE = 0.2
HEAD_OF_FILE = "the head in "
"""How a summary says that a head was given by file; its name follows."""
ALPHAS = (0.1, 1.0, 10.0, 100.0, 1e3, 1e4, 1e5)


class LinearHead(nn.Module):
    """A linear classifier on pooled features (N, F), as `ViT.features` gives them.

    Attributes:
        weight: (C, F), any standardisation of the features folded in.
        bias: (C,).
        alpha: the ridge penalty it was fitted with, None when it came from elsewhere.
        classes: the names of its outputs, None where its file holds none.
    """

    weight: Tensor
    bias: Tensor

    def __init__(
        self,
        weight_cf: Tensor,
        bias_c: Tensor,
        alpha: float | None = None,
        classes: Sequence[str] | None = None,
    ):
        super().__init__()
        if weight_cf.ndim != 2 or bias_c.shape != weight_cf.shape[:1]:
            raise ValueError(f"a head needs weight (C, F) and bias (C,), not {_shape(weight_cf)} and {_shape(bias_c)}")
        if weight_cf.numel() == 0:
            raise ValueError(f"a head needs at least one class and one feature, not weight {_shape(weight_cf)}")
        self.register_buffer("weight", weight_cf.float().contiguous())
        self.register_buffer("bias", bias_c.float().contiguous())
        self.alpha, self.classes = alpha, classes

    @property
    def num_classes(self) -> int:
        return self.weight.shape[0]

    def forward(self, features_nf: Tensor) -> Tensor:
        """Logits (N, C), in float32."""
        if features_nf.shape[-1] != self.weight.shape[1]:
            raise ValueError(f"the head takes {self.weight.shape[1]} features, the model gives {features_nf.shape[-1]}")
        with torch.autocast(features_nf.device.type, enabled=False):
            return F.linear(features_nf.float(), self.weight, self.bias)

    def save(self, path: str | Path, fitted_on: dict[str, str] | None = None) -> Path:
        """Write weight and bias as safetensors, with its classes and what it was fitted on as metadata."""
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        tensors = {"weight": self.weight.cpu(), "bias": self.bias.cpu()}
        alpha = {} if self.alpha is None else {"alpha": str(self.alpha)}
        with replacing(path) as partial:
            save_file(tensors, partial, metadata=alpha | (fitted_on or {}) | classes_metadata(self.classes))
        return path

    @classmethod
    def load(cls, path: str | Path) -> LinearHead:
        """Read a head: safetensors, or a weights-only .pth, with `weight` and `bias` (under any common prefix)."""
        path = Path(path)
        if not path.is_file():
            raise ValueError(f"no head at {path}: give a safetensors file with weight (C, F) and bias (C,)")
        remedy = "give a file with weight (C, F) and bias (C,)"
        try:
            tensors = load_tensors(path)
        except ValueError as error:
            raise ValueError(f"{path} is no linear head: it cannot be read ({str(error)[:120]}): {remedy}") from None
        if not isinstance(tensors, dict) or not all(isinstance(tensor, Tensor) for tensor in tensors.values()):
            raise ValueError(f"{path} is no linear head: it holds no named tensors: {remedy}")
        found = {str(name).rsplit(".", 1)[-1]: tensor for name, tensor in tensors.items()}
        if len(tensors) > 2 or set(found) not in ({"weight", "bias"}, {"weight"}):
            raise ValueError(
                f"{path} is no linear head: it holds {', '.join(sorted(map(str, tensors))[:4])}, not weight and bias"
            )
        weight = found["weight"]
        if not weight.is_floating_point() or not weight.numel():
            held = "no classes" if weight.is_floating_point() else f"{str(weight.dtype).removeprefix('torch.')} weights"
            raise ValueError(f"{path} is no linear head: it has {held}: {remedy}")
        check_weights(tensors, path)
        return cls(weight, found.get("bias", weight.new_zeros(len(weight))), classes=_read_classes(path, len(weight)))


def head_fingerprint(file: str | Path) -> str:
    """A short name of the content of a head's file."""
    return hashlib.blake2b(Path(file).read_bytes(), digest_size=8).hexdigest()


def classes_metadata(classes: Sequence[str] | None) -> dict[str, str]:
    """The names of a head's outputs, in their order, as its file holds them."""
    return {} if classes is None else {"classes": json.dumps(list(classes))}


def _read_classes(path: Path, num_classes: int) -> list[str] | None:
    """The names of a head's outputs; None where its file holds none."""
    text = _read_metadata(path).get("classes")
    if text is None:
        return None
    try:
        names = json.loads(text)
    except (ValueError, RecursionError):
        names = None
    if not isinstance(names, list) or len(names) != num_classes or not all(isinstance(name, str) for name in names):
        raise ValueError(
            f"{path} is no linear head: its metadata does not name its {num_classes} classes: save it again"
        )
    return names


@dataclass(frozen=True)
class Head:
    """A classifier for a model and its surrogates: their own output, or a linear head on their features."""

    source: str  # own, file or ridge
    num_classes: int
    linear: LinearHead | None = None
    classes: Sequence[str] | None = None  # their names, where the model keeps them

    def is_of(self, classes: Sequence[str]) -> bool:
        """Whether it can be right about labels of these classes: as many and, where it names its own, the same."""
        same = self.classes is None or list(classes) == list(self.classes)
        return len(classes) == self.num_classes and same

    def logits(self, vit: ViT, state_btd: Tensor, output: Tensor) -> Tensor:
        """Logits (B, C) of `vit`, given its last state `a_L` and its own output."""
        if self.linear is None:
            return output.float()
        return self.linear.to(state_btd.device)(vit.features(state_btd))


def fit_ridge(
    features_nf: Tensor,
    labels_n: Tensor,
    num_classes: int,
    alphas: Sequence[float] = ALPHAS,
) -> LinearHead:
    """Ridge regression of one-hot labels on standardised features, in closed form and float64.

    Minimises `|Y - Z W - b|^2 + alpha |W|^2` with Z the standardised features. Alpha is the one with the best accuracy
    on a random fifth of these features after fitting on the rest, of several the one with the smallest squared error
    there: a far larger penalty may be as accurate, but not after the shares of the classes change a little. The head is
    then fitted on all of them.
    """
    if len(features_nf) != len(labels_n) or len(features_nf) < 2:
        raise ValueError(f"a ridge head needs at least two images with one label each, not {len(features_nf)}")
    if int(labels_n.min()) < 0 or int(labels_n.max()) >= num_classes:
        raise ValueError(f"labels must be 0..{num_classes - 1}, not {int(labels_n.min())}..{int(labels_n.max())}")
    labels_n = labels_n.to(features_nf.device)
    alpha = max(alphas)
    if len(alphas) > 1:
        generator = torch.Generator().manual_seed(0)
        order = torch.randperm(len(features_nf), generator=generator).to(features_nf.device)
        chosen, rest = order.tensor_split([max(1, round(_CHOICE_SHARE * len(order)))])
        heads = _ridge_path(features_nf[rest], labels_n[rest], num_classes, sorted(alphas, reverse=True))
        alpha = max(heads, key=lambda a: _fit_of(heads[a](features_nf[chosen]), labels_n[chosen]))
    return _ridge_path(features_nf, labels_n, num_classes, [alpha])[alpha]


def _fit_of(logits_nc: Tensor, labels_n: Tensor) -> tuple[float, float]:
    """Accuracy, and minus the squared error of one-hot labels: larger is better."""
    error = (logits_nc - F.one_hot(labels_n.long(), logits_nc.shape[1])).square().mean().item()
    return accuracy(logits_nc, labels_n), -error


def _ridge_path(
    features_nf: Tensor, labels_n: Tensor, num_classes: int, alphas: Sequence[float]
) -> dict[float, LinearHead]:
    """A head for every alpha from one eigendecomposition of the features' covariance."""
    z, mean, scale = standardised(features_nf)
    y = F.one_hot(labels_n.long(), num_classes).double()
    target = y.mean(0)
    values, vectors = torch.linalg.eigh(z.T @ z)
    projected = vectors.T @ (z.T @ (y - target))
    heads = {}
    for alpha in alphas:
        weight_cf = (vectors @ (projected / (values.clamp_min(0) + alpha)[:, None])).T / scale
        heads[alpha] = LinearHead(weight_cf, target - weight_cf @ mean, alpha)
    return heads


def standardised(features_nf: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Features (N, F) with mean 0 and deviation 1, their mean and their scale (F,), in float64.

    The scale of a feature that does not vary is 1.
    """
    x_nf = features_nf.double()
    mean, scale = x_nf.mean(0), x_nf.std(0, correction=0)
    scale = torch.where(scale > 1e-12 * scale.max(), scale, torch.ones_like(scale))
    return (x_nf - mean) / scale, mean, scale


@torch.no_grad()
def _pooled_features(vit: ViT, batches: Iterable[Batch], precision: str) -> Iterator[tuple[Tensor, Batch]]:
    """Pooled features (B, F) of the last state in float32, batch by batch."""
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
    features, labels, ranks = Rows(), Rows(), sharing(batches)
    for some, batch in _pooled_features(vit, batches, precision):
        features.add(some, batch.places)
        if batch.labels is not None:
            labels.add(batch.labels.to(vit.device), batch.places)
    if not any(ranks.gather(len(features))):
        raise ValueError("no images to take features from: the data is empty")
    features.reduce(ranks)
    labels.reduce(ranks)
    own = features.values() if len(features) else torch.empty(0, device=vit.device)
    return own, labels.values() if len(labels) else None


def fit_ridge_head(
    vit: ViT, batches: Iterable[Batch], num_classes: int | None = None, precision: str = "fp32"
) -> tuple[LinearHead, int] | None:
    """A ridge head on the features of `batches`, of all ranks that share them, and the number of images.

    It is on the CPU. None without labels. `num_classes` is by default one more than the largest label.
    """
    features, labels = collect_features(vit, batches, precision)

    def fit() -> tuple[LinearHead, int] | None:
        if labels is None:
            return None
        return fit_ridge(features, labels, num_classes or int(labels.max()) + 1).cpu(), len(features)

    return sharing(batches).first(fit)


def head_accuracy(vit: ViT, head: LinearHead, batches: Iterable[Batch], precision: str = "fp32") -> float:
    """Accuracy of a head on the features of labelled batches, of all ranks that share them."""
    head, num_right, num = head.to(vit.device), torch.zeros((), dtype=torch.int64, device=vit.device), 0
    for features, batch in _pooled_features(vit, batches, precision):
        assert batch.labels is not None
        num_right += is_right(head(features), batch.labels).sum()
        num += len(features)
    ranks = sharing(batches)
    return int(ranks.sum(num_right)) / sum(ranks.gather(num))


def is_right(logits_nc: Tensor, labels_n: Tensor) -> Tensor:
    """Whether the largest logit is the label's, (N,) bool on the device of the logits."""
    return logits_nc.argmax(-1) == labels_n.to(logits_nc.device)


def accuracy(logits_nc: Tensor, labels_n: Tensor) -> float:
    """Share of images whose largest logit is their label's."""
    return is_right(logits_nc, labels_n).float().mean().item()


def share_kept(score: float | None, of_teacher: float, higher_is_better: bool = True) -> float | None:
    """Surrogate / teacher for scores, teacher / surrogate for errors; None without a score or if it divides by 0."""
    top, bottom = (score, of_teacher) if higher_is_better else (of_teacher, score)
    return top / bottom if top is not None and bottom else None


def prediction_hits(teacher_b: Tensor, student_b: Tensor, labels_b: Tensor | None) -> Tensor:
    """Per image, 0 or 1: whether both chose the same class and, with labels, whether each was right: (B, 1 or 3)."""
    hits = [teacher_b == student_b]
    if labels_b is not None:
        labels_b = labels_b.to(teacher_b.device)
        hits += [teacher_b == labels_b, student_b == labels_b]
    return torch.stack(hits, dim=1).to(torch.uint8)


def head_batches(
    teacher: ViT,
    data: ImageData,
    batch_size: int,
    *,
    head_images: int | None = None,
    num_workers: int | None = None,
    ranks: Ranks = ONE_PROCESS,
) -> ImageStream:
    """The training images a ridge head is fitted on: `head_images` of them, by default 20 per class, at least 5,000.

    None of them is in the part of train that probes choose on, so that a probe may start from such a head.
    """
    fit = data.select(choice_split(data.keys)[0]) if len(data) > 1 else data
    wanted = head_images or max(_NUM_IMAGES, _NUM_IMAGES_PER_CLASS * len(data.classes or ()))
    limit = min(wanted, len(fit))
    return iterate(
        fit,
        teacher.preprocess,
        batch_size,
        device=teacher.device,
        num_workers=num_workers,
        limit=limit,
        ranks=ranks,
    )


def given_head(file: str | Path, vit: ViT) -> LinearHead:
    """The head in a file; ValueError where it takes other features than the model gives."""
    linear = LinearHead.load(file)
    probe = _read_metadata(file)
    if probe.get("task", "classify") != "classify":
        raise ValueError(f"the head in {file} is of the task {probe['task']}: give one that classifies")
    if probe.get("layer", str(vit.num_layers)) != str(vit.num_layers):
        raise ValueError(
            f"the head in {file} reads layer {probe['layer']}, not the last one of {vit.name}: give another --head_file"
        )
    num = vit.dim * sum(name in POOLED for name, _ in vit.groups.present())
    if linear.weight.shape[1] != num:
        takes = linear.weight.shape[1]
        raise ValueError(f"the head in {file} takes {takes} features, {vit.name} gives {num}: give another --head_file")
    return linear


def head_outputs(vit: ViT, file: str | Path | None) -> tuple[int, Sequence[str] | None]:
    """How many classes the head that judges has, the one in `file` or else the model's own, and their names where it
    keeps them."""
    if file is None:
        return vit.num_classes, vit.classes
    linear = given_head(file, vit)
    return linear.num_classes, linear.classes


def resolve_head(
    teacher: ViT,
    train_batches: Iterable[Batch] | None = None,
    *,
    file: str | Path | None = None,
    cache: str | Path | None = None,
    head_images: int | None = None,
    num_classes: int | None = None,
    precision: str = "fp32",
) -> tuple[Head | None, str]:
    """The head for accuracy and agreement, or None; and a sentence saying which, or why none.

    The one in `file`; else the model's own; else a ridge probe on the teacher's features of `train_batches` (see
    `head_batches`), when these have labels. `cache` is where the ridge probe is kept (in the run folder): it is read
    from there, so that all commands on a run use one head, unless it was fitted on other data, for other classes, on
    another teacher or on another number of images than the `head_images` that were asked for. Data of the same name
    are others where as many images are not the same ones, or have other labels. Rank 0 reads and keeps it.
    """
    if file is not None:
        linear = given_head(file, teacher)
        return Head("file", linear.num_classes, linear, linear.classes), f"{HEAD_OF_FILE}{file}"
    if teacher.num_classes:
        return Head("own", teacher.num_classes, classes=teacher.classes), f"the head of {teacher.name} itself"
    data = getattr(train_batches, "data", None)
    num_classes = num_classes or len(getattr(data, "classes", None) or ()) or None
    fitted_on = _fitted_on(teacher, train_batches, num_classes)
    decisive = {name: value for name, value in fitted_on.items() if name != "num_images" or head_images is not None}
    ranks = sharing(train_batches)
    kept = None if cache is None else ranks.first(lambda: _read_kept(cache, decisive, teacher, train_batches))
    if kept is not None:
        linear, about = kept
        return Head("ridge", linear.num_classes, linear, linear.classes), about
    if train_batches is None:
        return (
            None,
            f"no accuracy or agreement: {teacher.name} has no head, none was given and there is no training data",
        )
    if data is not None and len(data.present()) < 2:
        has = "has no labels" if data.labels is None else "has one class only"
        return None, f"no accuracy or agreement: {teacher.name} has no head, none was given and {data.name} {has}"
    fitted = fit_ridge_head(teacher, train_batches, num_classes, precision)
    if fitted is None:
        return None, f"no accuracy or agreement: {teacher.name} has no head, none was given and the data has no labels"
    linear, num_images = fitted
    names = getattr(data, "classes", None)
    linear.classes = names if names and len(names) == linear.num_classes else None
    fitted_on["num_fitted"] = str(num_images)
    if isinstance(data, ImageData):
        fitted_on |= {"num_data": str(len(data)), "images": data.fingerprint(), "labels": _labels_of(data)}
    if cache is not None and ranks.is_first:
        linear.save(cache, fitted_on)
    about = _about_ridge({"alpha": str(linear.alpha), **fitted_on})
    return Head("ridge", linear.num_classes, linear, linear.classes), about


def _about_ridge(fitted_on: Mapping[str, str]) -> str:
    """The same sentence of a ridge probe that was fitted now and of one that is kept, so that results are the same."""
    if "num_fitted" not in fitted_on:
        return "a ridge probe on the teacher's features, kept by an earlier version"
    alpha = float(fitted_on["alpha"])
    return f"a ridge probe on the teacher's features of {fitted_on['num_fitted']} training images (alpha {alpha:g})"


def _read_kept(
    cache: str | Path, decisive: dict[str, str], teacher: ViT, batches: Iterable[Batch] | None
) -> tuple[LinearHead, str] | None:
    """The head in `cache` and what it is, unless something else decided it."""
    kept = _read_metadata(cache) if Path(cache).is_file() else {}
    of_run = (Path(cache).parent / "config.yaml").is_file()
    if not kept or not _is_fitted_on(kept, decisive, teacher) or _are_others(kept, batches, of_run):
        return None
    return LinearHead.load(cache), _about_ridge(kept)


def _are_others(kept: Mapping[str, str], batches: Iterable[Batch] | None, of_run: bool) -> bool:
    """Whether `batches` are of other images than a kept head was fitted on, or have other labels.

    of_run: the head is that of a run. One with --limit has fewer images, and its head holds for all of its data.
    """
    data = getattr(batches, "data", None)
    if not isinstance(data, ImageData) or "num_data" not in kept:
        return False
    if of_run and kept["num_data"] != str(len(data)):
        return False
    return data.fingerprint() != kept.get("images", "") or kept.get("labels") != _labels_of(data)


def _labels_of(data: ImageData) -> str:
    """A short name of the label of each image; the fingerprint of images does not know their labels."""
    return hash_config({"labels": sorted(zip(data.keys, data.labels or ()))})


def _fitted_on(teacher: ViT, batches: Iterable[Batch] | None, num_classes: int | None) -> dict[str, str]:
    """What decides a ridge probe, as far as known before a pass over the images."""
    names = getattr(getattr(batches, "data", None), "classes", None)
    known = {
        "teacher": teacher.name,
        "weights": fingerprint(teacher.model),
        "size": teacher.preprocess.size,
        "data": getattr(getattr(batches, "data", None), "name", None),
        "num_images": getattr(batches, "num_images", None),
        "num_classes": num_classes,
        **(classes_metadata(names) if names and len(names) == num_classes else {}),
    }
    return {name: str(value) for name, value in known.items() if value is not None}


@torch.no_grad()
def own_linear_head(vit: ViT, images_bchw: Tensor) -> LinearHead | None:
    """The model's own head as one on cls and mean patch; None when it is not linear in them (seen on `images_bchw`)."""
    layers = [m for m in vit.model.modules() if isinstance(m, nn.Linear) and m.out_features == vit.num_classes]
    if not layers or layers[-1].in_features != vit.dim:
        return None
    states, output = vit.record(images_bchw.to(vit.device))
    features = vit.features(states[-1])
    weight = layers[-1].weight.detach()
    bias = weight.new_zeros(len(weight)) if layers[-1].bias is None else layers[-1].bias.detach()
    none = weight.new_zeros(len(weight), features.shape[1] - vit.dim)
    for parts in ([weight, none], [none, weight]):
        head = LinearHead(torch.cat(parts, dim=1), bias).to(vit.device)
        if torch.allclose(head(features), output.float(), rtol=1e-3, atol=1e-3):
            return head
    return None


def _read_metadata(path: str | Path) -> dict[str, str]:
    """What a saved head is and was fitted on; empty when the file is damaged or does not say."""
    try:
        with safe_open(path, framework="pt") as file:
            return file.metadata() or {}
    except SafetensorError:
        return {}


def _is_fitted_on(kept: dict[str, str], wanted: dict[str, str], teacher: ViT) -> bool:
    if "weights" in kept and "weights" in wanted and same_weights(teacher.model, kept["weights"]):
        kept["weights"] = wanted["weights"]  # written by an earlier version
    return all(kept.get(name) == value for name, value in wanted.items())


def _shape(tensor: Tensor) -> tuple[int, ...]:
    return tuple(tensor.shape)
