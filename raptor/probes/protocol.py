"""The protocol of a linear probe: a head per learning rate in one backbone pass, chosen on a split of train."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from raptor.certificate.linear_head import LinearHead
from raptor.data import DenseData, ImageData, open_data, open_dense
from raptor.data.apart import check_apart
from raptor.data.split import Split
from raptor.devices import ONE_PROCESS, Ranks
from raptor.probes.classify import CLOSED_FORMS, Classify, fit_closed_form, read_head
from raptor.probes.depth import Depth
from raptor.probes.features import check_layer
from raptor.probes.grid import Task, grid_around, step_seconds, steps_that_fit, train_heads
from raptor.probes.result import HeadTensors, ProbeResult, ProbeSettings
from raptor.probes.segment import Segment
from raptor.subject import Subject
from raptor.vit.view import ViT

_AnyData = ImageData | DenseData
_Size = int | tuple[int, int] | None

_STARTS = ("own", "random")


class _Defaults(NamedTuple):
    lr: float
    weight_decay: float
    epochs: int
    batch_size: int


DEFAULTS = {
    "classify": _Defaults(lr=1e-3, weight_decay=1e-2, epochs=15, batch_size=512),
    "segment": _Defaults(lr=1e-3, weight_decay=1e-2, epochs=10, batch_size=32),
    "depth": _Defaults(lr=1e-4, weight_decay=1e-2, epochs=25, batch_size=128),
}


def probe(
    vit: ViT,
    task: str,
    train_data: _AnyData | str,
    val_data: _AnyData | str | None = None,
    *,
    lrs: Sequence[float] | None = None,
    epochs: int | None = None,
    batch_size: int | None = None,
    weight_decay: float | None = None,
    seeds: Sequence[int] = (0,),
    layer: int | None = None,
    device: str | torch.device | None = None,
    precision: str | None = None,
    size: _Size = None,
    closed_form: str | None = None,
    init_head: str | Path | LinearHead = "own",
    num_workers: int | None = None,
    max_seconds: float | None = None,
    max_steps: int | None = None,
    progress: Callable[[int, int], None] | None = None,
    ranks: Ranks = ONE_PROCESS,
) -> ProbeResult:
    """Train linear heads on a frozen teacher or surrogate and score them.

    Learning rate and epoch are chosen on a tenth of the training images (by a hash of the name); `val_data` is used
    only once, for the chosen head and the best head of the last epoch.

    Args:
        task: `classify` (on cls and mean patch), `segment` (on patches) or `depth` (on patches with cls).
        train_data, val_data: opened data, or names for `open_data` (classify) or `open_dense`; without `val_data` a
            name's own validation split.
        lrs: learning rates, all trained in one backbone pass; by default twelve around the task's own. Penalties when
            `closed_form` is given.
        epochs, batch_size, weight_decay: by default the task's own (`DEFAULTS`).
        seeds: of head, order and augmentations; scores are averaged over them.
        layer: the state to probe, 0..L, through the model's final norm; by default the last.
        precision: `fp32` or `bf16`; by default bf16 on CUDA.
        size: image side (the shorter one of frames), or (height, width) of frames; by default the model's own for
            classification and the data's frame otherwise. Frames are padded to whole patches.
        closed_form: `ridge` or `logistic` on cached features, for a quick look at classification.
        init_head: where the classifier starts: `own`, the model's own linear head where it has one with as many classes
            (for the last layer), else at random; `random`; or a published linear head, whose outputs are matched with
            the data's classes by name where its file holds names. A head that is not random takes part in the choice as
            epoch 0.
        max_seconds: of training for each seed: a few steps are timed, and as many are trained as will fit.
        max_steps: train no more than this for each seed, as with another probe's `num_steps`, to compare with it.
        progress: called with (steps done, steps in total).
        ranks: the processes that share each batch; all of them call this and get the same heads and scores.
    """
    own = _check(task, closed_form, init_head)
    if epochs is None:
        epochs = own.epochs
    if batch_size is None:
        batch_size = own.batch_size
    if weight_decay is None:
        weight_decay = own.weight_decay
    # Ties go to the first: the smaller learning rate, the larger penalty.
    if closed_form is not None:
        # The logistic path also starts each fit from the stronger penalty before.
        grid = sorted(lrs or CLOSED_FORMS[closed_form], reverse=True)
    else:
        grid = sorted(lrs or grid_around(own.lr))
    if len(set(seeds)) < len(seeds):
        raise ValueError(f"--seeds {' '.join(map(str, seeds))} repeats one, which says nothing more: give each once")
    if min(grid) <= 0 or epochs < 1 or not seeds:
        raise ValueError("a probe needs learning rates above 0, at least one epoch and at least one seed")
    if device is not None:
        vit = vit.to(device)
    # On a CPU bf16 does not pay.
    if precision is None:
        precision = "bf16" if vit.device.type == "cuda" else "fp32"
    train, val = _open_both(train_data, val_data, task)
    began = time.monotonic()
    layer = check_layer(vit, layer)
    made: Classify | Segment | Depth
    if task == "classify":
        assert isinstance(train, ImageData) and isinstance(val, ImageData)
        # Centre crops are square.
        if isinstance(size, tuple):
            raise ValueError("classification takes square images: give one size")
        made = Classify(
            vit,
            layer,
            train,
            val,
            batch_size=batch_size,
            precision=precision,
            size=size,
            num_workers=num_workers,
            ranks=ranks,
        )
    else:
        assert isinstance(train, DenseData) and isinstance(val, DenseData)
        dense_task = Segment if task == "segment" else Depth
        made = dense_task(vit, layer, train, val, batch_size=batch_size, precision=precision, size=size, ranks=ranks)
    init = None
    if closed_form is not None:
        assert isinstance(made, Classify)
        runs = [fit_closed_form(made, closed_form, grid)]
    else:
        init = _start(init_head, made)
        if max_steps is None and max_seconds is not None:
            max_steps = steps_that_fit(step_seconds(made, grid), max_seconds)
        runs = []
        for i, seed in enumerate(seeds):

            def tell(done: int, total: int, num_before: int = i) -> None:
                # One bar for all seeds.
                if progress is not None:
                    progress(num_before * total + done, len(seeds) * total)

            run = train_heads(
                made,
                grid,
                epochs=epochs,
                weight_decay=weight_decay,
                seed=seed,
                init=init,
                max_steps=max_steps,
                progress=tell,
            )
            runs.append(run)
    start = str(init_head)
    if init is None:
        start = "random"  # also where the model has no head of its own
    elif isinstance(init_head, LinearHead):
        start = "given"
    for run in runs:
        # A head that is not finite gives every image class 0: a score that looks like one.
        if not all(bool(tensor.isfinite().all()) for tensor in run.chosen.head or ()):
            raise ValueError(
                f"a head of the {task} probe of {vit.name} is not finite: check its weights, use --precision fp32, or "
                "give smaller --lrs"
            )
    settings = ProbeSettings(
        epochs=None if closed_form else epochs,
        batch_size=made.batch_size,
        weight_decay=None if closed_form else weight_decay,
        precision=precision,
        train_data=train.name,
        val_data=val.name,
        init_head=start,
        max_seconds=max_seconds,
    )
    classes = made.fit_data.classes if isinstance(made, Classify) else None
    return ProbeResult(
        task=task,
        model=vit.name,
        layer=layer,
        metric=made.metric,
        higher_is_better=made.higher_is_better,
        size=made.size,
        grid=grid,
        closed_form=closed_form,
        num_images={"fit": made.num_fit, "split": len(train) - made.num_fit, "reported": len(val)},
        settings=settings,
        seeds=runs,
        seconds=time.monotonic() - began,
        chance=1 / len(classes) if classes else None,
        floors=dict(made.floors()),
        subject=Subject.of(vit, val),
        classes=classes,
    )


def _check(task: str, closed_form: str | None, init_head: object) -> _Defaults:
    if task not in DEFAULTS:
        raise ValueError(f"unknown task {task!r}; use {', '.join(DEFAULTS)}")
    given = not isinstance(init_head, str) or init_head not in _STARTS
    if task != "classify" and (closed_form is not None or given):
        raise ValueError(f"closed_form and init_head are for the task classify, not {task}")
    if closed_form is not None and closed_form not in CLOSED_FORMS:
        raise ValueError(f"unknown closed form {closed_form!r}; use {' or '.join(CLOSED_FORMS)}")
    if closed_form is not None and given:
        raise ValueError("a closed form has no starting point; leave out init_head or closed_form")
    return DEFAULTS[task]


def _open_both(train: _AnyData | str, val: _AnyData | str | None, task: str) -> tuple[_AnyData, _AnyData]:
    is_named = isinstance(train, str) or isinstance(val, str)
    if val is None:
        if not isinstance(train, str):
            raise ValueError("give val_data: opened training data does not say where its validation split is")
        val = train
    opened = (_open(train, "train", task), _open(val, "val", task))
    if is_named:  # a command that opens both has checked them already
        check_apart(*opened)
    return opened


def _open(data: _AnyData | str, split: Split, task: str) -> _AnyData:
    if task == "classify":
        if isinstance(data, str):
            return open_data(data, split)
        if not isinstance(data, ImageData):
            raise ValueError(f"{data.name} was not opened for {task}; use open_data")
        return data
    if isinstance(data, str):
        return open_dense(data, split, task)
    if not isinstance(data, DenseData) or data.task != task:
        raise ValueError(f"{data.name} was not opened for {task}; use open_dense")
    return data


def _start(init_head: str | Path | LinearHead, made: Task) -> HeadTensors | None:
    """The head a probe starts from; None for a random one."""
    if init_head == "random" or not isinstance(made, Classify):
        return None
    if init_head != "own":
        return read_head(init_head, made.fit_data.classes or [], made.num_features)
    head = made.own_head()
    if head is None:
        return None
    return head.weight, head.bias
