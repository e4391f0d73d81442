"""raptor watch: alarms where a surrogate fails to follow its teacher, beside scores that need no surrogate."""

from __future__ import annotations

import csv
import io
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from raptor.commands.pair_job import SurrogateJob
from raptor.commands.tool import ToolResult, open_tool
from raptor.config import WatchConfig
from raptor.data import ImageData, open_data
from raptor.data.apart import check_apart
from raptor.data.stream import Batch
from raptor.files import write_text
from raptor.progress import Progress
from raptor.provenance import command
from raptor.recurrence.detection import Baselines, attack
from raptor.recurrence.watch import WATCHER, Judge, Judgement, Watcher, WatchFile, least_images, watch_findings
from raptor.report.charts import Chart
from raptor.report.strips import png, shown_picture
from raptor.report.tool import watch_charts
from raptor.streaming import folder_of
from raptor.vit.trajectory import autocast

ATTACKS = ("pgd", "pgd-aware")
ATTACK_EPS = 2.0  # largest change of a pixel, of 255
ATTACK_STEPS = 6
NUM_SHOWN = 2  # images of each set whose pictures are kept
_ATTACKED_IMAGES = 128  # each gradient step runs both models forwards and backwards


@dataclass
class Watching(ToolResult):
    """The result in watch.json and watch.csv; its figure has where in depth both models disagree."""

    measured: WatchFile

    def charts(self) -> list[Chart]:
        return watch_charts(self.measured)

    def table_rows(self) -> list[dict[str, Any]]:
        """One row per unusual set and score; without any, one for the images that were judged."""
        rows: list[dict[str, Any]] = []
        for one in self.measured.sets:
            for score, found in (one.scores or {}).items():
                row = {"set": one.name, "score": score, "AUROC": found.auroc, "FPR95": found.fpr95}
                rows.append({**row, "alarms": one.alarms if score == WATCHER else None})
        return rows or [{"set": one.name, "images": one.num_images, "alarms": one.alarms} for one in self.measured.sets]

    def text(self) -> str:
        found = self.measured
        lines = [
            f"watching {found.subject.teacher} with {found.subject.model}, calibrated on {found.num_calibration} "
            f"images of {found.calibration}; an alarm is a score above {found.threshold:.3g}"
        ]
        if any(one.scores for one in found.sets):
            lines.append(f"{'':<46} AUROC (95 %)          FPR at 95 % (95 %)")
        for one in found.sets:
            for score, value in (one.scores or {}).items():
                area = f"{value.auroc:.3f} ({value.auroc_interval[0]:.3f} to {value.auroc_interval[1]:.3f})"
                rate = f"{value.fpr95:.3f} ({value.fpr95_interval[0]:.3f} to {value.fpr95_interval[1]:.3f})"
                name = one.name.rsplit("/", 1)[-1]
                lines.append(f"  {name:<24} {score:<19} {area:<21} {rate}")
        return self.told(lines + found.findings, "watch.csv")


@command(WatchConfig)
def watch(config: WatchConfig) -> Watching:
    """Score images by how far a surrogate is from its teacher, and raise alarms at a wished rate."""
    job = open_tool(config, WatchFile)
    usual, judged = _calibration_and_judged(job, config)
    unusual = job.open_sets("unusual", judged, ATTACKS)
    watcher = Watcher(job.surrogate, job.teacher, job.precision)
    with Progress("calibration", len(usual), "images") as bar:
        watcher.calibrate(job.stream(usual, bar.update), config.false_alarms)
    # The other scores are compared on unusual sets only, so without any they are not fitted.
    baselines = None
    if unusual:
        baselines = Baselines(job.teacher, job.read_out(job.teacher), job.precision).fit(job.stream(usual))
    judge = Judge(watcher, baselines, NUM_SHOWN, lambda image: png(shown_picture(image, job.teacher)))
    judgements = [_judge_set(job, judge, judged.name, judged)]
    for name, data in unusual.items():
        if name not in ATTACKS:
            judgements.append(_judge_set(job, judge, name, data))
            continue
        batches, share_fooled = _attack(job, watcher, judged, knows_watcher=name == "pgd-aware")
        judgements.append(judge(name, batches, judged.names, fooled=share_fooled))
    # The usual images come first, and every AUROC is against them.
    sets = [one.compared(judgements[0]) for one in judgements]
    measured = WatchFile(
        **job.about(watch_findings(sets, config.false_alarms)),
        calibration=usual.name,
        num_calibration=len(usual),
        false_alarms=config.false_alarms,
        threshold=watcher.threshold,
        sets=sets,
        shown=[image for one in judgements for image in one.shown],
    )
    job.write(measured, watch_charts, measured.images)
    _write_table(judgements, job.folder)
    return Watching(measured, job.folder)


