"""Train a ViT classifier from scratch, to study: any timm shape, registers, and the paper's stochastic depth."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchvision.transforms import v2

from raptor.certificate.ridge import is_right
from raptor.checks import near_miss
from raptor.config import TeacherConfig
from raptor.data import ChosenData, ImageData, Preprocess, iterate
from raptor.data.apart import check_apart, describe_images
from raptor.data.by_name import as_spec, recorded_spec, spec_text
from raptor.data.classes import labelled_like
from raptor.data.stream import TrainStream, check_stream, stable_seed
from raptor.devices import ONE_PROCESS, Ranks, device_name, open_fabric, pick_device, pick_precision, ranks_of, seeded
from raptor.provenance import Provenance, command
from raptor.run import ResultFile, Run, StopSignal, check_config, check_folder, check_shared
from raptor.subject import Subject
from raptor.train.distilled import read_finished
from raptor.train.loop import Checkpoint, Loop
from raptor.train.optimizer import ParameterGroup
from raptor.train.plan import NUM_DECODED, Plan, free_disk, measure_stages, num_bytes
from raptor.train.stage import Budget, Stage
from raptor.train.stochastic import StochasticDepth
from raptor.train.stopping import deaths_explained
from raptor.vit.builders import build_base
from raptor.vit.open import open_vit
from raptor.vit.origin import Base, Origin, Structure
from raptor.vit.saved import repair_saved, save_vit
from raptor.vit.stated import IMAGENET, check_size
from raptor.vit.structure import inspect_vit
from raptor.vit.trajectory import autocast
from raptor.vit.view import ModelFacts, ViT
from raptor.vit.weights import load_weights

REGISTER_STD = 0.02
SCENES_SIZE = 48
_PREFIX = "model."  # of the weights in a checkpoint

_DECISIVE = (
    "drop",
    "rescale",
    "budget",
    "batch_size",
    "lr",
    "weight_decay",
    "warmup",
    "smoothing",
    "mixup",
    "cutmix",
    "augment",
    "crop_scale",
    "seed",
)
"""Options that decide the weights of a teacher, besides its shape and its images."""


@command(TeacherConfig)
def train_teacher(config: TeacherConfig) -> ViT | Plan:
    """Train a ViT classifier from scratch and save it to OUT/teacher, where open_vit finds it; with `dry_run`, only say
    what that would take.

    data: in Python also a pair of opened data, training and held-out.
    """
    device = pick_device(config.device)
    precision = pick_precision(config.precision, device)
    if not 0 <= config.drop < 1:
        raise ValueError(f"the drop probability must be in [0, 1), not {config.drop}")
    check_size(config.size)
    Budget.parse(config.budget)
    _check_shape(config.shape)
    size = config.size
    if size is None and as_spec(config.data) == "scenes":
        size = SCENES_SIZE
    train_data, val_data, spec = _open_images(config, size)
    check_folder(config.out)
    # In fp32, because `TeacherStep` has its own autocast.
    fabric = open_fabric(device, "fp32")
    name = f"timm/{config.shape} trained on {spec_text(spec)}"
    vit = _untrained(config, size, list(train_data.classes or ()), name).to(fabric.device)
    assert vit.origin.base is not None
    made_with: dict[str, Any] = {
        "shape": config.shape,
        "data": recorded_spec(spec),
        "images": describe_images(train_data, val_data),
    }
    if config.val is not None:
        made_with["val"] = recorded_spec(as_spec(config.val))
    made_with["kwargs"] = vit.origin.base.kwargs
    for option in _DECISIVE:
        made_with[option] = getattr(config, option)
    made_with |= {"crop_scale": list(config.crop_scale), "limit": config.train_images, "precision": precision}
    folder = Path(config.out)
    if config.dry_run:
        check_config(folder, made_with)
        return _plan(TeacherStage(vit, train_data, config, precision, fabric), len(val_data), folder)
    check_shared(folder, ranks_of(fabric))
    run = Run(folder, made_with)
    with run, deaths_explained(run, fabric):
        saved = run.load_checkpoint()
        if saved is not None:
            tensors = {name: value for name, value in saved[0].items() if name.startswith(_PREFIX)}
            own = {name.removeprefix(_PREFIX): value for name, value in tensors.items()}
            load_weights(vit.model, own, f"the checkpoint of {folder}")
        if read_finished(TeacherSummary, folder) is None:
            _fit(TeacherStage(vit, train_data, config, precision, fabric), run, saved, val_data)
        elif saved is None:  # its checkpoints were deleted to save room
            vit.model.load_state_dict(open_vit(folder / "teacher").model.state_dict())
        elif fabric.is_global_zero:
            with run.writing():
                repair_saved(vit, folder / "teacher")
    return vit


def _check_shape(shape: str) -> None:
    import timm  # not with this file, whose results a report reads: it takes seconds

    known = timm.list_models(module="vision_transformer")
    if shape.split(".")[0] not in known:
        hint = near_miss(shape, known) or ", such as vit_tiny_patch16_224"
        raise ValueError(f"--shape {shape} is no plain timm ViT (vit_* or deit_*){hint}")


def _open_images(config: TeacherConfig, size: int | None) -> tuple[ImageData, ImageData, Any]:
    """Images to train on, held-out images, and how the first are named."""
    spec = as_spec(config.data)
    if isinstance(spec, tuple):
        train, given = spec
        _check_training(config, train, train.name)
        check_apart(train, given)
        val = labelled_like(given, train)
        if given.labels is not None and val.labels is None:
            raise ValueError(f"{given.name} has other classes than {train.name}: give images of the same ones")
        return train, val, train.name
    chosen = ChosenData(spec, as_spec(config.val), skip_bad=config.skip_bad)
    train = chosen.training(config.train_images, size)
    _check_training(config, train, spec_text(spec))
    val = chosen.judged(config.num_images, size, like=train)
    if config.val is not None and val.labels is None:
        raise ValueError(f"{chosen.name} has other classes than {spec_text(spec)}: give --val with the same ones")
    return train, val, spec


def _check_training(config: TeacherConfig, data: ImageData, name: str) -> None:
    """Refuse images that a classifier cannot be trained on, before the held-out ones are compared with them."""
    if data.labels is None or not data.classes:
        raise ValueError(f"{name} has no labels to train on: use an image folder with one folder per class")
    if len(data.classes) < 2:
        raise ValueError(f"{name} has one class only: a classifier needs two or more")
    check_stream(len(data), config.batch_size, config.augment, config.crop_scale)


@torch.no_grad()
def _untrained(config: TeacherConfig, size: int | None, classes: list[str], name: str) -> ViT:
    """The model as training starts from it."""
    given = {
        "img_size": size,
        "patch_size": config.patch,
        "embed_dim": config.dim,
        "depth": config.depth,
        "num_heads": config.heads,
    }
    # What is not given keeps the architecture's own value.
    kwargs: dict[str, Any] = {option: value for option, value in given.items() if value is not None}
    if config.registers:
        kwargs |= {"reg_tokens": config.registers, "no_embed_class": True}
    base = Base(source=f"timm/{config.shape}", kwargs=kwargs, num_classes=len(classes))
    with seeded(config.seed):
        model = build_base(base)
    token = getattr(model, "reg_token", None)
    if token is not None:
        # Each register at random: timm's all start near zero, and registers that start equal stay equal.
        generator = torch.Generator().manual_seed(stable_seed(config.seed, "registers"))
        token.copy_(REGISTER_STD * torch.randn(token.shape, generator=generator))
    native = size or int(model.patch_embed.img_size[0])  # type: ignore[union-attr, index]
    preprocess = Preprocess.for_native(native, *IMAGENET, size=native)
    vit = inspect_vit(model, name, preprocess, Structure(), Origin(base=base))
    vit.classes = list(classes)
    return vit


def _plan(stage: TeacherStage, num_held_out: int, folder: Path) -> Plan:
    """What the training of a teacher takes, from a few of its steps."""
    fabric = stage.fabric
    data = stage.stream.data
    num_classes = len(data.classes or ())
    measured = measure_stages([stage], fabric)
    pass_seconds = measured.parts[0].seconds / measured.parts[0].batch_size / 3  # a pass is a third of a step
    written = {
        "three checkpoints": 3 * measured.checkpoint_bytes,
        "teacher": num_bytes(stage.model.state_dict().values()),
    }
    return Plan(
        command="train-teacher",
        model=stage.vit.name,
        data=data.name,
        folder=str(folder),
        device=device_name(fabric.device),
        checked=[f"{len(data):,} images to train on, {num_held_out:,} held out, labels of {num_classes} classes"],
        parts=measured.parts,
        other_seconds=num_held_out * pass_seconds,
        memory_bytes=measured.memory_bytes,
        fixed_bytes=measured.fixed_bytes,
        written_bytes=written,
        free_bytes=free_disk(folder, sum(written.values())),
        num_devices=fabric.world_size,
    )


@StopSignal()
def _fit(stage: TeacherStage, run: Run, saved: Checkpoint | None, val_data: ImageData) -> None:
    """Train the teacher and measure it on the held-out images; rank 0 writes it."""
    started = time.monotonic()
    fabric = stage.fabric
    config = stage.config
    data = [stage.stream.data, val_data]
    loop = Loop(run, fabric, [stage], saved, data, checkpoint_minutes=config.checkpoint_minutes)
    loop.fit()
    accuracy = evaluate(stage.vit, val_data, stage.precision, config.num_workers, ranks_of(fabric))
    bad_images = loop.bad_images()
    if fabric.is_global_zero:
        with run.writing():
            save_vit(stage.vit, run.folder / "teacher")
            summary = TeacherSummary(
                teacher=stage.vit.facts(),
                accuracy=accuracy,
                seconds=round(loop.state.seconds, 1),
                device=device_name(fabric.device),
                bad_images=bad_images,
                provenance=Provenance.since(started, fabric.device),
                subject=Subject.of(stage.vit, val_data),
            )
            summary.write(run.folder)
    fabric.barrier()  # other ranks may read the summary after this


@dataclass
class TeacherSummary(ResultFile):
    """`summary.json` of a teacher.

    Attributes:
        accuracy: on the held-out images.
        seconds: of training.
        bad_images: names of the unreadable images that were skipped.
    """

    FILE: ClassVar[str] = "summary.json"

    teacher: ModelFacts
    accuracy: float
    seconds: float
    device: str = ""
    bad_images: list[str] = field(default_factory=list)
    provenance: Provenance = field(default_factory=Provenance)
    subject: Subject | None = None


class TeacherStep(nn.Module):
    """One training step: the loss of a batch under soft targets.

    It has its own autocast, because Fabric's would round the targets to bf16 as well.
    """

    def __init__(self, model: nn.Module, precision: str):
        super().__init__()
        self.model = model
        self.precision = precision

    def forward(self, images: Tensor, targets_bc: Tensor) -> Tensor:
        with autocast(self.precision, images.device):
            return F.cross_entropy(self.model(images), targets_bc)


class TeacherStage(Stage):
    """The training of a teacher, whose blocks are wrapped for stochastic depth until `end`."""

    name = "teacher"
    title = "train teacher"
    betas = (0.9, 0.98)

    def __init__(self, vit: ViT, train_data: ImageData, config: TeacherConfig, precision: str, fabric: Any):
        self.vit = vit
        self.model = vit.model.train()
        self.config = config
        self.precision = precision
        self.fabric = fabric
        self.stream = TrainStream(
            train_data,
            vit.preprocess,
            config.batch_size,
            seed=config.seed,
            augment=config.augment,
            crop_scale=config.crop_scale,
            device=fabric.device,
            num_workers=config.num_workers,
            num_decoded=NUM_DECODED if config.dry_run else None,
            ranks=ranks_of(fabric),
        )
        decayed: list[tuple[str, nn.Parameter]] = []
        plain: list[tuple[str, nn.Parameter]] = []
        for name, parameter in self.model.named_parameters():
            if not parameter.requires_grad:
                continue
            if parameter.ndim > 1:
                decayed.append((name, parameter))
            else:
                plain.append((name, parameter))  # weight decay would pull gains to zero, which is no simpler model
        self.groups = [ParameterGroup(decayed, config.weight_decay), ParameterGroup(plain, 0.0)]
        self.lr = config.lr
        self.warmup = config.warmup
        self.batch_size = config.batch_size
        self.budget = Budget.parse(config.budget)
        self.steps_per_epoch = float(self.stream.steps_per_epoch)
        self.dropped = StochasticDepth(
            vit.blocks, config.drop, self.batch_size, config.rescale, config.seed, self.stream.rows
        )
        self.model.to(fabric.device)
        compiles = config.compile
        if compiles is None:
            compiles = fabric.device.type == "cuda"
        if compiles:
            for block in vit.blocks:
                block.compile()
        self.module = TeacherStep(self.model, precision)

    def losses(self, wrapped: Any, step: int, num_steps: int, propagate: Callable[[Tensor], None]) -> Tensor:
        images, targets_bc = self._batch(step)
        # Which blocks are dropped is decided before the module runs: a compiled block draws nothing itself.
        self.dropped.draw(step)
        loss = wrapped(images, targets_bc)
        propagate(loss)
        return loss.detach().float()[None]

    def _batch(self, step: int) -> tuple[Tensor, Tensor]:
        """This rank's images and soft targets (B, C), with mixup or cutmix over the batch of all ranks."""
        mixup = self.config.mixup
        cutmix = self.config.cutmix
        images = self.stream.batch(step, stage=self.name)
        labels = self.stream.labels(step, stage=self.name)
        targets_bc = smooth_targets(labels, len(self.stream.data.classes or ()), self.config.smoothing)
        seed = stable_seed(self.config.seed, "mix", step)
        if self.fabric.world_size == 1 or max(mixup, cutmix) <= 0:
            return mixed_batch(images, targets_bc, mixup, cutmix, seed)
        # Each row is mixed with the one before it, so a rank needs the last row of the rank before. Rank 0 gets the
        # last row of all, as torchvision rolls a batch.
        before = self.fabric.global_rank - 1
        images = torch.cat([self.fabric.all_gather(images[-1:])[before], images])
        targets_bc = torch.cat([self.fabric.all_gather(targets_bc[-1:])[before], targets_bc])
        images, targets_bc = mixed_batch(images, targets_bc, mixup, cutmix, seed)
        return images[1:], targets_bc[1:]

    def tensors(self) -> dict[str, Tensor]:
        # Under the names of the plain model: stochastic depth stands around each block.
        tensors = {}
        for name, value in self.model.state_dict().items():
            tensors[_PREFIX + name.replace(".block.", ".", 1)] = value
        return tensors

    def end(self) -> None:
        # Put the plain blocks back.
        self.dropped.remove()
        self.model.eval()


