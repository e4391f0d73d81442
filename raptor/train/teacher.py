"""Train a ViT from scratch to study: any timm shape, registers, and the paper's stochastic depth."""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from raptor.data import ImageData, Preprocess, iterate, open_data
from raptor.data.stream import TrainStream, stable_seed
from raptor.devices import device_name, pick_device, pick_precision
from raptor.open import open_vit, save_vit
from raptor.progress import Progress
from raptor.run import Interrupted, Run, RunError, StopSignal, read_summary
from raptor.train.schedule import Budget, learning_rate
from raptor.train.stochastic import StochasticDepth
from raptor.vit.builders import IMAGENET, build_base
from raptor.vit.structure import inspect_vit
from raptor.vit.trajectory import autocast
from raptor.vit.view import ViT

LOG_EVERY = 20
REGISTER_STD = 0.02
NUM_CHECKPOINTS = 10
SCENES_SIZE = 48


def train_teacher(
    shape: str = "vit_tiny_patch16_224",
    data: str | tuple[ImageData, ImageData] = "scenes",
    *,
    out: str = "runs/teacher",
    size: int | None = None,
    patch: int | None = None,
    dim: int | None = None,
    depth: int | None = None,
    heads: int | None = None,
    registers: int = 0,
    drop: float = 0.0,
    rescale: bool = False,
    budget: str = "30epochs",
    batch_size: int = 256,
    lr: float = 1e-3,
    weight_decay: float = 0.05,
    warmup: float = 0.05,
    smoothing: float = 0.1,
    mixup: float = 0.0,
    cutmix: float = 0.0,
    augment: str = "crop",
    crop_scale: tuple[float, float] = (0.35, 1.0),
    limit: int | None = None,
    val_images: int | None = None,
    seed: int = 0,
    device: str = "auto",
    precision: str = "auto",
    compile: bool | None = None,
    num_workers: int = 0,
    resume: bool = True,
    skip_bad: bool = False,
) -> ViT:
    """Train a ViT classifier from scratch and save it to OUT/teacher, where open_vit finds it.

    Args:
        shape: a timm model name that gives the architecture; the options below change its shape.
        data: labelled images (in Python also a pair of opened data, training and held-out).
        out: run folder; continued when it already holds this run.
        size: image size (by default 48 for scenes, else the shape's).
        patch, dim, depth, heads: patch side in pixels, width, number of blocks, attention heads.
        registers: register tokens.
        drop: stochastic depth p: each block is dropped per sample with this probability, the same at every depth.
        rescale: divide kept updates by 1 - p.
        budget: 30epochs, 5000steps, or 120s.
        batch_size, lr, weight_decay, warmup: AdamW with linear warm-up (a fraction of the run) and a cosine to 0.
        smoothing: label smoothing.
        mixup, cutmix: parameter of the Beta distribution each is drawn from; 0 turns it off.
        augment: `crop` or `none`.
        crop_scale: share of the area that a random crop keeps.
        limit: use only this many training images.
        val_images: use only this many held-out images.
        seed: of initialisation, order, augmentation and drops.
        device, precision, compile, num_workers, resume: as in distill.
        skip_bad: pass over unreadable images instead of stopping.
    """
    device, precision = pick_device(device), pick_precision(precision, device)
    if data == "scenes" and size is None:
        size = SCENES_SIZE
    kwargs = {
        k: v
        for k, v in dict(img_size=size, patch_size=patch, embed_dim=dim, depth=depth, num_heads=heads).items()
        if v is not None
    }
    if registers:
        kwargs |= {"reg_tokens": registers, "no_embed_class": True}
    if isinstance(data, str):
        train_data = open_data(data, "train", limit=limit, size=size, skip_bad=skip_bad)
        val_data = open_data(data, "val", limit=val_images, size=size, skip_bad=skip_bad)
    else:
        train_data, val_data = data
    data_name = data if isinstance(data, str) else train_data.name
    classes = check_labelled(train_data, data_name)
    base = {"source": f"timm/{shape}", "kwargs": kwargs, "num_classes": len(classes)}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = build_base(base)
    separate_registers(model, seed)
    native = size or int(model.patch_embed.img_size[0])  # type: ignore[union-attr, index]
    preprocess = Preprocess.for_native(native, *IMAGENET, size=native)
    vit = inspect_vit(model, f"timm/{shape} trained on {data_name}", preprocess, source=base).to(device)
    config: dict[str, Any] = dict(
        shape=shape, data=data_name, kwargs=kwargs, drop=drop, rescale=rescale, budget=budget, batch_size=batch_size,
        lr=lr, weight_decay=weight_decay, warmup=warmup, smoothing=smoothing, mixup=mixup, cutmix=cutmix,
        augment=augment, crop_scale=list(crop_scale), limit=limit, seed=seed, precision=precision,
    )  # fmt: skip
    compiled = device == "cuda" if compile is None else compile
    with Run(out, config, resume=resume) as run:
        if read_summary(out) is None:
            stream = TrainStream(
                train_data, preprocess, batch_size, seed=seed, augment=augment, crop_scale=crop_scale, device=device,
                num_workers=num_workers,
            )  # fmt: skip
            seconds = _fit(vit, run, stream, config, compiled, num_workers)
            scores = {"accuracy": evaluate(vit, val_data, precision, num_workers), "seconds": round(seconds, 1)}
            save_vit(vit, Path(out) / "teacher")
            bad_images = sorted({*train_data.bad, *val_data.bad})
            facts = {"teacher": vit.describe(), **scores, "device": device_name(device), "bad_images": bad_images}
            run.write_summary(facts)
        elif (saved := run.load_checkpoint()) is not None:
            tensors = saved[0].items()
            vit.model.load_state_dict({k.removeprefix("model."): v for k, v in tensors if k.startswith("model.")})
        else:
            vit.model.load_state_dict(open_vit(Path(out) / "teacher").model.state_dict())
    return vit


