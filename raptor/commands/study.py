"""raptor study: what one model does with one's own images, in one folder: phases, dynamics and the page."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from raptor.commands.dynamics import dynamics
from raptor.commands.phases import phases
from raptor.commands.report import Page, report
from raptor.config import Config, DynamicsConfig, PhasesConfig, StudyConfig
from raptor.data import ChosenData, open_data
from raptor.data.stream import iterate
from raptor.devices import pick_device
from raptor.phases.cut import find_phases
from raptor.phases.study import PhasesFile
from raptor.progress import clock
from raptor.provenance import command, hash_config
from raptor.report.results import read_results
from raptor.run import RunError, read_json, result_folder
from raptor.streaming import Result, folder_of
from raptor.vit.pair import open_pair
from raptor.vit.trajectory import Trajectories
from raptor.vit.view import ViT

QUICK_DYNAMICS: dict[str, Any] = {"num_images": 128, "sample_images": 6}
QUICK_IMAGES = 256
_NUM_TIMED = 4
_NUM_SHOWN = 4
# Forward passes that `dynamics` takes for one image: a perturbed image is followed from each layer to the end, for four
# token groups and three sizes; an image of the interventions passes through all pairs of swapped blocks.
_PASSES_PERTURBED = 4 * 3 * 7
_PASSES_INTERVENED = 50


@dataclass
class Study(Result):
    """What a study found: the lines that the commands print, and the page."""

    folder: Path
    page: Page
    findings: list[str]

    def to_dict(self) -> dict[str, Any]:
        return {"folder": str(self.folder), "page": self.page.to_dict(), "findings": self.findings}

    def table_rows(self) -> list[dict[str, Any]]:
        """One row for each line."""
        return [{"finding": line} for line in self.findings]

    def text(self) -> str:
        return "\n".join([*self.findings, f"the page: {self.page.path}"])


@command(StudyConfig)
def study(config: StudyConfig) -> Study:
    """Phases and dynamics of one model on one's own images, and the page of both."""
    folder = result_folder(config.out, config.model, "study", config.weights_name())
    # Said before the model is opened, which may take half a minute.
    ChosenData.of(folder_of(config.model), vars(config))
    surrogate, model = open_pair(config.model, device=pick_device(config.device), **config.opening())
    source = config.model
    if isinstance(source, str) and source == model.opened.weights:
        # Each command would look again for the only model that the weight file fits.
        source = f"{model.opened.model}@{source}"
    # Both commands have all options of a study but its own.
    shared = {**vars(config), "out": str(folder)}
    del shared["model"], shared["full"]
    quick_phases: dict[str, Any] = {"num_images": QUICK_IMAGES}
    quick_dynamics = QUICK_DYNAMICS
    if config.full:
        quick_phases = {}
        quick_dynamics = {}
    for_phases = PhasesConfig(models=[source], **quick_phases, **shared)
    for_dynamics = DynamicsConfig(model=source, **quick_dynamics, **shared)
    if config.data is not None:
        _tell_time(model, config, for_phases, for_dynamics)
    findings = _unless_done(folder, "phases", for_phases, phases)
    if surrogate is None:
        # The page shows one cut, which is the one that the phases suggest.
        for_dynamics = replace(for_dynamics, phases=_suggested(folder))
    findings += _unless_done(folder, "dynamics", for_dynamics, dynamics)
    page = report(
        str(folder),
        num_images=_NUM_SHOWN,
        data=config.data,
        val=config.val,
        split=config.split,
        device=config.device,
        trust_hub=config.trust_hub,
        # The results name a model in a way that does not open a weight file or a module. A run names its own.
        teacher=None if read_results(folder).measured is None else model,
    )
    return Study(folder, page, findings)


def _suggested(folder: Path) -> list[int] | None:
    """The phases at the k that phases.json suggests; None where it suggests none."""
    (found,) = PhasesFile.read(folder).models
    if found.structure:
        return None
    return list(find_phases(found.matrix, found.chosen_k))


def _unless_done(folder: Path, name: str, config: Config, run: Callable[[Any], Any]) -> list[str]:
    """Run one command and give the lines that it prints, unless the folder holds its result for these options."""
    path = folder / f"{name}.json"
    wanted = hash_config({"command": f"raptor.commands.{name}.{name}", **vars(config)})
    try:
        # The hash is of the options that decide the numbers, so a result of other options is measured again.
        is_there = path.is_file() and read_json(path)["provenance"]["config"] == wanted
    except (RunError, KeyError, TypeError):
        is_there = False
    if is_there:
        print(f"{name}: {path} is there already", file=sys.stderr, flush=True)
        return []
    return str(run(config).text()).splitlines()


def _tell_time(vit: ViT, config: StudyConfig, for_phases: PhasesConfig, for_dynamics: DynamicsConfig) -> None:
    """Say about how long the study takes, from the time of a few forward passes."""
    assert config.data is not None
    images = open_data(config.data, "all", size=vit.preprocess.size, skip_bad=config.skip_bad)
    timed = images.select(range(min(_NUM_TIMED, len(images))))
    batches = list(iterate(timed, vit.preprocess, _NUM_TIMED, device=vit.device))
    started = time.monotonic()
    for _ in Trajectories(vit, batches):
        pass
    if vit.device.type == "cuda":
        # Kernels are only queued until here, so the clock would show the time of the host.
        torch.cuda.synchronize()
    seconds = (time.monotonic() - started) / sum(len(batch.images) for batch in batches)
    passes = min(for_phases.num_images, len(images)) + 2 * min(for_dynamics.num_images, len(images))
    passes += (_PASSES_PERTURBED + _PASSES_INTERVENED) * min(for_dynamics.sample_images, len(images))
    print(f"study of {vit.name}: about {clock(passes * seconds)} on this machine", file=sys.stderr, flush=True)
