"""One training step as one module: images in, losses out. Teacher and student both run inside it.

Nothing trainable is called outside this module, so a data-parallel wrapper sees every parameter it has to reduce.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from raptor.certificate.heads import Head
from raptor.phases.cut import Phases
from raptor.surrogate.block import Modulation
from raptor.surrogate.depths import LayerCall, fold_depths, layer_calls
from raptor.surrogate.kernels.attention import choose_attention
from raptor.surrogate.surrogate import shared_blocks
from raptor.surrogate.teacher_blocks import has_image_arguments
from raptor.train.frozen import half_copy
from raptor.train.losses import Target, at_groups, groups_at, targets_of
from raptor.vit.calls import first_tensor
from raptor.vit.view import Context, ViT

_MAX_SHAPES = 64  # graphs of one function that a process may compile, two for each batch size


class Parts(NamedTuple):
    """Which losses a step of stage 1 computes: on the block's own states, and from the teacher's."""

    autoregressive: bool
    forced: bool

    @classmethod
    def of(cls, lam: float) -> Parts:
        """The losses whose weight is above zero when `lam` is the share of teacher forcing."""
        return cls(lam < 1, lam > 0)


class DistillStep(nn.Module):
    """The losses of one batch.

    Args:
        teacher, student: views; only the student's shared blocks are trained.
        phases: where depth is cut.
        variance: the divisor of each squared error, (L, T), or (L, T, D) where each coordinate has its own.
        stage1_weights: token-group weights of the phases before the last in stage 1; None takes the plain mean.
        last_phase_weights: the same of the last phase in stage 1.
        stage2_weights: token-group weights of every layer in stage 2.
        cosine: how much of `1 - cos` is added to each squared error.
        compile_blocks: compile the teacher's block, and the student's block together with its loss.
        checkpointing: recompute the student's activations in the backward pass.
        half_teacher: take the targets from a bf16 copy of the teacher (half the memory traffic), for autocast runs.
        sizes: image sizes that batches may have beside the teacher's own.
        head: the classifier of the head term.
        head_weight: the weight of the head term in stage 2; 0 leaves it out.
        every_phase: whether the head term reads the state at the end of every phase, not only of the last one.
    """

    def __init__(
        self,
        teacher: ViT,
        student: ViT,
        phases: Phases,
        variance: Tensor,
        stage1_weights: Mapping[str, float] | None = None,
        last_phase_weights: Mapping[str, float] | None = None,
        stage2_weights: Mapping[str, float] | None = None,
        cosine: float = 0.0,
        compile_blocks: bool = False,
        checkpointing: bool = False,
        half_teacher: bool = False,
        sizes: Sequence[int] = (),
        head: Head | None = None,
        head_weight: float = 0.0,
        every_phase: bool = False,
    ):
        super().__init__()
        teacher.model.eval()
        self.every_phase = every_phase
        self.head = head
        self.head_weight = head_weight
        if head is not None and head.linear is not None:
            head.linear.to(teacher.device)
        self.shared_blocks = shared_blocks(student)
        self.shared_blocks.requires_grad_(True)
        # In tuples, so that this module does not register them.
        self._student = (student,)
        self._teacher = (teacher,)
        if half_teacher:
            self._teacher = (half_copy(teacher),)
        self.checkpointing = checkpointing
        self.spans = phases.spans
        self.depths = torch.arange(1, phases.num_layers + 1, dtype=torch.float32, device=teacher.device)
        self.variance = variance.to(teacher.device)
        self.targets: dict[tuple[str, int], list[Target]] = {}  # of each layer, by stage and number of tokens
        weights = stage1_weights, last_phase_weights, stage2_weights
        for groups in (teacher.groups, *(groups_at(teacher, size) for size in sizes)):
            variance_here = at_groups(self.variance, teacher.groups, groups)
            stage1, stage2 = targets_of(groups, phases, variance_here, *weights, cosine)
            self.targets["stage1", groups.num_tokens] = stage1
            self.targets["stage2", groups.num_tokens] = stage2
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
        """The loss to minimise, and the losses to log: that of every layer, (L,), and in stage 2 the head term's after
        them, (L + 1,), where it has a weight.

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
            if not self.has_head_term(stage):
                return layer_losses.mean(), layer_losses
            read = ends if self.every_phase else ends[-1:]
            head_loss = torch.stack([self._head_loss(states[-1], end_btd) for end_btd in read]).mean()
            return layer_losses.mean() + self.head_weight * head_loss, torch.cat([layer_losses, head_loss[None]])
        if parts is None and isinstance(lam, Tensor):
            parts = Parts(True, True)
        elif parts is None:
            parts = Parts.of(float(lam))
        return self._separate(states, context, lam, parts)

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

    def has_head_term(self, stage: str) -> bool:
        return stage == "stage2" and self.head_weight > 0

    def _head_loss(self, teacher_btd: Tensor, student_btd: Tensor) -> Tensor:
        """KL(p_T || p_S) of the classes that a head gives two last states, mean over images.

        Both go through the norm and head that the student has from its teacher, which are frozen.
        """
        student = self._student[0]
        head = self.head
        assert head is not None

        def log_probabilities(state_btd: Tensor) -> Tensor:
            if head.linear is None:
                logits_bc = student.finish(state_btd)
            else:
                logits_bc = head.linear(student.features(state_btd))
            return logits_bc.float().log_softmax(dim=-1)

        with torch.no_grad():
            teacher_bc = log_probabilities(teacher_btd.float())
        return F.kl_div(log_probabilities(student_btd), teacher_bc, reduction="batchmean", log_target=True)

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
                    weights, cosine_t = self.targets[stage, x_btd.shape[1]][layer - 1]
                    losses.append(weighted_error(x_btd, states[layer], weights, cosine_t))
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
                target_btd = states[layer]
                weights, cosine_t = self.targets["stage1", target_btd.shape[1]][layer - 1]
                losses.append(weighted_error(out_btd, target_btd, weights, cosine_t))
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
        target_btd = states[layer]
        weights, cosine_t = self.targets[stage, target_btd.shape[1]][layer - 1]
        kwargs = {**kwargs, **call.kwargs}
        inputs = (self._blocks[j], x_btd, call.modulation, args, kwargs, target_btd, weights, cosine_t)
        if self.checkpointing:
            # Nothing in a block is random, so the state of the generators need not be kept; reading it waits for a GPU.
            return checkpoint(self._advance, *inputs, use_reentrant=False, preserve_rng_state=False)
        return self._advance(*inputs)


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