def check_labelled(data: ImageData, name: str | None = None) -> list[str]:
    """The classes of labelled data; other data is refused. `name`: as its user gave it."""
    if data.labels is None or not data.classes:
        raise ValueError(f"{name or data.name} has no labels: a teacher is trained to classify")
    return data.classes


@torch.no_grad()
def separate_registers(model: nn.Module, seed: int) -> None:
    """Give each register a start of its own: timm's are all nearly zero, and alike they stay alike through training."""
    token = getattr(model, "reg_token", None)
    if token is not None:
        generator = torch.Generator().manual_seed(stable_seed(seed, "registers"))
        token.copy_(REGISTER_STD * torch.randn(token.shape, generator=generator))


@torch.no_grad()
def evaluate(vit: ViT, data: ImageData, precision: str = "fp32", num_workers: int = 0) -> float:
    """Accuracy of the model's own head on `data`."""
    right, num = torch.zeros((), device=vit.device), 0
    for batch in iterate(data, vit.preprocess, 256, device=vit.device, num_workers=num_workers):
        assert batch.labels is not None
        with autocast(precision, vit.device):
            right += (vit(batch.images).argmax(-1) == batch.labels).sum()
        num += len(batch.images)
    return float(right) / num


def mixed_batch(
    images: Tensor, labels: Tensor, num_classes: int, mixup: float, cutmix: float, smoothing: float, seed: int
) -> tuple[Tensor, Tensor]:
    """Images and soft targets (B, C) after mixup or cutmix (one of them, chosen evenly, when both are on)."""
    targets = F.one_hot(labels, num_classes).float() * (1 - smoothing) + smoothing / num_classes
    generator = torch.Generator().manual_seed(seed)
    use_cutmix = cutmix > 0 and (mixup <= 0 or bool(torch.rand((), generator=generator) < 0.5))
    alpha = cutmix if use_cutmix else mixup
    if alpha <= 0:
        return images, targets
    gamma = torch._standard_gamma(torch.full((2,), float(alpha)), generator=generator)
    share = float(gamma[0] / gamma.sum())
    other_images, other_targets = images.flip(0), targets.flip(0)
    if use_cutmix:
        side = images.shape[-1]
        cut = round(side * (1 - share) ** 0.5)
        top, left = (int(v) for v in torch.randint(0, side - cut + 1, (2,), generator=generator))
        mask = torch.zeros(side, side, device=images.device)
        mask[top : top + cut, left : left + cut] = 1
        images, share = images * (1 - mask) + other_images * mask, 1 - cut * cut / side**2
    else:
        images = share * images + (1 - share) * other_images
    return images, share * targets + (1 - share) * other_targets


