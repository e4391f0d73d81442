"""What only a GPU can show, as checks that need no test runner: CUDA graphs, compiled steps, bf16, kernels, NCCL.

    python benchmarks/gpu_checks.py --data FOLDER --out FOLDER

Each check is a function that asserts and returns its numbers. A failed one is recorded and the next one runs. On a CPU
the checks that need a GPU are left out, and Triton's kernels run where TRITON_INTERPRET=1 is set.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import io
import json
import os
import signal
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import timm
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from raptor.data import TrainStream, open_data
from raptor.data.scenes.render import draw_scenes
from raptor.phases.cut import Phases
from raptor.probes.frames import Geometry, on_device
from raptor.probes.segment import fused_gradient
from raptor.run import Interrupted
from raptor.surrogate.kernels.activations import SwiGLU
from raptor.surrogate.surrogate import make_surrogate, shared_blocks
from raptor.train import distill, loop
from raptor.train.frozen import half_copy
from raptor.train.graphs import GraphedStep
from raptor.train.job import Job
from raptor.train.losses import Targets
from raptor.train.plan import Plan
from raptor.train.step import DistillStep, Parts
from raptor.train.stopping import STEPS_AHEAD, Asked, Pace
from raptor.train.validation import Validator
from raptor.vit.open import open_vit
from raptor.vit.view import ViT

STARTED = time.monotonic()
DEVICE = "cpu"
if torch.cuda.is_available():
    DEVICE = "cuda"
CHECKS: dict[str, Callable[[argparse.Namespace], dict[str, Any]]] = {}
Check = Callable[[argparse.Namespace], dict[str, Any]]


def check(function: Check) -> Check:
    CHECKS[function.__name__] = function
    return function


def on_gpu(function: Check) -> Check:
    return check(function) if DEVICE == "cuda" else function


def small_teacher(depth: int = 4) -> ViT:
    """dim 64, 48 px, patch 8: a cls token, two registers, 36 patches."""
    torch.manual_seed(0)
    shape: dict[str, Any] = dict(img_size=48, patch_size=8, embed_dim=64, depth=depth, num_heads=2, num_classes=20)
    model = timm.create_model("vit_tiny_patch16_224", reg_tokens=2, dynamic_img_size=True, **shape)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.05)
    return open_vit(model, size=48)


def small_step(half: bool = False) -> tuple[DistillStep, torch.Tensor]:
    """A step with the paper's block on two phases, and its images."""
    teacher = small_teacher().to(DEVICE)
    phases = Phases.from_lengths((2, 2))
    student = make_surrogate(teacher, phases, block="paper", conditioning="mlp")
    targets = Targets.of(teacher, phases, torch.ones(4, teacher.groups.num_tokens))
    module = DistillStep(teacher, student, targets, half_teacher=half)
    return module, torch.randn(8, 3, 48, 48, generator=torch.Generator().manual_seed(1)).to(DEVICE)


def gradients(module: DistillStep) -> torch.Tensor:
    return torch.cat([p.grad.flatten() for _, p in module.trained_parameters() if p.grad is not None])