def smooth_targets(labels_b: Tensor, num_classes: int, smoothing: float) -> Tensor:
    """Targets (B, C): `1 - smoothing` at the label, `smoothing` spread over all classes."""
    return F.one_hot(labels_b, num_classes).float() * (1 - smoothing) + smoothing / num_classes


def mixed_batch(images: Tensor, targets_bc: Tensor, mixup: float, cutmix: float, seed: int) -> tuple[Tensor, Tensor]:
    """Images and targets after mixup or cutmix. When both are on, one of them is chosen with equal probability.

    Each row is mixed with the row before it (the first one with the last), as torchvision does it.
    """
    transforms: list[v2.Transform] = []
    if mixup > 0:
        transforms.append(v2.MixUp(alpha=mixup))
    if cutmix > 0:
        transforms.append(v2.CutMix(alpha=cutmix))
    if not transforms:
        return images, targets_bc
    # torchvision's transforms draw from the global generator only.
    with torch.random.fork_rng(devices=[]):
        torch.random.default_generator.manual_seed(seed)
        return v2.RandomChoice(transforms)(images, targets_bc)


@torch.no_grad()
def evaluate(
    vit: ViT, data: ImageData, precision: str = "fp32", num_workers: int | None = None, ranks: Ranks = ONE_PROCESS
) -> float:
    """Accuracy of the model's own head on `data`, shared by all ranks."""
    num_right = torch.zeros((), dtype=torch.int64, device=vit.device)
    num = 0
    for batch in iterate(data, vit.preprocess, 256, device=vit.device, num_workers=num_workers, ranks=ranks):
        assert batch.labels is not None
        with autocast(precision, vit.device):
            num_right += is_right(vit(batch.images), batch.labels).sum()
        num += len(batch.images)
    return int(ranks.sum(num_right)) / sum(ranks.gather(num))