def _fit(vit: ViT, run: Run, stream: TrainStream, config: dict[str, Any], compiled: bool, num_workers: int) -> float:
    model, device = vit.model.train(), vit.device
    decayed = [p for p in model.parameters() if p.ndim > 1]
    rest = [p for p in model.parameters() if p.ndim <= 1]
    groups = [{"params": decayed, "weight_decay": config["weight_decay"]}, {"params": rest, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=config["lr"], betas=(0.9, 0.98), fused=device.type == "cuda")
    names = {id(p): n for n, p in model.named_parameters()}
    start, seconds, num_steps = 0, 0.0, None
    tensors, state = run.load_checkpoint() or ({}, {"num_logged": 0})
    run.cut_metrics(state["num_logged"])
    if tensors:
        start, seconds, num_steps = state["step"] + 1, state["seconds"], state["num_steps"]
        _restore(model, optimizer, names, tensors)
    dropped = StochasticDepth(vit.blocks, config["drop"], config["batch_size"], config["rescale"], config["seed"])
    model.to(device)
    if compiled:
        for block in vit.blocks:
            block.compile()
    step_once = _stepper(model, optimizer, stream, dropped, config, device)
    num_steps = num_steps or _count_steps(config, stream, model, optimizer, step_once)
    bar = Progress("train teacher", num_steps, "steps", config["batch_size"], "images")
    bar.start_at(start)
    save_every = max(1, num_steps // NUM_CHECKPOINTS)
    losses, began = [], time.monotonic()
    with StopSignal() as stop:
        for step in range(start, num_steps):
            losses.append(step_once(step, num_steps))
            stopped = stop.given
            save = stopped or (step + 1) % save_every == 0 or step == num_steps - 1
            if save or (step + 1) % LOG_EVERY == 0:
                loss = float(torch.stack(losses).mean())  # the only sync of the loop
                if not math.isfinite(loss):
                    raise RunError(
                        f"the loss is not finite near step {step}; the last good checkpoint is {run.latest()}"
                    )
                now = time.monotonic()
                seconds, began, losses = seconds + now - began, now, []
                run.log(step=step, num_steps=num_steps, loss=round(loss, 5), seconds=round(seconds, 2))
                bar.note = f"loss {loss:.3f}"
                if save:
                    state = {"step": step, "seconds": seconds, "num_steps": num_steps, "num_logged": run.num_logged()}
                    run.save_checkpoint(step, _checkpoint_tensors(model, optimizer, names), state)
                if stopped:
                    raise Interrupted(f"stopped after step {step}; the same command goes on from there")
            bar.advance()
    bar.finish()
    dropped.remove()
    model.eval()
    return seconds


def _stepper(
    model: nn.Module, optimizer: Any, stream: TrainStream, dropped: StochasticDepth, config: dict[str, Any],
    device: torch.device,
) -> Any:  # fmt: skip
    num_classes = len(stream.data.classes or ())

    def step_once(step: int, num_steps: int) -> Tensor:
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, num_steps, config["lr"], 0.0, config["warmup"])
        images, labels = stream.batch(step, stage="teacher"), stream.labels(step, stage="teacher")
        seed = stable_seed(config["seed"], "mix", step)
        images, targets = mixed_batch(
            images, labels, num_classes, config["mixup"], config["cutmix"], config["smoothing"], seed
        )
        dropped.draw(step)
        with autocast(config["precision"], device):
            loss = F.cross_entropy(model(images), targets)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss.detach().float()

    return step_once


def _count_steps(config: dict[str, Any], stream: TrainStream, model: nn.Module, optimizer: Any, step_once: Any) -> int:
    """Steps of the run; a budget of seconds is turned into steps by timing a few, which are then undone."""
    budget = Budget.parse(config["budget"])
    if budget.unit != "s":
        return max(1, round(budget.amount * (stream.steps_per_epoch if budget.unit == "epochs" else 1)))
    saved = {k: v.clone() for k, v in model.state_dict().items()}
    times = []
    for i in range(12):
        began = time.monotonic()
        float(step_once(i, 10_000))
        times.append(time.monotonic() - began)
    model.load_state_dict(saved)
    optimizer.state.clear()
    return max(1, round(budget.amount / sorted(times[4:])[4]))


def _checkpoint_tensors(model: nn.Module, optimizer: Any, names: dict[int, str]) -> dict[str, Tensor]:
    tensors = {f"model.{k.replace('.block.', '.', 1)}": v for k, v in model.state_dict().items()}
    for p, state in optimizer.state.items():
        tensors |= {f"optimizer.{key}.{names[id(p)]}": value for key, value in state.items()}
    return tensors


def _restore(model: nn.Module, optimizer: Any, names: dict[int, str], tensors: dict[str, Tensor]) -> None:
    model.load_state_dict({k.removeprefix("model."): v for k, v in tensors.items() if k.startswith("model.")})
    fused = optimizer.defaults["fused"]
    for group in optimizer.param_groups:
        for p in group["params"]:
            for key in ("step", "exp_avg", "exp_avg_sq"):
                value = tensors[f"optimizer.{key}.{names[id(p)]}"]
                optimizer.state[p][key] = value.to(p.device) if key != "step" or fused else value
