"""One backbone pass, a grid of heads: a linear head per learning rate, trained side by side and chosen on a split."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from raptor.data.stream import stable_seed
from raptor.devices import ONE_PROCESS, Ranks
from raptor.probes.result import HeadTensors, Pick, SeedRun, rank
from raptor.train.loop import learning_rate
from raptor.train.stage import time_steps

_BETAS = (0.9, 0.999)
_EPS = 1e-8
_MAX_NORM = 1.0
_NUM_WARMUP = 100
_FINAL_SHARE = 0.01
_INIT_STD = 0.01
_NUM_TIMED = 3  # steps that are timed, after one that is not


class Task(Protocol):
    """What the training of heads needs of a task."""

    metric: str
    higher_is_better: bool
    num_outputs: int
    num_features: int
    steps_per_epoch: int
    device: torch.device
    ranks: Ranks

    def start(self, seed: int) -> None:
        """Take order and augmentations of the training images from `seed` from here on."""

    def backward(self, weight_gcf: Tensor, bias_gc: Tensor, step: int) -> None:
        """Add the gradient of the sum over heads of each head's loss on batch `step`: the part of this rank's rows."""

    def scores(self, weight_gcf: Tensor, bias_gc: Tensor, part: str) -> list[dict[str, float]]:
        """Scores of each head on `split` (the part of train it is chosen on) or `reported`; the same on every rank."""


class HeadGrid:
    """G linear heads as one parameter, AdamW with a learning rate and a gradient clip for each.

    The same update as `torch.optim.AdamW` after `clip_grad_norm_`, head by head, without a loop over heads.
    """

    def __init__(self, init: HeadTensors, lrs: Sequence[float], weight_decay: float) -> None:
        # One tensor of all heads: a step costs as many kernel launches as that of one head.
        weight_cf, bias_c = init
        self.weight = weight_cf.expand(len(lrs), *weight_cf.shape).clone().requires_grad_()
        self.bias = bias_c.expand(len(lrs), *bias_c.shape).clone().requires_grad_()
        self.lr_g = torch.tensor(lrs, dtype=torch.float32, device=weight_cf.device)
        self.weight_decay = weight_decay
        self.moments = [(torch.zeros_like(p), torch.zeros_like(p)) for p in (self.weight, self.bias)]
        self.num_steps = 0

    @torch.no_grad()
    def step(self, factor: float, ranks: Ranks = ONE_PROCESS) -> None:
        """One update at `factor` times each head's learning rate, by the gradients of all ranks, which are cleared."""
        self.num_steps += 1
        params = (self.weight, self.bias)
        grads = []
        for p in params:
            # A rank without rows in this batch has none.
            grads.append(ranks.add_(torch.zeros_like(p) if p.grad is None else p.grad))
        # Each head is clipped by its own norm, as if it were trained alone.
        norm_g = sum(g.flatten(1).square().sum(dim=1) for g in grads)
        # The 1e-6 is that of `clip_grad_norm_`, to which a test compares.
        clip_g = (_MAX_NORM / (torch.as_tensor(norm_g).sqrt() + 1e-6)).clamp(max=1.0)
        debias = [1 - beta**self.num_steps for beta in _BETAS]
        for p, grad, (mean, square) in zip(params, grads, self.moments):
            shape = (-1,) + (1,) * (p.dim() - 1)
            grad = grad * clip_g.view(shape)
            lr = (self.lr_g * factor).view(shape)
            p.mul_(1 - lr * self.weight_decay)
            mean.lerp_(grad, 1 - _BETAS[0])
            square.mul_(_BETAS[1]).addcmul_(grad, grad, value=1 - _BETAS[1])
            p.sub_(lr / debias[0] * mean / ((square / debias[1]).sqrt_() + _EPS))
            p.grad = None


