"""raptor export: a surrogate for other programs."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from raptor.certificate.heads import Head, resolve_head
from raptor.config import ExportConfig
from raptor.data import ChosenData, ImageData, iterate
from raptor.data.chosen import default_data
from raptor.data.stream import Batch
from raptor.export.graphs import fixed, read_onnx, read_pt2, write_onnx, write_pt2
from raptor.export.measure import (
    NOISE,
    Export,
    ExportRow,
    Runner,
    check_parity,
    in_pytorch,
    measure_runners,
    noise,
    time_runners,
)
from raptor.export.weights import check_installed, stored_bytes, with_rounded_values, with_weights
from raptor.files import replacing, write_text
from raptor.provenance import Provenance, command
from raptor.run import RunError, check_folder, result_folder
from raptor.streaming import folder_of
from raptor.subject import Subject, check_place
from raptor.surrogate.at_speed import at_speed
from raptor.vit.card import model_card
from raptor.vit.open import open_vit
from raptor.vit.pair import open_pair
from raptor.vit.saved import needs_teacher, save_vit
from raptor.vit.view import ViT

# Of an output, relative to the largest one. In half precision the order of sums decides the third digit.
_TOLERANCES = {"fp32": 1e-4, "fp16": 2e-2, "int8": 1e-4, "int4": 1e-4}
TIMED_CALLS = 20  # of each way to run a model, at batch 1 and 32
_GRAPHS = ("pt2", "onnx")


@command(ExportConfig)
def export(config: ExportConfig) -> Export:
    """Write a surrogate for other programs, and measure the file: size, parity, speed, agreement with the teacher."""
    started = time.monotonic()
    if config.to == "onnx":  # before anything is opened
        check_installed("--to onnx", "onnx", "onnxscript", "onnxruntime")
    surrogate, teacher = _open_both(config)
    run = folder_of(config.run)
    folder = check_folder(config.out or result_folder(None, run, "export") / f"export-{config.to}-{config.weights}")
    chosen = _choose_images(config, surrogate)
    images = None
    if chosen is not None:
        images = chosen.judged(config.num_images, teacher.preprocess.size)
    subject = Subject.of(teacher, images, surrogate)
    check_place(folder, subject, Export.FILE)
    # A model's folder looks like this one, and its weights would be lost.
    if (folder / "model.safetensors").exists() and not (folder / Export.FILE).exists():
        raise RunError(f"{folder} holds a model that is no export: choose another --out")
    folder.mkdir(parents=True, exist_ok=True)
    head, told = _head_of(teacher, run, images)

    written = _write(config, surrogate, teacher, folder)
    # As it would be used in PyTorch: otherwise each call makes the factors of each layer again.
    runners = [in_pytorch("surrogate", at_speed(surrogate), surrogate, "fp32"), written]
    runners.append(in_pytorch("teacher", teacher, teacher, "fp32"))
    beside = _teacher_alike(config, teacher)
    if beside is not None:
        runners.append(beside)
    # Without images, noise still shows whether the file computes what the model does.
    batches: Iterable[Batch] = noise(teacher.preprocess.size)
    if images is not None:
        batches = iterate(images, teacher.preprocess, config.batch_size)
    num_images = measure_runners(runners, teacher, batches, head)
    # Before anything is timed: a file that computes something else has no times worth knowing.
    check_parity(written.row, _TOLERANCES[config.weights])
    time_runners(runners, teacher.preprocess.size, TIMED_CALLS)

    source = run if isinstance(run, str | Path) else None
    write_text(folder / "README.md", model_card(surrogate, source, _use(config, surrogate, "")))
    found = Export(
        to=config.to,
        weights=config.weights,
        use=_use(config, surrogate, f"{folder}/"),
        rows=[runner.row for runner in runners],
        num_images=num_images,
        data=NOISE if chosen is None else chosen.name,
        head=told,
        threads=torch.get_num_threads(),
        notes=_notes(config, teacher.preprocess.size),
        provenance=Provenance.since(started),
        subject=subject,
    )
    found.write(folder)
    return found


def _open_both(config: ExportConfig) -> tuple[ViT, ViT]:
    """The surrogate and its teacher, on the CPU: a file that is traced there runs anywhere."""
    # Its `weights` are the precision of the file, and not a weight file of the teacher.
    options = {name: value for name, value in config.opening().items() if name != "weights"}
    surrogate, model = open_pair(config.run, **options, device="cpu")
    if surrogate is None:
        raise ValueError(f"{model.name} is no surrogate: make one with raptor distill, and export its run")
    return surrogate, model


def _choose_images(config: ExportConfig, surrogate: ViT) -> ChosenData | None:
    """The images to compare on; None for a folder that is not of a run, where nobody has said which."""
    run = folder_of(config.run)
    is_given = config.data is not None or config.val is not None
    is_run = False
    if isinstance(run, str | Path):
        # `run/surrogate` lies in its run.
        is_run = (Path(run) / "config.yaml").is_file() or (Path(run).parent / "config.yaml").is_file()
    if is_given or is_run:
        return ChosenData.of(run, vars(config))
    # Who makes shared blocks whole may have no images yet.
    try:
        data = default_data(surrogate)
    except ValueError:
        return None
    return ChosenData.of(run, {**vars(config), "data": data})


def _head_of(teacher: ViT, run: Any, images: ImageData | None) -> tuple[Head | None, str]:
    """The head that decides on agreement: the teacher's own, or the one that `raptor evaluate` fitted and kept."""
    if images is None:
        return None, "no agreement: give images with --data"
    kept = None
    if isinstance(run, str | Path):
        kept = Path(run) / "head.safetensors"
    head, told = resolve_head(teacher, cache=kept)
    if head is None:
        told = "no agreement: the teacher has no head, and raptor evaluate has fitted none for this run"
    return head, told


