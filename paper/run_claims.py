"""The claims about our runs of the paper's experiments: sweeps, tables and swaps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import quantities
from sweep import Json, column, data_label, where
from verdict import SECTIONS, Claim, claim_of, figure_of, number_of, place_of, read

EXPERIMENTS = ("stochastic-depth", "untrained", "partitions", "swaps", "ablation", "table1")


def find_runs(folder: Path) -> dict[str, list[Path]]:
    """Experiment -> the JSON files of its runs, in `folder` and in the folders inside it."""
    found: dict[str, list[Path]] = {name: [] for name in EXPERIMENTS}
    for path in sorted([*folder.glob("*.json"), *folder.glob("*/*.json")]):
        saved = read(path)
        if isinstance(saved, dict) and saved.get("experiment") in found:
            found[saved["experiment"]].append(path)
    return found


def experiment_claims(runs: dict[str, list[Path]]) -> list[Claim]:
    """The claims of every experiment; those about the paper's own setting also where only another one was run."""
    claims = []
    for name, paths in runs.items():
        section = SECTIONS[name]
        has_papers_own = False
        for path in paths:
            run = read(path)
            has_papers_own |= _base(run) == "paper"
            image = path.with_name(f"{section['figure']}.png")
            for claim in _claims_of_swaps(run) if name == "swaps" else _claims_of_run(name, run):
                claim = replace(
                    claim,
                    on=label_among(path, paths),
                    source=place_of(path),
                    command=run["command"],
                    machine=run["device"] or "",
                    figure=figure_of(image),
                )
                claims.append(claim)
        # The paper's own setting, where only another one was run: a row to be tested.
        if not has_papers_own:
            for line in section["claims"]:
                if not is_of_one(line):
                    k = "2, 3, 4" if line["place"] == "Figure 3" else 3
                    claims.append(claim_of(line, section, line["says"].format(k=k, p=0.3, group="all")))
    return without_gaps(claims)


def _base(run: Json) -> str:
    """The recipe whose ingredients Table 2 adds: the paper's own, or another."""
    base: str = run["settings"].get("base", "paper")
    return base


def _claims_of_run(name: str, run: Json) -> list[Claim]:
    section = SECTIONS[name]
    with_base = ""
    if _base(run) != "paper":
        with_base = f", with the {_base(run)} recipe"
    claims = []
    for line in section["claims"]:
        for names in _names_of_run(name, line, run):
            place = line["place"].format(base=with_base)
            number = number_of(line, run, **names)
            claims.append(claim_of(line, section, line["says"].format(**names), number=number, place=place))
    return claims


def _names_of_run(name: str, line: Json, run: Json) -> list[Json]:
    """The names that a line is filled with: each k of partitions, each token group of untrained; none twice."""
    if name == "partitions" and "{k}" in line["says"]:
        return [{"k": k} for k in run["statistics"]]
    if name == "stochastic-depth" and len(set(column(run["rows"], "p"))) == 1:
        return []  # seeds at one p say nothing about a trend
    if name == "untrained" and line["number"][0] in ("by_training", "gain_over_null_by_training"):
        settings = run["settings"]
        if quantities.is_briefly_trained(settings):
            return []
        names = {"p": settings.get("p", 0.3), "k": settings.get("k", 3)}
        if "{group}" not in line["says"]:
            return [names]
        trained = where(run["rows"], kind="trained")
        groups = trained[0]["similarity"]["means"] if trained else ["all"]
        return [{**names, "group": group} for group in groups]
    return [{}]


def _claims_of_swaps(run: Json) -> list[Claim]:
    """A teacher of a sweep over p counts with the others; any other model is judged by itself, over images."""
    section = SECTIONS["swaps"]
    claims = []
    alone = where(run["rows"], p=None)
    if not run["rows"] or len(alone) < len(run["rows"]):
        for line in section["claims"]:
            if not is_of_one(line):
                claims.append(claim_of(line, section, number=number_of(line, run)))
    for row in alone:
        claims += swaps_of_one(quantities.swaps_of_model(row))
    return claims


def swaps_of_one(swaps: Json) -> list[Claim]:
    """The claims about one model: the turns of its last state, and its predictions where it makes any."""
    section = SECTIONS["swaps"]
    claims = []
    for line in section["claims"]:
        function, *_, without = line["number"]
        has_predictions = is_of_one(line) and swaps["stays"][without] is not None
        if function.startswith("turn") or has_predictions:
            claims.append(claim_of(line, section, number=number_of(line, swaps)))
    return claims


def is_of_one(line: Json) -> bool:
    """Whether a claim is only about single models: predictions are counted of these."""
    return "number" in line and line["number"][0].startswith("predictions")


def label_among(path: Path, paths: Sequence[Path]) -> str:
    """The label of a run and, where another run of the experiment has the same, the folder that it is in."""
    label = run_label(read(path))
    num = sum(run_label(read(other)) == label for other in paths)
    return label if num == 1 else f"{label} ({path.parent.name})"


def run_label(run: Json) -> str:
    """What a run was made on, in a few words: its teacher or weight file if it names one, and its data."""
    settings = run["settings"]
    names = []
    if settings.get("weights"):
        names.append(Path(settings["weights"]).stem)
    elif (settings.get("model") or "").startswith("timm/"):
        names.append(Path(settings["model"]).name)
    names.append(data_label(settings.get("data", "")))
    if run["experiment"] == "table1":  # there are several, which differ in it
        names.append(str(settings.get("budget", "")).replace("steps", " steps"))
    return ", ".join(filter(None, names))


def without_gaps(claims: Sequence[Claim]) -> list[Claim]:
    """The claims, without a run's empty rows for what another run has measured; what none has is kept once."""
    shown = {claim.says for claim in claims if claim.source and claim.number is not None}
    kept = []
    for claim in claims:
        is_empty = bool(claim.source) and claim.number is None
        if not is_empty or claim.says not in shown:
            kept.append(claim)
        if is_empty:
            shown.add(claim.says)
    return kept
