"""The training loop: the state a checkpoint holds, and one plain loop over steps."""

from __future__ import annotations

import time
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from raptor.devices import device_name
from raptor.phases import Phases
from raptor.progress import Progress
from raptor.provenance import provenance
from raptor.run import Interrupted, Run, RunError, StopSignal
from raptor.train.job import Job
from raptor.train.resume import checkpoint_tensors, load_blocks, restore_optimizer
from raptor.train.schedule import Budget, learning_rate, teacher_forcing
from raptor.train.stage import Stage
from raptor.train.step import DistillStep, Parts, state_variance
from raptor.train.timing import mean_seconds
from raptor.train.track import Tracker, open_tracker
from raptor.vit.view import ViT, replaced_blocks

LOG_EVERY = 20
NUM_CHECKPOINTS = 8
NUM_VALIDATIONS = 4


class Trainer:
    """One run's training: the state that a checkpoint holds, and the plain loop over steps."""

    def __init__(self, job: Job, run: Run, student: ViT, phases: Phases):
        self.job, self.run, self.student, self.phases = job, run, student, phases
        self.fabric, self.recipe = job.fabric, job.recipe
        self.stream = job.stream()
        self.validator = job.validator(run.folder)
        self.stop = StopSignal()
        self.started = time.monotonic()
        self.tracker: Tracker | None = open_tracker(job.track, run.folder) if self.fabric.is_global_zero else None
        self.state: dict[str, Any] = {"stage": None, "num_steps": {}, "seconds": 0.0, "validations": []}

    def fit(self) -> dict[str, Any]:
        """Train every stage that is not done yet; gives the summary (on rank 0)."""
        tensors, self.state = self.run.load_checkpoint() or ({}, self.state)
        self.run.cut_metrics(self.state.get("num_logged", 0))
        if tensors:
            load_blocks(self.student, tensors)
        variance_lt = tensors["variance"] if tensors else self._measure_variance()
        module = DistillStep(
            self.job.teacher, self.student, self.phases, variance_lt, self.recipe.last_phase_weights,
            self.recipe.stage2_weights, self.recipe.cosine, self.job.compile_blocks, self.job.checkpointing,
            self.job.phase, half_teacher=self.job.precision == "bf16" and self.fabric.device.type == "cuda",
        )  # fmt: skip
        plan = self.job.stages()
        reached = self.state["stage"]
        with self.stop:
            for name, share in plan.items():
                if reached is None or list(plan).index(name) >= list(plan).index(reached):
                    self._fit_stage(name, share, module, tensors if reached == name else {})
        return self._summary()

    def _fit_stage(self, name: str, share: float, module: DistillStep, tensors: dict[str, Tensor]) -> None:
        stage = self._set_up(name, share, module, tensors)
        start, num_steps = self.state["step"] + 1 if tensors else 0, stage.num_steps
        save_every = max(1, num_steps // NUM_CHECKPOINTS)
        validate_at = {round(num_steps * (i + 1) / NUM_VALIDATIONS) - 1 for i in range(NUM_VALIDATIONS)}
        bar = self._bar(name, start, num_steps)
        losses: list[Tensor] = []
        since = time.monotonic()
        for step in range(start, num_steps):
            losses.append(self._train_step(stage, step, num_steps))
            stop = self._stop_asked(step)
            save = stop or (step + 1) % save_every == 0 or step == num_steps - 1
            if save or (step + 1) % LOG_EVERY == 0 or step in validate_at:
                loss_nl = self.fabric.all_reduce(torch.stack(losses), reduce_op="mean").cpu()  # the loop's only sync
                self._check_finite(loss_nl, name, step)
                self._log(stage, step, loss_nl, time.monotonic() - since)
                bar.note = f"loss {loss_nl[-1].mean():.4f}"
                losses = []
                if step in validate_at:
                    self._validate(name, step, bar)
                if save:
                    self._save(stage, step)
                if stop:
                    raise Interrupted(f"stopped after step {step} of {name}; the same command goes on from there")
                since = time.monotonic()
            bar.advance()
        bar.finish()

    def _set_up(self, name: str, share: float, module: DistillStep, tensors: dict[str, Tensor]) -> Stage:
        """A stage ready to train: its optimizer (continued from `tensors` if there are any) and its length."""
        named = module.trained_parameters()
        optimizer = torch.optim.AdamW(
            [p for _, p in named],
            lr=self.recipe.lr,
            weight_decay=self.recipe.weight_decay,
            fused=self.fabric.device.type == "cuda",
        )
        if tensors:
            restore_optimizer(optimizer, named, tensors)
        wrapped, optimizer = self.fabric.setup(module, optimizer)
        stage = Stage(name, module, wrapped, optimizer, self.job.precision, self.job.graphed())
        if name not in self.state["num_steps"]:
            self.state["num_steps"][name] = self._count_steps(stage, share)
        stage.num_steps = self.state["num_steps"][name]
        self.state["stage"] = name
        return stage

    def _train_step(self, stage: Stage, step: int, num_steps: int) -> Tensor:
        """One optimizer step; gives the loss of every trained layer, on the device."""
        recipe = self.recipe
        for group in stage.optimizer.param_groups:
            group["lr"] = learning_rate(step, num_steps, recipe.lr, recipe.min_lr, recipe.warmup)
        images = self.stream.batch(step, stage=stage.name)
        layer_losses = stage.backward(images, self._lam(stage, step, num_steps), self.fabric.backward)
        for parameters in stage.module.clip_groups(stage.name):
            torch.nn.utils.clip_grad_norm_(parameters, recipe.clip)
        stage.optimizer.step()
        return layer_losses.detach()

    def _lam(self, stage: Stage, step: int, num_steps: int) -> float:
        """The share of teacher forcing at a step."""
        if stage.name != "stage1":
            return 0.0
        return teacher_forcing(step, num_steps, self.recipe.lam, self.recipe.lam_until)

    def _count_steps(self, stage: Stage, share: float) -> int:
        """Steps of this stage. A budget of seconds is turned into steps by timing a few, which are then undone."""
        budget = Budget.parse(self.recipe.budget)
        if budget.unit != "s":
            per_epoch = (self.recipe.epoch_images or len(self.stream.data)) / self.recipe.batch_size
            total = budget.amount * (per_epoch if budget.unit == "epochs" else 1)
            return max(1, round(total * share))
        saved = [(p, p.detach().clone()) for _, p in stage.named()]
        mean = mean_seconds(
            lambda step, num: self._train_step(stage, step, num),
            lambda step, num: Parts.of(self._lam(stage, step, num)),
            self.fabric.device,
        )
        seconds = torch.tensor(mean, device=self.fabric.device)
        with torch.no_grad():
            for parameter, value in saved:
                parameter.copy_(value)
        stage.moments().clear()
        return max(1, round(budget.amount * share / float(self.fabric.all_reduce(seconds, reduce_op="mean"))))

    def _stop_asked(self, step: int) -> bool:
        """Whether Ctrl-C or SIGTERM came; several ranks agree on it, now and then."""
        if self.fabric.world_size == 1:
            return self.stop.given
        if (step + 1) % LOG_EVERY:
            return False
        flag = torch.tensor(float(self.stop.given), device=self.fabric.device)
        return bool(self.fabric.all_reduce(flag, reduce_op="sum") > 0)

    def _measure_variance(self) -> Tensor:
        def add_ranks(value: Tensor) -> Tensor:
            return self.fabric.all_reduce(value, reduce_op="sum")

        return state_variance(self.job.teacher, self.stream, self.recipe.normalise, self.job.precision, add_ranks)

    def _check_finite(self, loss_nl: Tensor, name: str, step: int) -> None:
        bad = (~torch.isfinite(loss_nl)).nonzero()
        if len(bad):
            row, column = bad[0].tolist()
            layer = self._layers()[column]
            self._fail(f"the loss is not finite at step {step - len(loss_nl) + 1 + row} of {name}, layer {layer}")

    def _fail(self, what: str) -> None:
        where = self.run.latest()
        kept = f"the last good checkpoint is {where}" if where else "no checkpoint was written yet"
        raise RunError(f"{what}: {kept}; try a smaller --lr")

    def _layers(self) -> range:
        """The layers that are trained: all, or those of the one phase."""
        first, last = (1, self.phases.num_layers) if self.job.phase is None else self.phases.spans[self.job.phase - 1]
        return range(first, last + 1)

    def _log(self, stage: Stage, step: int, loss_nl: Tensor, seconds: float) -> None:
        recipe, num_steps = self.recipe, stage.num_steps
        self.state["seconds"] += seconds
        values = {
            "stage": stage.name, "step": step, "num_steps": num_steps, "loss": float(loss_nl.mean()),
            "layer_loss": [float(f"{v:.7g}") for v in loss_nl.mean(0).tolist()],
            "images_per_s": round(len(loss_nl) * recipe.batch_size / max(seconds, 1e-9), 1),
            "lr": learning_rate(step, num_steps, recipe.lr, recipe.min_lr, recipe.warmup),
            "seconds": round(self.state["seconds"], 2),
        }  # fmt: skip
        self.run.log(**values)
        self._track({k: v for k, v in values.items() if isinstance(v, float)}, step)

    def _track(self, values: dict[str, float], step: int) -> None:
        if self.tracker is not None:
            self.tracker(values, self._total(step))

    def _total(self, step: int) -> int:
        """The step counted over all stages."""
        return step + sum(num for name, num in self.state["num_steps"].items() if name != self.state["stage"])

    def _validate(self, name: str, step: int, bar: Progress) -> None:
        self.fabric.barrier()
        if self.fabric.is_global_zero:
            with self._measured():
                scores = self.validator.validate(self.student)
            self.run.log(stage=name, step=step, validation=scores)
            self.state["validations"].append({"stage": name, "step": step, **scores})
            self._track({k: v for k, v in scores.items() if isinstance(v, float)}, step)
            agreement = scores.get("agreement")
            text = f"R2 {scores['r2_last']:.3f} (lowest {scores['r2_lowest']:.3f})"
            bar.note = text + (f", agreement {agreement:.1%}" if agreement is not None else "")
        self.fabric.barrier()

    def _measured(self) -> AbstractContextManager[None]:
        """Inside, the student is what is measured: itself, or with one phase trained, that phase amid the teacher."""
        others = set(range(1, self.phases.num_layers + 1)) - set(self._layers())
        return replaced_blocks(self.student, {layer: self.job.teacher.blocks[layer - 1] for layer in others})

    def _save(self, stage: Stage, step: int) -> None:
        if not torch.stack([p.detach().isfinite().all() for _, p in stage.named()]).all():
            self._fail(f"the weights are not finite after step {step} of {stage.name}")
        self.state["step"] = step
        if not self.fabric.is_global_zero:
            return
        tensors = checkpoint_tensors(self.student, stage.named(), stage.moments())
        tensors["variance"] = stage.module.variance_lt
        self.state["bad_images"] = self._bad_images()
        self.run.save_checkpoint(self._total(step), tensors, {**self.state, "num_logged": self.run.num_logged()})

    def _bar(self, name: str, start: int, num_steps: int) -> Progress:
        bar = Progress(f"distil {name}", num_steps, "steps", self.recipe.batch_size, "images")
        bar.start_at(start)
        return bar

    def _bad_images(self) -> list[str]:
        """Names of the images that were passed over since the run began."""
        return sorted({*self.state.get("bad_images", ()), *self.job.train_data.bad, *self.job.val_data.bad})

    def _summary(self) -> dict[str, Any]:
        each = [self._bad_images()] * self.fabric.world_size
        if self.fabric.world_size > 1:  # each rank reads images of its own
            torch.distributed.all_gather_object(each, self._bad_images())
        if not self.fabric.is_global_zero:
            return {}
        with self._measured():
            scores = self.validator.final(self.student)
        return {
            "phases": list(self.phases.lengths),
            "teacher": self.job.teacher.describe(),
            "surrogate": self.student.describe(),
            "num_steps": self.state["num_steps"],
            "seconds": round(self.state["seconds"], 1),
            "validation": scores,
            "provenance": provenance(self.started, self.fabric.device),
            "device": device_name(self.fabric.device),
            "image_size": self.job.teacher.preprocess.size,
            "bad_images": sorted({*self._bad_images(), *(name for names in each for name in names)}),
        }