def _write(config: ExportConfig, surrogate: ViT, teacher: ViT, folder: Path) -> Runner:
    """Write the file or folder, and open it again as another program does."""
    if config.to in _GRAPHS:
        return _write_graph(config, surrogate, "surrogate", folder / f"model.{config.to}")
    if config.to == "timm":
        view = _write_timm(config, surrogate, folder)
    else:
        save_vit(surrogate, folder, only_blocks=config.to == "blocks", half=config.weights == "fp16")
        view = open_vit(folder, teacher=teacher if needs_teacher(folder) else None, size=config.size)
    path = folder / "model.safetensors"
    row = ExportRow("surrogate", config.to, config.weights, path.stat().st_size)
    opened = in_pytorch("surrogate", view, surrogate, config.weights).exported
    return Runner(row, opened, surrogate, with_rounded_values(surrogate, config.weights))


def _write_graph(config: ExportConfig, vit: ViT, model: str, path: Path) -> Runner:
    """Write one graph and open it."""
    ready = fixed(with_weights(vit, config.weights))
    if config.to == "pt2":
        write_pt2(ready, path)
        exported = read_pt2(path, ready)
    else:
        states = write_onnx(ready, path, stored_bytes(vit, config.weights))
        exported = read_onnx(path, states)
    row = ExportRow(model, config.to, config.weights, path.stat().st_size)
    return Runner(row, exported, vit, with_weights(vit, config.weights))


def _write_timm(config: ExportConfig, surrogate: ViT, folder: Path) -> ViT:
    """Write a checkpoint and a configuration for timm, and open them with timm."""
    import timm

    from raptor.timm import model_arguments, tensors_for_timm, timm_config

    name, arguments = model_arguments(surrogate)
    path = folder / "model.safetensors"
    with replacing(path) as partial:
        save_file(tensors_for_timm(surrogate, config.weights), partial, metadata={"format": "pt"})
    write_text(folder / "config.json", json.dumps(timm_config(surrogate), indent=1) + "\n")
    model = timm.create_model(name, checkpoint_path=str(path), **arguments)
    structure = surrogate.structure().given()
    return open_vit(model, size=surrogate.preprocess.size, head_classes=surrogate.num_classes, **structure)


def _teacher_alike(config: ExportConfig, teacher: ViT) -> Runner | None:
    """The teacher in the same form and precision: what a surrogate saves, it must save beside that."""
    if config.to in _GRAPHS:
        with tempfile.TemporaryDirectory() as folder:  # read into memory at once
            return _write_graph(config, teacher, "teacher", Path(folder) / f"model.{config.to}")
    if config.weights == "fp32":
        # The teacher at full precision in PyTorch is a row already.
        return None
    return in_pytorch("teacher", with_rounded_values(teacher, config.weights), teacher, config.weights)


def _use(config: ExportConfig, surrogate: ViT, place: str) -> str:
    """How what was written is opened, as Markdown; `place` is the folder before the names of files."""
    size = surrogate.preprocess.size
    if config.to == "blocks":
        return (
            "The weights are only those of the tied blocks. With the teacher's own weight file they become a whole "
            f"surrogate:\n\n```bash\nraptor export {place or 'FOLDER'} --to folder --teacher FILE --out NEW\n```"
        )
    if config.to == "pt2":
        lines = [
            "import torch",
            f'model = torch.export.load("{place}model.pt2").module()',
            f"output = model(torch.zeros(1, 3, {size}, {size}))",
        ]
    elif config.to == "onnx":
        lines = [
            "import numpy",
            "import onnxruntime",
            f'session = onnxruntime.InferenceSession("{place}model.onnx")',
            f'output = session.run(None, {{"images": numpy.zeros((1, 3, {size}, {size}), "float32")}})[0]',
        ]
    elif config.to == "timm":
        from raptor.timm import model_arguments

        name, arguments = model_arguments(surrogate)
        shape = "".join(f", {key}={value!r}" for key, value in arguments.items())
        lines = [
            "import timm",
            "import raptor.timm",
            f'model = timm.create_model("{name}", checkpoint_path="{place}model.safetensors"{shape})',
        ]
    else:
        lines = ["from raptor import open_vit", f'vit = open_vit("{place or "FOLDER"}")']
    return "\n".join(["```python", *lines, "```"])


def _notes(config: ExportConfig, size: int) -> list[str]:
    found = []
    if config.to in _GRAPHS:
        found.append(f"the graph takes batches of any size, of images of {size} px")
    if config.weights == "int8" and config.to in _GRAPHS:
        found.append("int8 is torchao's: one scale per output row of each linear layer of the blocks")
    elif config.weights.startswith("int"):
        found.append(f"{config.weights} is raptor's own: one scale per output row of each linear layer of the blocks")
    return found
