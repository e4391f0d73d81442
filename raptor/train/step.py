"""One step of a distillation: images in, losses and gradients out. Teacher and student both run inside it.

`DistillStage` draws what a step is made of; `DistillStep` is the step as one module. Nothing trainable is called
outside it, so a data-parallel wrapper sees every parameter it has to reduce.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from raptor.config import DistillConfig
from raptor.data.stream import TrainStream, stable_seed
from raptor.phases.cut import Phases
from raptor.surrogate.block import Modulation
from raptor.surrogate.fast import LayerCall, fold_depths, layer_calls
from raptor.surrogate.kernels.attention import choose_attention
from raptor.surrogate.surrogate import shared_blocks
from raptor.surrogate.teacher_blocks import has_image_arguments
from raptor.train.frozen import half_copy
from raptor.train.graphs import StepGraphs
from raptor.train.losses import HeadTerm, Target, Targets
from raptor.train.optimizer import parameter_groups
from raptor.train.stage import Budget, Stage
from raptor.train.validation import Validator, shown_r2
from raptor.vit.calls import first_tensor
from raptor.vit.view import Context, ViT

NUM_VALIDATIONS = 4  # per stage
_MAX_SHAPES = 64  # graphs of one function that a process may compile, two for each batch size


class Parts(NamedTuple):
    """Which losses a step of stage 1 computes: on the block's own states, and from the teacher's."""

    autoregressive: bool
    forced: bool

    @classmethod
    def of(cls, lam: float) -> Parts:
        """The losses whose weight is above zero when `lam` is the share of teacher forcing."""
        return cls(lam < 1, lam > 0)


class DistillStage(Stage):
    """`stage1` or `stage2` of a distillation: what is drawn for each of its steps, and what is said of them.

    Args:
        name: `stage1` or `stage2`.
        share: of the run's budget.
        stream: this rank's training batches.
        graphs: the captured passes of this stage, where steps run as CUDA graphs.
    """

    module: DistillStep

    def __init__(
        self,
        recipe: DistillConfig,
        name: str,
        share: float,
        module: DistillStep,
        stream: TrainStream,
        validator: Validator,
        graphs: StepGraphs | None = None,
    ):
        self.name = name
        self.title = f"distil {name}"
        self.module = module
        self.stream = stream
        self.recipe = recipe
        self.validator = validator
        self.graphs = graphs
        self.groups = parameter_groups(module.trained_parameters(), recipe.optimizer, recipe.weight_decay)
        self.clip = recipe.clip
        self.lr = recipe.lr
        self.min_lr = recipe.min_lr
        self.warmup = recipe.warmup
        self.batch_size = recipe.batch_size
        self.budget = Budget.parse(recipe.budget)
        self.share = share
        self.steps_per_epoch = (recipe.epoch_images or len(stream.data)) / recipe.batch_size
        self.num_validations = NUM_VALIDATIONS
        self.refines = recipe.start is not None  # then few steps are enough, and nothing is said of them
        if name == "stage2":
            self.before = recipe.stage1_share
        # Stage 1 is averaged only where the recipe ends with it: stage 2 goes on from its last weights.
        if name == "stage2" or recipe.stage1_share == 1:
            self.average_last = recipe.average_last

    def losses(self, wrapped: Any, step: int, num_steps: int, propagate: Callable[[Tensor], None]) -> Tensor:
        """The loss of every trained layer, on the device."""
        # Drawn outside the module and the graph: a replayed graph would repeat its random numbers.
        images = self.stream.batch(step, self.name, self._size(step, num_steps))
        lam = self._lam(step, num_steps)
        lengths = self._lengths(step)
        layer_losses = None
        # A graph holds one sequence of blocks, so a step with a hand-over runs without one.
        if self.graphs is not None and lengths is None:
            layer_losses = self.graphs.run(images, lam, Parts.of(lam))
        if layer_losses is None:
            loss, layer_losses = wrapped(images, self.name, lam, lengths=lengths)
            propagate(loss)
        return layer_losses

    def end(self) -> None:
        if self.graphs is not None:
            self.graphs.release()

    def kind(self, step: int, num_steps: int) -> tuple[Parts, int, bool]:
        hands_over = self._lengths(step) is not None
        return Parts.of(self._lam(step, num_steps)), self._size(step, num_steps), hands_over

    def _lengths(self, step: int) -> list[int] | None:
        """Steps of each phase before it hands over, drawn for a share of the steps of stage 2; None for all steps."""
        if self.name != "stage2" or not self.recipe.hand_over:
            return None
        # From the step, so that all ranks and a resumed run hand over alike.
        drawn = random.Random(stable_seed(self.recipe.seed, "hand over", step))
        if drawn.random() >= self.recipe.hand_over:
            return None
        lengths = []
        for first, last in self.module.spans:
            lengths.append(drawn.randint(1, last - first + 1))
        return lengths

    def _size(self, step: int, num_steps: int) -> int:
        """The image size of a step: one that the stream draws, or the first of two until its share of the run ends."""
        until = self.recipe.first_size_until
        if not until:
            return self.stream.size(step, self.name)
        assert self.recipe.sizes is not None
        place = self.before + self.share * step / num_steps  # in the whole run
        is_late = place >= until
        return self.recipe.sizes[int(is_late)]

    def _lam(self, step: int, num_steps: int) -> float:
        if self.name != "stage1":
            return 0.0
        return teacher_forcing(step, num_steps, self.recipe.lam, self.recipe.lam_until)

    def clip_groups(self) -> list[list[nn.Parameter]]:
        return self.module.clip_groups(self.name)

    def tensors(self) -> dict[str, Tensor]:
        tensors = {"variance": self.module.variance}
        for name, value in self.module.shared_blocks.state_dict().items():
            tensors[f"block.{name}"] = value
        return tensors

    def metrics(self, loss_nl: Tensor) -> dict[str, Any]:
        num_layers = self.module.student.num_layers
        layer_nl = loss_nl[:, :num_layers]
        # fp32 has seven digits; with all digits of the conversion metrics.jsonl would be twice as long.
        rounded = [float(f"{loss:.7g}") for loss in layer_nl.mean(0).tolist()]
        found: dict[str, Any] = {"loss": float(layer_nl.mean()), "layer_loss": rounded}
        if self.name == "stage2" and self.module.head_term is not None:
            found["head_loss"] = float(loss_nl[:, num_layers].mean())
        return found

    def where(self, column: int | None = None) -> str:
        if column is None:
            return f" of {self.name}"
        if column == self.module.student.num_layers:
            return f" of {self.name}, head term"
        return f" of {self.name}, layer {column + 1}"

    def validate(self) -> tuple[dict[str, Any], str]:
        scores = self.validator.validate(self.module.student)
        note = f"R2 {shown_r2(scores.r2_last)} (lowest {shown_r2(scores.r2_lowest)})"
        if scores.agreement is not None:
            note += f", agreement {scores.agreement:.1%}"
        return scores.to_dict(), note


def teacher_forcing(step: int, num_steps: int, start: float, until: float) -> float:
    """lambda, the share of teacher forcing: linear from `start` to 0 over the first `until` of the run."""
    length = until * num_steps
    if length <= 0:
        return 0.0
    return start * max(0.0, 1 - step / length)


class DistillStep(nn.Module):
    """The losses of one batch.

    Args:
        teacher, student: views; only the student's shared blocks are trained.
        targets: what the error of each state is weighted with.
        head_term: the term of stage 2 that compares classes, if it has one.
        compile_blocks: compile the teacher's block, and the student's block together with its loss.
        checkpointing: recompute the student's activations in the backward pass.
        half_teacher: take the targets from a bf16 copy of the teacher (half the memory traffic), for autocast runs.
    """

    def __init__(
        self,
        teacher: ViT,
        student: ViT,
        targets: Targets,
        head_term: HeadTerm | None = None,
        *,
        compile_blocks: bool = False,
        checkpointing: bool = False,
        half_teacher: bool = False,
    ):
        super().__init__()
        teacher.model.eval()
        self.head_term = head_term
        if head_term is not None and head_term.head.linear is not None:
            head_term.head.linear.to(teacher.device)
        self.shared_blocks = shared_blocks(student)
        self.shared_blocks.requires_grad_(True)
        # In tuples, so that this module does not register them.
        self._student = (student,)
        self._teacher = (teacher,)
        if half_teacher:
            self._teacher = (half_copy(teacher),)
        self.checkpointing = checkpointing
        self.spans = Phases.from_lengths(student.phases or ()).spans
        self.depths = torch.arange(1, student.num_layers + 1, dtype=torch.float32, device=teacher.device)
        self.variance = targets.variance
        self.targets = targets.layers
        # What runs each phase: the fast views of the blocks if all have one, otherwise the blocks as they are written.
        # A list, so that nothing in it is registered a second time.
        self._blocks: list[Any] = [tied.fast for tied in self.shared_blocks]
        if None in self._blocks:
            self._blocks = [tied.block for tied in self.shared_blocks]
        if half_teacher:
            token_counts = sorted({num_tokens for _, num_tokens in self.targets})
            choose_attention([*self._blocks, *self._teacher[0].blocks], token_counts)
        # Teacher forcing takes all depths of a phase in one call, unless they differ in more than rows. A copied block
        # with a fast view is faster layer by layer through it: 1.39 times the step of DINOv2-S on an H200.
        only_rows = not teacher.depth_conditioned and not has_image_arguments(self._teacher[0])
        self._one_call = [only_rows and not getattr(block, "is_copy", False) for block in self._blocks]
        self._fold = fold_depths
        self._run_block = _run_block
        self._run_depths = _run_depths
        self._advance = _advance
        if compile_blocks:
            limits = torch._dynamo.config
            limits.recompile_limit = max(limits.recompile_limit, _MAX_SHAPES)  # beyond it a function runs uncompiled
            self._fold = torch.compile(fold_depths)
            self._run_block = torch.compile(_run_block, dynamic=False)
            self._advance = torch.compile(_advance, dynamic=False)
            self._run_depths = torch.compile(_run_depths)  # phases differ in length

    def forward(
        self,
        images: Tensor,
        stage: str,
        lam: float | Tensor = 0.0,
        parts: Parts | None = None,
        lengths: Sequence[int] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """The loss to minimise, and the losses to log: one for each layer, (L,), and in stage 2 the head term after
        them, (L + 1,), if there is one.

        Args:
            stage: `stage1` trains each phase on its own, `stage2` all of them end to end.
            lam: the share of teacher forcing in stage 1.
            parts: which losses to compute, where `lam` is a tensor, whose value stays on the device.
            lengths: in stage 2, after how many steps each phase hands over to the next one; None for all of them.
        """
        states, context = self.teacher_states(images)
        if stage == "stage2":
            losses, ends = self._autoregress(states, context, range(len(self.spans)), "stage2", lengths)
            layer_losses = torch.stack(losses)
            if self.head_term is None:
                return layer_losses.mean(), layer_losses
            head_loss = self.head_term.loss(self.student, states[-1], ends)
            return layer_losses.mean() + self.head_term.weight * head_loss, torch.cat([layer_losses, head_loss[None]])
        if parts is None and isinstance(lam, Tensor):
            parts = Parts(True, True)
        elif parts is None:
            parts = Parts.of(float(lam))
        return self._separate(states, context, lam, parts)

    @property
    def student(self) -> ViT:
        return self._student[0]

    @torch.no_grad()
    def teacher_states(self, images: Tensor) -> tuple[list[Tensor], Context]:
        """`a_0..a_L` of the teacher, and the arguments of its blocks."""
        teacher = self._teacher[0]
        x_btd, context = teacher.embed(images)
        states = [x_btd]
        for block, (args, kwargs) in zip(teacher.blocks, context.calls):
            states.append(self._run_block(block, states[-1], args, kwargs))
        return states, context

    def trained_parameters(self) -> list[tuple[str, nn.Parameter]]:
        """Name and parameter of everything that is trained."""
        return list(self.shared_blocks.named_parameters())

    def clip_groups(self, stage: str) -> list[list[nn.Parameter]]:
        """The parameters that are clipped by one norm: each phase on its own in stage 1, everything in stage 2."""
        if stage == "stage1":
            return [list(tied.parameters()) for tied in self.shared_blocks]
        return [list(self.shared_blocks.parameters())]

    def _separate(
        self, states: list[Tensor], context: Context, lam: float | Tensor, parts: Parts
    ) -> tuple[Tensor, Tensor]:
        """Stage 1: the sum over phases of the mean over a phase's layers, mixed with teacher forcing by `lam`."""
        mixed = []
        for j in range(len(self.spans)):
            weighted = []
            known = None
            if parts.autoregressive:
                losses, _ = self._autoregress(states, context, [j], "stage1")
                known = losses[0]
                weighted.append((1 - lam) * torch.stack(losses))
            if parts.forced:
                weighted.append(lam * self._teacher_forced(states, context, j, known))
            mixed.append(torch.stack(weighted).sum(dim=0))
        return torch.stack([losses.mean() for losses in mixed]).sum(), torch.cat(mixed)

    def _autoregress(
        self,
        states: list[Tensor],
        context: Context,
        phases: Sequence[int],
        stage: str,
        lengths: Sequence[int] | None = None,
    ) -> tuple[list[Tensor], list[Tensor]]:
        """The loss of each layer of `phases`, run on from the teacher's state at the start of the first one; and the
        student's state at the end of each phase.

        The student's own stream is fp32, whatever the teacher's states are. A phase that ends after `lengths` steps
        hands its state over: this state then stands for the rest of the phase, also in the losses of its layers.
        """
        first_layer = self.spans[phases[0]][0]
        x_btd = states[first_layer - 1].float()
        normed_btd: Tensor | None = None
        losses = []
        ends = []
        for j in phases:
            for layer, call in self._calls(j):
                if lengths is not None and layer - self.spans[j][0] >= lengths[j]:
                    losses.append(weighted_error(x_btd, states[layer], *self._target(stage, layer, x_btd)))
                    continue
                if "folded" in call.kwargs and not self.checkpointing:  # checkpointing would keep it in memory
                    call.kwargs["normed_btd"] = normed_btd
                x_btd, normed_btd, loss = self._step(states, context, stage, j, layer, call, x_btd)
                losses.append(loss)
            ends.append(x_btd)
        return losses, ends

    def _teacher_forced(self, states: list[Tensor], context: Context, j: int, known: Tensor | None) -> Tensor:
        """The loss of each layer of phase `j`, one step from the teacher's state before it.

        `known` is the loss of the first layer, if it was computed already: the autoregressive one is the same.
        """
        first, last = self.spans[j]
        losses = []
        if known is not None:
            losses.append(known)
            first += 1
        if first > last:
            return torch.stack(losses)
        if self._one_call[j]:
            # All depths are rows of one batch.
            tied: Any = self.shared_blocks[j]
            batch = states[0].shape[0]
            args, kwargs = context.calls[first - 1]
            depth_n = self.depths[first - 1 : last]
            modulation = tied.modulation(depth_n.repeat_interleave(batch))
            block_weights = tied.weights(depth_n)
            if block_weights is not None:
                kwargs = {**kwargs, "weights": block_weights}
            x_ntd = torch.cat(states[first - 1 : last]).float()
            out_ntd = self._run_depths(tied.block, x_ntd, modulation, args, kwargs)
            out_by_layer = out_ntd.unflatten(0, (len(depth_n), batch)).unbind(0)
            for layer, out_btd in enumerate(out_by_layer, start=first):
                losses.append(weighted_error(out_btd, states[layer], *self._target("stage1", layer, out_btd)))
            return torch.stack(losses)
        for layer, call in self._calls(j):
            if layer >= first:
                start_btd = states[layer - 1].float()
                losses.append(self._step(states, context, "stage1", j, layer, call, start_btd)[2])
        return torch.stack(losses)

    def _calls(self, j: int) -> Iterator[tuple[int, LayerCall]]:
        """The layers of phase `j`, each with how the phase's block is called there."""
        first, last = self.spans[j]
        depth_n = self.depths[first - 1 : last]
        return zip(range(first, last + 1), layer_calls(self.shared_blocks[j], self._blocks[j], depth_n, self._fold))

    def _step(
        self, states: list[Tensor], context: Context, stage: str, j: int, layer: int, call: LayerCall, x_btd: Tensor
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        """The state after a layer from `x_btd`, the state before it; the start of the next block; and the loss."""
        args, kwargs = context.calls[layer - 1]
        kwargs = {**kwargs, **call.kwargs}
        weights, cosine_t = self._target(stage, layer, x_btd)
        inputs = (self._blocks[j], x_btd, call.modulation, args, kwargs, states[layer], weights, cosine_t)
        if self.checkpointing:
            # Nothing in a block is random, so the state of the generators need not be kept; reading it waits for a GPU.
            return checkpoint(self._advance, *inputs, use_reentrant=False, preserve_rng_state=False)
        return self._advance(*inputs)

    def _target(self, stage: str, layer: int, x_btd: Tensor) -> Target:
        """What the error of the state after a layer is weighted with."""
        return self.targets[stage, x_btd.shape[1]][layer - 1]


def weighted_error(student_btd: Tensor, teacher_btd: Tensor, weights: Tensor, cosine_t: Tensor | None = None) -> Tensor:
    """Mean over images of the sum over tokens of the squared error's weighted mean over coordinates.

    `weights` are (T,), or (T, D) where each coordinate has its own. `cosine_t` (T,) is the weight of an additional
    `1 - cos` per token.
    """
    # In fp32, whatever the states are: bf16 cosines gave 1.0 where the truth was .99875.
    s_btd = student_btd.float()
    t_btd = teacher_btd.float()
    error_btd = (s_btd - t_btd).square()
    if weights.ndim == 1:
        error_bt = error_btd.mean(dim=-1) * weights
    else:
        error_bt = (error_btd * weights).mean(dim=-1)
    if cosine_t is not None:
        error_bt = error_bt + (1 - torch.cosine_similarity(s_btd, t_btd, dim=-1)) * cosine_t
    return error_bt.sum(dim=-1).mean()


# Functions that a run compiles.


def _advance(
    block: nn.Module,
    x_btd: Tensor,
    modulation: Modulation | None,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    target_btd: Tensor,
    weights: Tensor,
    cosine_t: Tensor | None,
) -> tuple[Tensor, Tensor | None, Tensor]:
    """The next state, that state normed for the next fast block, and its loss.

    One function, so that one compiled graph holds both and the loss costs no further pass over the state.
    """
    out_btd = block(x_btd, modulation, *args, **kwargs)
    normed_btd = None
    if "normed_btd" in kwargs:
        normed_btd = block.norm_ahead(out_btd)  # type: ignore[operator]
    return out_btd, normed_btd, weighted_error(out_btd, target_btd, weights, cosine_t)


def _run_block(block: nn.Module, x_btd: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    return first_tensor(block(x_btd, *args, **kwargs))


def _run_depths(
    block: nn.Module, x_ntd: Tensor, modulation: Modulation | None, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Tensor:
    """States after one step from each row of `x_ntd`, whose depths may differ."""
    return block(x_ntd, modulation, *args, **kwargs)
