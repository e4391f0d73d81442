"""The claims about our runs of the paper's experiments: sweeps, tables and swaps."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import quantities
from sweep import Json, data_label
from verdict import SECTIONS, Claim, claim_of, number_of, place_of, read

EXPERIMENTS = ("stochastic-depth", "untrained", "partitions", "swaps", "ablation", "table1")


def find_runs(folder: Path) -> dict[str, list[Path]]:
    """Experiment -> the JSON files of its runs, in `folder` and in the folders inside it."""
    found: dict[str, list[Path]] = {name: [] for name in EXPERIMENTS}
    for path in sorted([*folder.glob("*.json"), *folder.glob("*/*.json")]):
        saved = json.loads(path.read_text())
        name = saved.get("experiment") if isinstance(saved, dict) else None
        if name in found:
            found[name].append(path)
    return found


def experiment_claims(runs: dict[str, list[Path]]) -> list[Claim]:
    """The claims of every experiment; those about the paper's own setting also where only another one was run."""
    claims = []
    for name, paths in runs.items():
        section = SECTIONS[name]
        for path in paths:
            run = read(path)
            image = path.with_name(f"{section['figure']}.png")
            about = {"on": label_among(path, paths), "source": place_of(path), "command": run["command"]}
            about |= {"machine": run["device"] or "", "figure": place_of(image) if image.exists() else ""}
            claims += [replace(claim, **about) for claim in _claims_of_run(name, run)]
        # Table 2 adds the ingredients of the paper's own recipe.
        if not any(read(path)["settings"].get("base", "paper") == "paper" for path in paths):
            claims += [
                claim_of(line, section, _says_of_none(line)) for line in section["claims"] if not is_of_one(line)
            ]
    return without_gaps(claims)


def _claims_of_run(name: str, run: Json) -> list[Claim]:
    if name == "swaps":
        return _claims_of_swaps(run)
    section, claims = SECTIONS[name], []
    for line in section["claims"]:
        for names in _names_of_run(name, line, run):
            place = line["place"].format(base=_base(run))
            number = number_of(line, run, **names)
            claims.append(replace(claim_of(line, section, line["says"].format(**names), number=number), place=place))
    return claims


def _base(run: Json) -> str:
    base = run["settings"].get("base", "paper")
    return "" if base == "paper" else f", with the {base} recipe"


def _names_of_run(name: str, line: Json, run: Json) -> list[Json]:
    """The names that a line is filled with: each k of partitions, each token group of untrained; none twice."""
    if name == "partitions" and "{k}" in line["says"]:
        return [{"k": k} for k in run["statistics"]]
    if name == "stochastic-depth" and len({row["p"] for row in run["rows"]}) == 1:
        return []  # seeds at one p say nothing about a trend
    if name == "untrained" and line["number"][0] in ("by_training", "gain_over_null_by_training"):
        if quantities.is_briefly_trained(run["settings"]):
            return []
        names = {"p": run["settings"].get("p", 0.3), "k": run["settings"].get("k", 3)}
        if "{group}" not in line["says"]:
            return [names]
        trained = next((row for row in run["rows"] if row["kind"] == "trained"), None)
        groups = trained["similarity"]["means"] if trained is not None else ["all"]
        return [{**names, "group": group} for group in groups]
    return [{}]


def _says_of_none(line: Json) -> str:
    text: str = line["says"]
    return text.format(k="2, 3, 4" if line["place"] == "Figure 3" else 3, p=0.3, group="all")


def _claims_of_swaps(run: Json) -> list[Claim]:
    """A teacher of a sweep over p counts with the others; any other model is judged by itself, over images."""
    named = [row for row in run["rows"] if row.get("p") is None]
    claims = [claim for row in named for claim in swaps_of_one(quantities.swaps_of_model(row))]
    if run["rows"] and len(named) == len(run["rows"]):
        return claims
    section = SECTIONS["swaps"]
    of_sweep = [line for line in section["claims"] if not is_of_one(line)]
    return [claim_of(line, section, number=number_of(line, run)) for line in of_sweep] + claims


def swaps_of_one(swaps: Json) -> list[Claim]:
    section, claims = SECTIONS["swaps"], []
    for line in section["claims"]:
        function, *_, without = line["number"]
        if function.startswith("turn") or (is_of_one(line) and swaps["stays"][without] is not None):
            claims.append(claim_of(line, section, number=number_of(line, swaps)))
    return claims


def is_of_one(line: Json) -> bool:
    """Whether a claim is only about single models: predictions are counted of these."""
    return "number" in line and line["number"][0].startswith("predictions")


def label_among(path: Path, paths: Sequence[Path]) -> str:
    """The label of a run and, where another run of the experiment has the same, the folder that it is in."""
    label = run_label(read(path))
    is_only = sum(run_label(read(other)) == label for other in paths) == 1
    return label if is_only else f"{label} ({path.parent.name})"


def run_label(run: Json) -> str:
    """What a run was made on, in a few words: its teacher or weight file if it names one, and its data."""
    settings = run["settings"]
    model, weights = settings.get("model"), settings.get("weights")
    names = [data_label(settings.get("data", ""))]
    if weights:
        names.insert(0, Path(weights).stem)
    elif model and model.startswith("timm/"):
        names.insert(0, Path(model).name)
    if run["experiment"] == "table1":  # there are several, which differ in it
        names.append(str(settings.get("budget", "")).replace("steps", " steps"))
    return ", ".join(name for name in names if name)


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
