"""raptor report: one interactive page of a run folder."""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from raptor.config import ReportConfig
from raptor.data import ChosenData
from raptor.devices import pick_device
from raptor.files import RunError, WriteError, write_text
from raptor.provenance import Provenance, command
from raptor.report.page import build_page
from raptor.report.results import Results, read_results
from raptor.report.strips import ImagesFile, measure_strips, shown_images
from raptor.run import check_folder, unfinished
from raptor.streaming import Result, folder_of
from raptor.subject import Subject
from raptor.vit.open import open_vit
from raptor.vit.pair import OTHER_TEACHER, open_pair
from raptor.vit.saved import is_surrogate, saved_folder
from raptor.vit.view import ViT
from raptor.vit.weights import fingerprint


@dataclass
class Page(Result):
    """The page of a run folder. It stands for its file wherever a path is taken: `open(report(run))`.

    Attributes:
        path: the file, of `num_bytes` bytes.
        folder: the run folder.
        files: the results it shows, by name.
        notes: why a part could not be made.
    """

    path: Path
    folder: Path
    num_bytes: int
    files: list[str]
    notes: dict[str, str] = field(default_factory=dict)

    def __fspath__(self) -> str:
        return str(self.path)

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "path": str(self.path), "folder": str(self.folder)}

    def table_rows(self) -> list[dict[str, Any]]:
        """One row per result that the page shows."""
        return [{"file": f"{name}.json", "page": str(self.path)} for name in self.files]

    def text(self) -> str:
        return f"page written to {self.path} ({self.num_bytes / 1e6:.1f} MB)"


@command(ReportConfig)
def report(config: ReportConfig) -> Page:
    """One self-contained page of whatever a run folder holds."""
    folder = Path(folder_of(config.run))
    # A run that is still training may hold results of other commands, which have a page.
    if unfinished(folder) and not any(folder.glob("*.json")):
        raise RunError(unfinished(folder))
    results = read_results(folder)
    path = Path(config.out) if config.out else results.folder / "report.html"
    if path.is_dir():
        raise RunError(f"{path} is a folder: give the page's own name with --out, such as {path / 'report.html'}")
    # `--out summary.json` once wrote the page over the summary.
    if path.suffix not in (".html", ".htm"):
        raise RunError(f"{path} would not open as a page: give a name with --out that ends in .html")
    # Before images are followed through the models, which takes far longer than the page.
    check_folder(path.parent)
    if config.num_images == 0:
        results.images = None
        results.notes["images"] = "No images were asked for."
    else:
        _add_strips(results, config)
    page = build_page(results)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, page)
    return Page(path, results.folder, len(page.encode()), list(results.provenance()), results.notes)


def _is_measured(known: ImagesFile, chosen: ChosenData, config: ReportConfig, measured: Subject | None = None) -> bool:
    """Whether images.json holds what is asked for: as many of the same images, of the run's own teacher."""
    if (known.num_images, known.data, known.split) != (config.num_images, chosen.name, chosen.split):
        return False
    is_given = config.teacher is not None or config.weights is not None
    if isinstance(config.teacher, ViT) and known.subject is not None:
        is_given = config.teacher.fingerprint() != known.subject.weights
    if is_given or known.teacher.endswith(OTHER_TEACHER):
        return False
    try:
        found = shown_images(chosen, config.num_images, measured=measured)
    except ValueError:  # they changed, or are gone: what was measured of the run stays
        return True
    return any(found.fingerprint() == entry.fingerprint for entry in known.provenance.images)


def _add_strips(results: Results, config: ReportConfig) -> None:
    """Measure images.json unless it is there already. A model that cannot be opened leaves a note instead; data, a
    split or a teacher that was asked for and cannot be opened is an error."""
    # What somebody typed must open. What a run remembers may be gone, and the rest of the page does not need it.
    asked = config.data is not None or config.val is not None or config.split not in (None, "val")
    options = dict(vars(config))
    # A folder of plain results names its model and its images by them.
    subject, split = results.measured or (None, "")
    if subject is not None and not asked:
        options["data"] = subject.data
    measured = None
    try:
        chosen = ChosenData.of(results.folder, options)
        # Typed data may be the measured one too, such as images in memory, which no name opens.
        if subject is not None and chosen.name == subject.data and config.split in (None, split):
            measured = subject
            chosen = replace(chosen, split=split)
        # Images that were in memory cannot be opened again, whoever gives the model.
        if asked or (measured is not None and results.images is None):
            shown_images(chosen, config.num_images, measured=measured)
    except ValueError as error:
        if asked:
            raise
        _note(results, error)
        return
    if results.images is not None and _is_measured(results.images, chosen, config, measured):
        return
    started, device = time.monotonic(), pick_device(config.device)
    try:
        teacher, surrogate = open_models(results, config, device)
    except RunError:
        # A RunError is a ValueError too, but says something that the user has to decide.
        raise
    except (ValueError, OSError) as error:
        if config.teacher is not None or config.weights is not None:
            raise
        _note(results, error)
        return
    try:
        found = measure_strips(teacher, surrogate, chosen, config.num_images, measured)
    except RunError:
        raise
    except (ValueError, OSError) as error:  # a model without patches, for example
        _note(results, error)
        return
    results.images = replace(found, provenance=Provenance.since(started, device))
    results.check_models()
    with suppress(OSError, WriteError):  # the folder cannot be written to: the page goes elsewhere and has the images
        results.images.write(results.folder)


def _note(results: Results, error: Exception) -> None:
    """Say on the page why it has no images."""
    results.notes["images"] = f"The images could not be followed ({' '.join(str(error).split())})."


def open_models(results: Results, config: ReportConfig, device: str) -> tuple[ViT, ViT | None]:
    """Teacher and surrogate of a folder: the models saved there, else the one that its results or its config name.

    Other weights than those that the folder was made with are refused.
    """
    folder = results.folder
    teacher, weights = config.teacher, config.weights
    opening: dict[str, Any] = {"device": device, "trust_hub": config.trust_hub}
    if saved_folder(str(folder)) is not None:
        if weights is not None and not is_surrogate(folder):
            raise RunError(f"{folder} holds a model with its own weights: leave out --weights")
        opening["allow_other_teacher"] = config.allow_other_teacher
        surrogate, model = open_pair(folder, teacher=teacher, weights=weights, **opening)
        return model, surrogate
    known = results.config
    if results.measured is not None:
        subject, _ = results.measured
        known = {"model": subject.model, "size": subject.size, "fingerprint": subject.weights}
    if known.get("model") is None:
        raise ValueError(f"{folder} holds no model, and no config.yaml that names one")
    if teacher is not None and results.measured is None:
        raise RunError(f"{folder} holds no surrogate and has no teacher: leave out --teacher and --module")
    if not isinstance(teacher, ViT):  # an opened model has its own size
        opening["size"] = known.get("size")
    is_given = teacher is not None or weights is not None
    try:
        vit = open_vit(teacher or str(known["model"]), weights=weights or known.get("weights"), **opening)
    except ValueError as error:
        if results.measured is None or is_given:
            raise
        # Results name a weight file by its stem and a module by its class, which are no names to open.
        raise ValueError(f"{error}; raptor report {folder} --teacher MODEL, or --module, opens it") from error
    # Pictures of other weights would stand beside the results of the run's own.
    if (is_given or results.measured is not None) and fingerprint(vit.model) != known.get("fingerprint"):
        fault = f"{weights or vit.name} does not hold the weights that {folder} was made with"
        if is_given:
            raise RunError(f"{fault}: leave out {'--weights' if teacher is None else '--teacher and --module'}")
        raise ValueError(fault)
    return vit, None