def distance(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """|a - b| / |b|."""
    return float((ours.double() - theirs.double()).norm() / theirs.double().norm())


@on_gpu
def a_captured_step_is_the_step(_: argparse.Namespace) -> dict[str, Any]:
    """Losses and gradients of a replayed graph against the step without it, on images it was not captured with."""
    found = {}
    for stage, parts, lams in (("stage1", Parts(True, True), (0.5, 0.2)), ("stage2", Parts(True, False), (0.0,))):
        for precision in ("fp32", "bf16"):
            module, images = small_step(half=precision == "bf16")
            graph = GraphedStep(module, stage, images, parts, precision)
            for lam in lams:
                other = images.flip(0) + 0.1
                losses = graph(other, lam)
                captured = gradients(module).clone()
                module.zero_grad(set_to_none=True)
                with torch.autocast("cuda", torch.bfloat16, enabled=precision == "bf16"):
                    loss, plain = module(other, stage, torch.tensor(lam, device="cuda"), parts)
                loss.backward()
                errors = distance(losses, plain), distance(captured, gradients(module))
                found[f"{stage} {precision} {lam}"] = errors
                assert max(errors) < (1e-4 if precision == "fp32" else 2e-2), (stage, precision, lam, errors)
            del graph
    return found


@check
def the_half_teacher_gives_the_states(_: argparse.Namespace) -> dict[str, Any]:
    teacher = open_vit("timm/vit_small_patch14_reg4_dinov2", pretrained=False, num_classes=0).to(DEVICE)
    images = torch.randn(2, 3, 224, 224, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    half = half_copy(teacher)
    with torch.no_grad():
        states = teacher.unroll(*teacher.embed(images))
        copied = half.unroll(*half.embed(images))
    cosines = [float(F.cosine_similarity(a.float(), b.float(), dim=-1).mean()) for a, b in zip(states, copied)]
    assert copied[0].dtype == torch.bfloat16 and min(cosines) > 0.999, cosines
    return {"lowest_cosine": min(cosines)}


@check
def the_fused_segmentation_gradient(_: argparse.Namespace) -> dict[str, Any]:
    """Against double precision; divided by another number of labelled pixels (that of all ranks) where it is given."""
    generator = torch.Generator().manual_seed(0)
    errors = []
    if DEVICE == "cpu" and "TRITON_INTERPRET" not in os.environ:
        return {"left_out": "TRITON_INTERPRET is not set"}
    for height, width, patch, num_classes in ((28, 56, 14, 40), (20, 33, 8, 17), (9, 6, 4, 1)):
        geometry = Geometry(height, width, patch, (height, width))
        logits = (4 * torch.randn(2, *geometry.grid, 3, num_classes, generator=generator)).to(DEVICE)
        labels = torch.randint(num_classes, (2, height, width), generator=generator)
        labels[torch.rand(labels.shape, generator=generator) < 0.3] = 255
        labels = labels.to(DEVICE)
        rows, columns = (on_device(side.cells(), torch.device(DEVICE)) for side in geometry.sides)
        num_valid = (labels != 255).sum()
        ours = fused_gradient(logits, labels, rows, columns, patch, num_valid)
        (top, left) = geometry.start
        exact = logits.double().requires_grad_()
        for g in range(3):
            large = F.interpolate(exact[..., g, :].permute(0, 3, 1, 2), geometry.padded, mode="bilinear")
            F.cross_entropy(large[..., top : top + height, left : left + width], labels, ignore_index=255).backward()
        assert exact.grad is not None
        torch.testing.assert_close(ours.double(), exact.grad, rtol=1e-4, atol=1e-6)
        shared = fused_gradient(logits, labels, rows, columns, patch, 3 * num_valid)
        torch.testing.assert_close(3 * shared, ours, rtol=1e-5, atol=1e-7)
        none = fused_gradient(logits, torch.full_like(labels, 255), rows, columns, patch, num_valid)
        assert (none == 0).all()
        errors.append(float((ours.double() - exact.grad).abs().max()))
    return {"largest_errors": errors}


@check
def the_fused_swiglu(_: argparse.Namespace) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    errors = {}
    if DEVICE == "cpu" and "TRITON_INTERPRET" not in os.environ:
        return {"left_out": "TRITON_INTERPRET is not set"}
    for dtype, bound in ((torch.float32, 1e-5), (torch.bfloat16, 2e-2)):
        for num_rows, num_columns in ((64, 256), (100, 300), (3, 40)):
            draws = [
                torch.randn(*shape, generator=generator) for shape in ((num_rows, 2 * num_columns), (2 * num_columns,))
            ]
            z = draws[0].to(DEVICE, dtype).requires_grad_()
            bias = draws[1].to(DEVICE).requires_grad_()
            grad = torch.randn(num_rows, num_columns, generator=generator).to(DEVICE, dtype)
            out = SwiGLU.apply(z, bias)
            out.backward(grad)
            exact_z = z.detach().double().requires_grad_()
            exact_bias = bias.detach().double().requires_grad_()
            p, q = (exact_z + exact_bias).chunk(2, dim=-1)
            exact = F.silu(p) * q
            exact.backward(grad.double())
            pairs: Any = ((out, exact), (z.grad, exact_z.grad), (bias.grad, exact_bias.grad))
            errors[f"{dtype} {num_rows}x{num_columns}"] = max(distance(a.detach(), b.detach()) for a, b in pairs)
            assert errors[f"{dtype} {num_rows}x{num_columns}"] < bound, errors
    return errors


@on_gpu
def the_host_stays_four_steps_ahead(_: argparse.Namespace) -> dict[str, Any]:
    """With steps of about 20 ms that only the GPU works on."""
    pace = Pace()
    events = []
    ahead = []
    waits = []
    torch.cuda.synchronize()
    for _step in range(16):
        torch.cuda._sleep(30_000_000)
        event = torch.cuda.Event()
        event.record()
        events.append(event)
        began = time.monotonic()
        pace.wait()
        waits.append(time.monotonic() - began)
        ahead.append(sum(not event.query() for event in events))
    torch.cuda.synchronize()
    assert 2 <= max(ahead) <= STEPS_AHEAD, ahead
    return {"steps_ahead": ahead, "wait_ms": [round(1000 * wait, 2) for wait in waits]}


@on_gpu
def scenes_are_drawn_alike(_: argparse.Namespace) -> dict[str, Any]:
    here = draw_scenes(torch.arange(200), size=32)
    there = draw_scenes(torch.arange(200), size=32, device="cuda")
    pixels = float((there.images.cpu().int() - here.images.int()).abs().float().mean())
    masks = float((there.masks.cpu() != here.masks).float().mean())
    assert torch.equal(there.labels.cpu(), here.labels) and pixels < 0.1 and masks < 1e-3, (pixels, masks)
    return {"pixels": pixels, "masks": masks}


@on_gpu
def cached_batches_never_wait(_: argparse.Namespace) -> dict[str, Any]:
    data = open_data("scenes", "train", limit=32, size=48)
    preprocess = small_teacher().preprocess
    errors = {}
    drawn = dict(mixup=0.5, jitter=0.4, grey=0.5)
    changes: dict[str, dict[str, Any]] = {
        "none": dict(augment="none"),
        "crop": dict(augment="crop"),
        "mixed": dict(augment="crop", **drawn),
        "pasted": dict(augment="crop", cutmix=1.0, **drawn),
    }
    for name, options in changes.items():
        stream = TrainStream(data, preprocess, 6, seed=4, cache="memory", device="cuda", **options)
        on_cpu = TrainStream(data, preprocess, 6, seed=4, cache="memory", **options)
        stream.batch(0)
        torch.cuda.set_sync_debug_mode("error")
        try:
            images = stream.batch(3)
            labels = stream.labels(3)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        errors[name] = float((images.cpu() - on_cpu.batch(3)).abs().max())
        assert labels.tolist() == on_cpu.labels(3).tolist()
    return errors


def run_options(folder: Path, **changes: Any) -> dict[str, Any]:
    options: dict[str, Any] = dict(phases=[2, 2], recipe="paper", budget="40steps", batch_size=16, train_images=128)
    options |= dict(num_images=16, lr=1e-3, out=str(folder), num_workers=0, device=DEVICE, average_last=0.5)
    return {**options, **changes}


def losses_of(folder: Path) -> list[float]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line["loss"] for line in lines if "loss" in line]


def stop_soon(folder: Path, num_lines: int) -> None:
    """SIGTERM to this process as soon as so many lines are logged."""

    def look() -> None:
        until = time.monotonic() + 60
        while time.monotonic() < until:
            path = folder / "metrics.jsonl"
            if path.exists() and len(path.read_text().splitlines()) >= num_lines:
                os.kill(os.getpid(), signal.SIGTERM)
                return
            time.sleep(0.005)

    threading.Thread(target=look, daemon=True).start()


@check
def a_run_is_compiled_captured_stopped_and_continued(args: argparse.Namespace) -> dict[str, Any]:
    """The default way (on a GPU compiled, a CUDA graph, bf16) against the plain one; stopped and continued or whole."""
    loop.LOG_EVERY = 2  # type: ignore[attr-defined]
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as place:
        root = Path(place)
        began = time.monotonic()
        whole: Any = distill(small_teacher(), "scenes", **run_options(root / "whole"))
        found |= {"seconds": time.monotonic() - began, "cuda_graph": whole.summary.cuda_graph}
        graphed = Job.graphed
        Job.graphed = lambda _: False  # type: ignore[method-assign, assignment]
        distill(small_teacher(), "scenes", **run_options(root / "plain", compile=False))
        Job.graphed = graphed  # type: ignore[method-assign]
        ours = losses_of(root / "whole")
        theirs = losses_of(root / "plain")
        found["loss_first_last"] = ours[0], ours[-1]
        found["largest_difference_to_plain"] = max(abs(a - b) / b for a, b in zip(ours, theirs))
        assert len(ours) == len(theirs) and found["largest_difference_to_plain"] < 0.05, (ours, theirs)
        assert found["cuda_graph"] == (DEVICE == "cuda")
        stop_soon(root / "cut", 4)
        try:
            distill(small_teacher(), "scenes", **run_options(root / "cut"))
            found["stopped"] = "no: it had ended"
        except Interrupted as error:
            found["stopped"] = str(error)
        cut: Any = distill(small_teacher(), "scenes", **run_options(root / "cut"))
        pairs = zip(shared_blocks(whole.surrogate).parameters(), shared_blocks(cut.surrogate).parameters())
        found["largest_difference_after_going_on"] = max(float((a - b).detach().abs().max()) for a, b in pairs)
        assert found["largest_difference_after_going_on"] < 1e-3, found
        assert len(losses_of(root / "cut")) >= len(ours)
        plan = distill(small_teacher(), "scenes", **run_options(root / "new", compile=False, dry_run=True))
        assert isinstance(plan, Plan) and not (root / "new").exists()
        found["planned_images_per_s"] = plan.on(1).images_per_s
    return found


@on_gpu
def validation_halves_its_batch(args: argparse.Namespace) -> dict[str, Any]:
    """After a real out-of-memory error, by a limit on what this process may take; the scores stay."""
    teacher = open_vit("timm/vit_small_patch14_reg4_dinov2", pretrained=False, num_classes=0).to("cuda")
    student = make_surrogate(teacher, (4, 4, 4), block="paper", conditioning="mlp")
    paths = [str(path) for path in (args.data / "imagenet-20-val.zip",) if path.exists()] or ["scenes"]
    data = open_data(paths, "all", limit=128, size=224)
    data.labels = None

    def validator() -> Validator:
        return Validator(teacher, data, data, "bf16", num_workers=4)

    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    fixed = torch.cuda.memory_allocated()
    before = validator().validate(student)
    peak = torch.cuda.max_memory_allocated()
    total = torch.cuda.get_device_properties(0).total_memory
    said = io.StringIO()
    small = validator()
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction((fixed + 0.6 * (peak - fixed)) / total)
    try:
        with contextlib.redirect_stderr(said):
            after = small.validate(student)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert small.val.batch_size < 128 and "no memory for batches of 128" in said.getvalue(), small.val.batch_size
    assert abs(before.r2_last - after.r2_last) < 5e-3, (before.r2_last, after.r2_last)
    return {"batch": small.val.batch_size, "r2_last": (before.r2_last, after.r2_last), "said": said.getvalue()}


@on_gpu
def nccl_with_one_rank(_: argparse.Namespace) -> dict[str, Any]:
    """A step in DDP over NCCL, objects over NCCL, and flags over gloo that do not wait for the GPU. The last check."""
    torch.cuda.set_device(0)
    with tempfile.TemporaryDirectory() as place:
        dist.init_process_group("nccl", init_method=f"file://{place}/meet", rank=0, world_size=1)
        try:
            module, images = small_step()
            module(images, "stage2")[0].backward()
            plain = gradients(module).clone()
            module.zero_grad()
            wrapped = nn.parallel.DistributedDataParallel(module, device_ids=[0], broadcast_buffers=False)
            wrapped(images, "stage2")[0].backward()
            error = distance(gradients(module), plain)
            objects: list[Any] = [None]
            dist.all_gather_object(objects, {"rank": 0})
            dist.broadcast_object_list(objects, 0)
            asked = Asked(2)
            first = asked.by_any(False, True)
            torch.cuda.synchronize()
            torch.cuda._sleep(600_000_000)
            work = dist.all_reduce(torch.ones(8, device="cuda"), async_op=True)
            began = time.monotonic()
            answers = [asked.by_any(True, False), asked.by_any(False, False), asked.by_any(False, False)]
            told = time.monotonic() - began
            work.wait()
            torch.cuda.synchronize()
            step = time.monotonic() - began
        finally:
            dist.destroy_process_group()
    assert objects == [{"rank": 0}] and error < 1e-5, (objects, error)
    assert [first, *answers] == [(False, False), (False, True), (True, False), (False, False)], answers
    assert told < step / 2, (told, step)
    return {"gradient_error": error, "flags_ms": 1000 * told, "gpu_busy_ms": 1000 * step}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path(os.environ.get("GPU_DATA", ".")), help="default: $GPU_DATA")
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", ".")), help="folder; default: $OUT")
    parser.add_argument("--only", nargs="*", default=None, help="names of checks")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    result: dict[str, Any] = {"device": torch.cuda.get_device_name() if DEVICE == "cuda" else "cpu"}
    result |= {"torch": torch.__version__, "checks": {}}
    for name, function in CHECKS.items():
        if args.only and name not in args.only:
            continue
        began = time.monotonic()
        try:
            outcome = {"passed": True, **function(args)}
        except Exception as error:
            traceback.print_exc()
            outcome = {"passed": False, "error": f"{type(error).__name__}: {error}"[:2000]}
        seconds = round(time.monotonic() - began, 1)
        result["checks"][name] = {**outcome, "check_seconds": seconds}
        print(f"{time.monotonic() - STARTED:6.1f} s  {'passed' if outcome['passed'] else 'FAILED'}  {name}", flush=True)
        (args.out / "gpu_checks.json").write_text(json.dumps(result, indent=1, default=str) + "\n")


if __name__ == "__main__":
    main()
