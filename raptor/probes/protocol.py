"""The protocol of a linear probe: a head per learning rate in one backbone pass, chosen on a split of train."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from raptor.certificate.linear_head import LinearHead
from raptor.certificate.ridge import ALPHAS
from raptor.data import DenseData, ImageData, open_data, open_dense
from raptor.data.apart import check_apart
from raptor.devices import ONE_PROCESS, Ranks
from raptor.probes.classify import Classify, fit_ridge_heads, read_head
from raptor.probes.depth import Depth
from raptor.probes.grid import grid_around, step_seconds, train_heads
from raptor.probes.result import HeadTensors, ProbeResult, ProbeSettings
from raptor.probes.segment import Segment
from raptor.subject import Subject
from raptor.vit.view import ViT

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
    train_data: ImageData | str,
    val_data: ImageData | str | None = None,
    *,
    lrs: Sequence[float] | None = None,
    epochs: float | None = None,
    batch_size: int | None = None,
    weight_decay: float | None = None,
    seeds: Sequence[int] = (0,),
    layer: int | None = None,
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
        epochs, batch_size, weight_decay: by default the task's own (`DEFAULTS`). Half an epoch is half of its
            steps.
        seeds: of head, order and augmentations; scores are averaged over them.
        layer: the state to probe, 0..L, through the model's final norm; by default the last.
        precision: `fp32` or `bf16`; by default bf16 on CUDA.
        size: image side (the shorter one of frames), or (height, width) of frames; by default the model's own for
            classification and the data's frame otherwise. Frames are padded to whole patches.
        closed_form: `ridge` on cached features, for a quick look at classification.
        init_head: where the classifier starts: `own`, the model's own linear head where it has one with as many classes
            (for the last layer), else at random; `random`; or a published linear head, whose outputs are matched with
            the data's classes by name where its file holds names. A head that is not random takes part in the choice as
            epoch 0.
        max_seconds: of training for each seed: a few steps are timed, and as many are trained as will fit.
        max_steps: train no more than this for each seed, as with another probe's `num_steps`, to compare with it.
        progress: called with (steps done, steps in total).
        ranks: the processes that share each batch; all of them call this and get the same heads and scores.
    """
    own = DEFAULTS.get(task)
    if own is None:
        raise ValueError(f"unknown task {task!r}; use {', '.join(DEFAULTS)}")
    is_given = not isinstance(init_head, str) or init_head not in _STARTS
    if task != "classify" and (closed_form is not None or is_given):
        raise ValueError(f"closed_form and init_head are for the task classify, not {task}")
    if closed_form not in (None, "ridge"):
        raise ValueError(f"unknown closed form {closed_form!r}; use ridge")
    if closed_form is not None and is_given:
        raise ValueError("a closed form has no starting point; leave out init_head or closed_form")
    if epochs is None:
        epochs = own.epochs
    elif epochs == round(epochs):
        epochs = round(epochs)  # results have whole epochs as whole numbers
    if weight_decay is None:
        weight_decay = own.weight_decay
    # Ties go to the first: the smaller learning rate, the larger penalty.
    grid = sorted(lrs or grid_around(own.lr))
    if closed_form is not None:
        grid = sorted(lrs or ALPHAS, reverse=True)
    if len(set(seeds)) < len(seeds):
        raise ValueError(f"--seed {' '.join(map(str, seeds))} repeats one, which says nothing more: give each once")
    if min(grid) <= 0 or epochs <= 0 or not seeds:
        raise ValueError("a probe needs learning rates and epochs above 0, and at least one seed")
    # On a CPU bf16 does not pay.
    if precision is None:
        precision = "bf16" if vit.device.type == "cuda" else "fp32"
    train, val = _open_both(train_data, val_data, task)
    began = time.monotonic()
    if layer is None:
        layer = vit.num_layers
    if not 0 <= layer <= vit.num_layers:
        raise ValueError(f"layer {layer} is not a state of {vit.name}: states are numbered 0..{vit.num_layers}")
    shared: dict[str, Any] = {"batch_size": batch_size or own.batch_size, "precision": precision, "ranks": ranks}
    made = _task(task, vit, layer, train, val, size, num_workers, shared)
    settings = ProbeSettings(
        epochs=epochs,
        batch_size=made.batch_size,
        weight_decay=weight_decay,
        precision=precision,
        train_data=train.name,
        val_data=val.name,
        init_head="random",  # also where the model has no head of its own
        max_seconds=max_seconds,
    )
    if closed_form is not None:
        assert isinstance(made, Classify)
        settings.epochs = None
        settings.weight_decay = None
        runs = [fit_ridge_heads(made, grid)]
    else:
        init = _first_head(made, init_head)
        if init is not None:
            settings.init_head = "given" if isinstance(init_head, LinearHead) else str(init_head)
        if max_steps is None and max_seconds is not None:
            max_steps = max(1, int(max_seconds / max(step_seconds(made, grid), 1e-9)))
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
    for run in runs:
        # A head that is not finite gives every image class 0: a score that looks like one.
        if not all(bool(tensor.isfinite().all()) for tensor in run.chosen.head or ()):
            raise ValueError(
                f"a head of the {task} probe of {vit.name} is not finite: check its weights, use --precision fp32, or "
                "give a smaller --lr"
            )
    found = ProbeResult(
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
        floors=dict(made.floors()),
        subject=Subject.of(vit, val),
    )
    if isinstance(made, Classify):
        found.classes = made.fit_data.classes
        found.chance = 1 / made.num_outputs
    return found


def _open_both(train_data: ImageData | str, val_data: ImageData | str | None, task: str) -> tuple[ImageData, ImageData]:
    """Training and held-out data of the task, opened by their names where they are names."""
    if val_data is None:
        if not isinstance(train_data, str):
            raise ValueError("give val_data: opened training data does not say where its validation split is")
        val_data = train_data
    opened = []
    for data, split in ((train_data, "train"), (val_data, "val")):
        if isinstance(data, str):
            data = open_data(data, split) if task == "classify" else open_dense(data, split, task)
        # The images of dense data, opened without their targets, are images as any others.
        of_task = data.task if isinstance(data, DenseData) and data.has_targets else "classify"
        if of_task != task:
            opener = "open_data" if task == "classify" else "open_dense"
            raise ValueError(f"{data.name} was not opened for {task}; use {opener}")
        opened.append(data)
    train, val = opened
    if isinstance(train_data, str) or isinstance(val_data, str):  # a command that opens both has checked them already
        check_apart(train, val)
    return train, val


def _task(
    task: str,
    vit: ViT,
    layer: int,
    train: ImageData,
    val: ImageData,
    size: _Size,
    num_workers: int | None,
    shared: dict[str, Any],
) -> Classify | Segment | Depth:
    if task == "classify":
        # Centre crops are square.
        if isinstance(size, tuple):
            raise ValueError("classification takes square images: give one size")
        return Classify(vit, layer, train, val, size=size, num_workers=num_workers, **shared)
    assert isinstance(train, DenseData) and isinstance(val, DenseData)
    dense_task = Segment if task == "segment" else Depth
    return dense_task(vit, layer, train, val, size=size, **shared)


def _first_head(task: Classify | Segment | Depth, init_head: str | Path | LinearHead) -> HeadTensors | None:
    """The head that training begins with; None for a random one."""
    if not isinstance(task, Classify) or init_head == "random":
        return None
    if init_head == "own":
        return task.own_head()
    return read_head(init_head, task.fit_data.classes or [], task.num_features)