def _calibration_and_judged(job: SurrogateJob, config: WatchConfig) -> tuple[ImageData, ImageData]:
    """Images that say what is usual, and images that are judged: never the same ones."""
    if config.calibrate is None:
        # Every other image: a folder is sorted by class, and both halves need all of them.
        places = range(len(job.judged))
        usual = job.judged.select(places[0::2])
        least = least_images(config.false_alarms)
        if len(usual) < least:
            raise ValueError(
                f"{len(usual)} calibration images are too few for {config.false_alarms:.1%} false alarms: half of the "
                f"images calibrate, so give --num_images {2 * least} or more, or others with --calibrate"
            )
        return usual, job.judged.select(places[1::2])
    size = job.teacher.preprocess.size
    usual = open_data(config.calibrate, "own", limit=config.num_images, size=size, skip_bad=config.skip_bad)
    seen = job.data.trained_on(folder_of(config.run), size)
    if seen is not None:
        # A surrogate follows its teacher better on images that it was trained on: the threshold would be too low.
        check_apart(seen, usual, remedy="calibrate on others with --calibrate")
    remedy = "name others with --calibrate, or leave it out for half of --data"
    check_apart(usual, job.judged, "calibration images", remedy)
    return usual, job.judged


def _judge_set(job: SurrogateJob, judge: Judge, name: str, data: ImageData) -> Judgement:
    with Progress(f"watching {name}", len(data), "images") as bar:
        found = judge(name, job.stream(data, bar.update), data.names)
    return found


def _attack(job: SurrogateJob, watcher: Watcher, judged: ImageData, knows_watcher: bool) -> tuple[list[Batch], float]:
    """The images that an attack has fooled, and the share of all images that they are."""
    data = judged.select(judged.sample(min(_ATTACKED_IMAGES, len(judged))))
    vit = job.teacher
    head = job.head
    assert head is not None

    def logits_of(images: Tensor) -> Tensor:
        states, output = vit.record(images)
        return head.logits(vit, states[-1], output)

    # Images are normalised, so that one grey level is another step in each channel, and black and white other values.
    mean_c, deviation_c = torch.tensor(vit.preprocess.mean), torch.tensor(vit.preprocess.std)
    limit_c = ATTACK_EPS / 255 / deviation_c
    valid = (-mean_c / deviation_c, (1 - mean_c) / deviation_c)
    score_of = watcher.score if knows_watcher else None
    batches = []
    with Progress("attack", len(data), "images") as bar:
        for batch in job.stream(data, bar.update):
            # At the precision of the watcher, which would otherwise judge other scores than the attack has lowered.
            with autocast(job.precision, job.device):
                changed, is_fooled_b = attack(batch.images, logits_of, limit_c, ATTACK_STEPS, score_of, valid)
            # An image that keeps its class was not attacked with success, so it is no example of an unusual image.
            if bool(is_fooled_b.any()):
                batches.append(Batch(changed[is_fooled_b], None, batch.indices[is_fooled_b.cpu()]))
    return batches, sum(len(batch.images) for batch in batches) / len(data)


def _write_table(judgements: list[Judgement], folder: Path) -> None:
    # In memory first, so that the file is replaced as a whole.
    text = io.StringIO()
    # csv ends lines with CR LF by default, and tools for lines then show CR as part of the last cell.
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(("set", "image", "score", "alarm", "layer", "group"))
    for one in judgements:
        writer.writerows(one.rows())
    write_text(folder / "watch.csv", text.getvalue())
