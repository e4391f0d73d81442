"""The training loop: the state a checkpoint holds, and one plain loop over steps."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor, nn

from raptor.data.stream import TrainStream
from raptor.devices import device_name
from raptor.distill.recipe import Recipe
from raptor.distill.schedule import Budget, learning_rate, teacher_forcing
from raptor.distill.step import DistillStep, state_variance
from raptor.distill.validation import Validator
from raptor.phases import Phases
from raptor.progress import Progress
from raptor.run import Run, RunError
from raptor.surrogate import shared_blocks
from raptor.vit import ViT

LOG_EVERY = 20
NUM_CHECKPOINTS = 20
NUM_VALIDATIONS = 4


class Trainer:
    """One run's training: the state that a checkpoint holds, and the plain loop over steps."""

    def __init__(
        self, fabric: Any, run: Run, teacher: ViT, student: ViT, phases: Phases, settings: Recipe,
        stream: TrainStream, validator: Validator, seed: int,
    ):  # fmt: skip
        self.fabric, self.run, self.teacher, self.student = fabric, run, teacher, student
        self.phases, self.settings, self.stream, self.validator = phases, settings, stream, validator
        self.seed = seed
        self.compile_blocks, self.checkpointing, self.precision = False, False, "fp32"
        self.tracker: Any = None
        self.state: dict[str, Any] = {"stage": None, "num_steps": {}, "seconds": 0.0, "validations": []}

    def fit(self, stages: list[str] | None, phase: int | None) -> dict[str, Any]:
        saved = self.run.load_checkpoint()
        tensors: dict[str, Tensor] = {}
        if saved is not None:
            tensors, self.state = saved
            self.run.cut_metrics(self.state["num_logged"])
            load_blocks(self.student, tensors)
        variance_lt = tensors["variance"] if tensors else self._measure_variance()
        step_module = DistillStep(
            self.teacher, self.student, self.phases, variance_lt, self.settings.last_phase_weights,
            self.settings.stage2_weights, self.settings.cosine, self.compile_blocks, self.checkpointing, phase,
            half_teacher=self.precision == "bf16" and self.fabric.device.type == "cuda",
        )  # fmt: skip
        share = self.settings.stage1_share
        plan = stages or [s for s, part in (("stage1", share), ("stage2", 1 - share)) if part > 0]
        for name in plan:
            if self.state["stage"] is not None and plan.index(self.state["stage"]) > plan.index(name):
                continue
            part = 1.0 if len(plan) == 1 else (share if name == "stage1" else 1 - share)
            self._fit_stage(name, part, step_module, tensors if self.state["stage"] == name else {})
        return self._summary()

    def _fit_stage(self, name: str, share: float, step_module: DistillStep, tensors: dict[str, Tensor]) -> None:
        settings, fabric = self.settings, self.fabric
        named = step_module.trained_parameters()
        optimizer = torch.optim.AdamW(
            [p for _, p in named],
            lr=settings.lr,
            weight_decay=settings.weight_decay,
            fused=fabric.device.type == "cuda",
        )
        if tensors:
            _restore_optimizer(optimizer, named, tensors)
        wrapped, optimizer = fabric.setup(step_module, optimizer)
        start_step = self.state["step"] + 1 if tensors else 0
        if name not in self.state["num_steps"]:
            self.state["num_steps"][name] = self._count_steps(name, share, wrapped, optimizer, step_module)
        num_steps = self.state["num_steps"][name]
        self.state["stage"] = name
        save_every = max(1, num_steps // NUM_CHECKPOINTS)
        validate_at = {round(num_steps * (i + 1) / NUM_VALIDATIONS) - 1 for i in range(NUM_VALIDATIONS)}
        bar = Progress(f"distil {name}", num_steps, "steps", settings.batch_size, "images")
        bar.start_at(start_step)
        bar.live = bar.live and fabric.is_global_zero
        losses: list[Tensor] = []
        logged = time.monotonic()
        for step in range(start_step, num_steps):
            losses.append(self._train_step(name, step, num_steps, wrapped, optimizer, step_module))
            last = step == num_steps - 1
            if len(losses) == LOG_EVERY or last or (step + 1) % save_every == 0 or step in validate_at:
                loss_nl = fabric.all_reduce(torch.stack(losses), reduce_op="mean").cpu()  # the only sync of the loop
                self._check_finite(loss_nl, name, step)
                now = time.monotonic()
                rate = len(losses) * settings.batch_size / max(now - logged, 1e-9)
                self.state["seconds"] += now - logged
                self._log(name, step, num_steps, loss_nl, rate)
                bar.note = f"loss {loss_nl[-1].sum():.4f}"
                losses = []
                if step in validate_at:
                    self._validate(name, step, bar)
                if (step + 1) % save_every == 0 or last:
                    self._save(step, named, optimizer, step_module)
                logged = time.monotonic()
            bar.advance()
        if fabric.is_global_zero:
            bar.finish()

    def _train_step(
        self, name: str, step: int, num_steps: int, wrapped: Any, optimizer: Any, step_module: DistillStep
    ) -> Tensor:
        """One optimizer step; gives the loss of every layer (and teacher forcing), on the device."""
        settings = self.settings
        rate = learning_rate(step, num_steps, settings.lr, settings.min_lr, settings.warmup)
        for group in optimizer.param_groups:
            group["lr"] = rate
        lam = teacher_forcing(step, num_steps, settings.lam, settings.lam_until) if name == "stage1" else 0.0
        loss, layer_losses = wrapped(self.stream.batch(step, stage=name), name, lam)
        optimizer.zero_grad(set_to_none=True)
        self.fabric.backward(loss)
        for parameters in step_module.clip_groups(name):
            torch.nn.utils.clip_grad_norm_(parameters, settings.clip)
        optimizer.step()
        return layer_losses.detach()

    def _count_steps(self, name: str, share: float, wrapped: Any, optimizer: Any, step_module: DistillStep) -> int:
        """Steps of this stage. A budget of seconds is turned into steps by timing a few, which are then undone."""
        budget = Budget.parse(self.settings.budget)
        if budget.unit != "s":
            per_epoch = (self.settings.epoch_images or len(self.stream.data)) / self.settings.batch_size
            total = budget.amount * (per_epoch if budget.unit == "epochs" else 1)
            return max(1, round(total * share))
        named = step_module.trained_parameters()
        saved = {n: p.detach().clone() for n, p in named}
        cuda = self.fabric.device.type == "cuda"
        times = []
        for i in range(16 if cuda else 4):
            start = time.monotonic()
            self._train_step(name, i, 1000, wrapped, optimizer, step_module)
            if cuda:
                torch.cuda.synchronize()
            times.append(time.monotonic() - start)
        with torch.no_grad():
            for n, p in named:
                p.copy_(saved[n])
        getattr(optimizer, "optimizer", optimizer).state.clear()
        tail = sorted(times[len(times) // 2 :])
        seconds = torch.tensor(tail[len(tail) // 2], device=self.fabric.device)
        seconds = float(self.fabric.all_reduce(seconds, reduce_op="mean"))
        return max(1, round(budget.amount * share / seconds))

    def _measure_variance(self) -> Tensor:
        def add_ranks(value: Tensor) -> Tensor:
            return self.fabric.all_reduce(value, reduce_op="sum")

        return state_variance(self.teacher, self.stream, self.settings.normalise, self.precision, add_ranks)

    def _check_finite(self, loss_nl: Tensor, name: str, step: int) -> None:
        bad = ~torch.isfinite(loss_nl)
        if bad.any():
            row, column = [int(i) for i in bad.nonzero()[0]]
            where = self.run.latest()
            kept = f"the last good checkpoint is {where}" if where else "no checkpoint was written yet"
            raise RunError(
                f"the loss is not finite at step {step - len(loss_nl) + 1 + row} of {name}, layer {column + 1}: {kept}; "
                "try a smaller --lr"
            )

    def _log(self, name: str, step: int, num_steps: int, loss_nl: Tensor, rate: float) -> None:
        values = {
            "stage": name, "step": step, "num_steps": num_steps, "loss": float(loss_nl.mean(0).sum() / loss_nl.shape[1]),
            "layer_loss": [round(float(v), 6) for v in loss_nl.mean(0)], "images_per_s": round(rate, 1),
            "lr": learning_rate(step, num_steps, self.settings.lr, self.settings.min_lr, self.settings.warmup),
            "seconds": round(self.state["seconds"], 2),
        }  # fmt: skip
        self.run.log(**values)
        if self.tracker is not None:
            self.tracker({k: v for k, v in values.items() if isinstance(v, float)}, step)

    def _validate(self, name: str, step: int, bar: Progress) -> None:
        self.fabric.barrier()
        if self.fabric.is_global_zero:
            scores = self.validator.validate(self.student)
            self.run.log(stage=name, step=step, validation=scores)
            self.state["validations"].append({"stage": name, "step": step, **scores})
            agreement = scores.get("agreement")
            text = f"R2 {scores['r2_last']:.3f} (lowest {scores['r2_lowest']:.3f})"
            bar.note = text + (f", agreement {agreement:.1%}" if agreement is not None else "")
        self.fabric.barrier()

    def _save(self, step: int, named: list[tuple[str, nn.Parameter]], optimizer: Any, step_module: DistillStep) -> None:
        if not self.fabric.is_global_zero:
            return
        tensors = {f"block.{n}": p for n, p in shared_blocks(self.student).state_dict().items()}
        tensors["variance"] = step_module.variance_lt
        inner = getattr(optimizer, "optimizer", optimizer)
        for n, p in named:
            for key, value in inner.state[p].items():
                tensors[f"optimizer.{key}.{n}"] = value
        state = {**self.state, "step": step, "num_logged": self.run.num_logged()}
        total = step + sum(v for key, v in self.state["num_steps"].items() if key != self.state["stage"])
        self.run.save_checkpoint(total, tensors, {k: v for k, v in state.items()})
        self.state["step"] = step

    def _summary(self) -> dict[str, Any]:
        scores = self.validator.final(self.student) if self.fabric.is_global_zero else {}
        device = self.fabric.device
        return {
            "phases": list(self.phases.lengths),
            "teacher": self.teacher.describe(),
            "surrogate": self.student.describe(),
            "num_steps": self.state["num_steps"],
            "seconds": round(self.state["seconds"], 1),
            "validation": scores,
            "device": device_name(device),
            "image_size": self.teacher.preprocess.size,
        }


def load_blocks(student: ViT, tensors: dict[str, Tensor]) -> None:
    state = {n.removeprefix("block."): v for n, v in tensors.items() if n.startswith("block.")}
    shared_blocks(student).load_state_dict(state)


def _restore_optimizer(optimizer: Any, named: list[tuple[str, nn.Parameter]], tensors: dict[str, Tensor]) -> None:
    for n, p in named:
        for key in ("step", "exp_avg", "exp_avg_sq"):
            value = tensors[f"optimizer.{key}.{n}"]
            optimizer.state[p][key] = value if key == "step" and not optimizer.defaults["fused"] else value.to(p.device)