def lr_factor(step: int, num_steps: int) -> float:
    """Share of the peak learning rate at `step`: warm-up of 100 steps (10 % of short runs), then a cosine to 1 %."""
    num_warmup = min(_NUM_WARMUP, max(1, num_steps // 10))
    return learning_rate(step, num_steps, 1.0, _FINAL_SHARE, num_warmup / num_steps)


def grid_around(lr: float) -> list[float]:
    """Twelve learning rates a third of a decade apart, from a tenth of `lr` (meant for long runs) to 464 times it."""
    return [lr * 10 ** (-1 + i / 3) for i in range(12)]


def random_head(task: Task, seed: int) -> HeadTensors:
    """Small normal weights and zero biases, the same on every device."""
    # Drawn on the CPU, because generators of devices differ.
    generator = torch.Generator().manual_seed(stable_seed(seed, "probe", "head"))
    weight = torch.randn(task.num_outputs, task.num_features, generator=generator) * _INIT_STD
    return weight.to(task.device), torch.zeros(task.num_outputs, device=task.device)


def train_heads(
    task: Task,
    lrs: Sequence[float],
    *,
    epochs: float,
    weight_decay: float,
    seed: int = 0,
    init: HeadTensors | None = None,
    max_steps: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> SeedRun:
    """Train a head per learning rate and choose (learning rate, epoch) on the split of train.

    A given `init` takes part as epoch 0. With `max_steps` fewer than the epochs have, the whole schedule runs in those.
    """
    task.start(seed)
    weight, bias = init or random_head(task, seed)
    heads = HeadGrid((weight.to(task.device), bias.to(task.device)), lrs, weight_decay)
    # A cut run has the whole cosine in fewer steps; a schedule that stops half-way would end at a high learning rate.
    planned_steps = max(1, round(epochs * task.steps_per_epoch))
    num_steps = planned_steps
    if max_steps is not None:
        num_steps = min(planned_steps, max_steps)
    choice = Choice(task, lrs)
    if init is not None:
        choice.see(heads.weight.detach(), heads.bias.detach(), 0)
    for step in range(num_steps):
        task.backward(heads.weight, heads.bias, step)
        heads.step(lr_factor(step, num_steps), task.ranks)
        if step + 1 == num_steps or (step + 1) % task.steps_per_epoch == 0:
            # A run that is cut ends within an epoch, which counts as a whole one.
            epoch = -(-(step + 1) // task.steps_per_epoch)
            choice.see(heads.weight.detach(), heads.bias.detach(), epoch)
        if progress is not None:
            progress(step + 1, num_steps)
    return choice.finish(seed, num_steps, planned_steps)


def step_seconds(task: Task, lrs: Sequence[float]) -> float:
    """Seconds per step, from a few steps that are timed and thrown away."""
    task.start(0)
    heads = HeadGrid(random_head(task, 0), lrs, 0.0)

    def run(step: int) -> None:
        task.backward(heads.weight, heads.bias, step)
        heads.step(1.0, task.ranks)
        heads.bias.sum().item()  # waits for the device

    seconds, _ = time_steps(run, 1, _NUM_TIMED, time.monotonic, task.ranks)
    # All ranks train as many steps as the first one counts.
    return task.ranks.first(lambda: seconds)


class Choice:
    """Keeps the head that is best on the split so far, and the best one of the last epoch."""

    def __init__(self, task: Task, values: Sequence[float]) -> None:
        self.task = task
        self.values = values
        self.epochs: list[int] = []
        self.rows: list[list[float | None]] = []
        self.best: Pick | None = None
        self.last: Pick | None = None

    def see(self, weight_gcf: Tensor, bias_gc: Tensor, epoch: int) -> None:
        """Score the heads as they are after `epoch`."""
        scores = self.task.scores(weight_gcf, bias_gc, "split")
        row: list[float | None] = [score[self.task.metric] for score in scores]
        self.epochs.append(epoch)
        self.rows.append(row)
        g = max(range(len(row)), key=lambda i: rank(row[i], self.task.higher_is_better))
        self.last = Pick(self.values[g], epoch, row[g], head=(weight_gcf[g].clone(), bias_gc[g].clone()))
        # Strictly better: of equal heads the earlier epoch stays.
        up = self.task.higher_is_better
        if self.best is None or rank(row[g], up) > rank(self.best.split_score, up):
            self.best = self.last

    def finish(self, seed: int, num_steps: int | None = None, planned_steps: int | None = None) -> SeedRun:
        """Score the two picks on the reported set, which is used only here."""
        assert self.best is not None and self.last is not None
        picks = [self.best, self.last]
        heads = [pick.head for pick in picks if pick.head is not None]
        weight_gcf = torch.stack([weight for weight, _ in heads])
        bias_gc = torch.stack([bias for _, bias in heads])
        for pick, reported in zip(picks, self.task.scores(weight_gcf, bias_gc, "reported")):
            pick.reported = {**reported}
        return SeedRun(seed, self.epochs, self.rows, self.best, self.last, num_steps, planned_steps)
