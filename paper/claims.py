"""The claims of the paper and their verdicts, from `claims.yaml` and the JSON of our runs.

A claim says that a number lies between its bounds. It agrees where the whole 95 % interval does, disagrees where the
whole interval lies outside, and is undetermined in between. What depends on training needs at least three seeds, what
is measured of a given model an interval over images; with less than that it is undetermined. A run on a smaller budget
than the paper's may confirm what a surrogate reaches, but not refute it.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from math import hypot, inf, isfinite
from pathlib import Path
from typing import Any

import quantities
import yaml
from estimates import over_seeds
from quantities import Number
from scipy import stats
from sweep import Json, data_label, read_config, sum_of, write_json

ROOT = Path(__file__).parents[1]
SECTIONS: Json = yaml.safe_load((Path(__file__).parent / "claims.yaml").read_text())
EXPERIMENTS = ("stochastic-depth", "untrained", "partitions", "swaps", "ablation", "table1")
GROUPS = ("cls", "registers", "patches")
PLACES = r"(Definition|Figure|Table|Section|Appendix) (\d+|[A-Z])"
_ENOUGH = {"images": 16, "seeds": 3, "runs": 3, "counted": 0}
_OF_THE_CUT = ("similarity.within", "speed.jump", "speed.between", "attraction.")
"""Estimates that depend on where depth is cut: there an untrained model with a cut of its own is another comparison."""


class Verdict(StrEnum):
    """What an experiment says about a claim."""

    AGREES = "agrees"
    DISAGREES = "disagrees"
    UNDETERMINED = "undetermined"
    NOT_TESTED = "not tested at this budget"


@dataclass(frozen=True, kw_only=True)
class Claim:
    """One claim of the paper on one teacher: a row of the page.

    Attributes:
        place, says: where the paper makes it, and what it says. on: the teacher and the data.
        number: what decides; None where nothing was measured. above, below: its bounds.
        untrained: the same number of untrained models of the same make, each with its cut where that counts.
        source: the JSON file. command: what made it. machine: where it ran. figure: the picture.
        recipe: what would test the claim, where it was not tested.
    """

    place: str
    says: str
    on: str = ""
    number: Number | None = None
    above: float | None = None
    below: float | None = None
    untrained: tuple[tuple[Number, str], ...] = ()
    source: str = ""
    command: str = ""
    machine: str = ""
    figure: str = ""
    recipe: str = ""

    @property
    def verdict(self) -> Verdict:
        return judge(self.number, self.above, self.below)

    @property
    def untrained_too(self) -> bool | None:
        """Whether every untrained model beside it meets the bounds, too; None where there is none."""
        if not self.untrained:
            return None
        verdicts = [judge(number, self.above, self.below) for number, _ in self.untrained]
        return all(verdict is Verdict.AGREES for verdict in verdicts)

    def to_dict(self) -> Json:
        saved = dict(vars(self))
        saved["number"] = None if self.number is None else vars(self.number)
        saved["untrained"] = [{**vars(number), "cut": cut} for number, cut in self.untrained]
        return {**saved, "untrained_too": self.untrained_too, "verdict": str(self.verdict)}


def judge(number: Number | None, above: float | None, below: float | None) -> Verdict:
    """The verdict on a claim that the number lies between the bounds."""
    if number is None or number.value is None or not isfinite(number.value):
        return Verdict.NOT_TESTED
    verdict = _by_interval(number, -inf if above is None else above, inf if below is None else below)
    if verdict is Verdict.DISAGREES and number.smaller_budget:
        return Verdict.NOT_TESTED
    return verdict if number.num >= _ENOUGH[number.basis] else Verdict.UNDETERMINED


def _by_interval(number: Number, above: float, below: float) -> Verdict:
    """The verdict that the interval gives, however few seeds or images it rests on."""
    if number.lower is None or number.upper is None:
        return Verdict.UNDETERMINED
    if number.lower > above and number.upper < below:
        return Verdict.AGREES
    is_outside = number.upper <= above or number.lower >= below
    return Verdict.DISAGREES if is_outside else Verdict.UNDETERMINED


def claim_of(line: Json, section: Json, says: str | None = None, **given: Any) -> Claim:
    """A line of claims.yaml as a claim."""
    fields = {"place": line["place"].replace("{base}", ""), "says": says or line["says"]}
    fields["recipe"] = section.get("recipe", "")
    fields |= {name: line[name] for name in ("above", "below", "recipe") if name in line}
    return Claim(**{**fields, **given})


def read(path: Path) -> Json:
    found: Json = json.loads(path.read_text())
    return found


def place_of(path: Path) -> str:
    """The path as it stands in claims.json: below the repository where it is there."""
    return os.path.relpath(path, ROOT) if path.resolve().is_relative_to(ROOT) else str(path)


# Depth as a dynamical system


def depth_claims(folder: Path) -> tuple[list[Claim], list[Json]]:
    """The claims about the models in `folder`, and the untrained models beside them."""
    claims: list[Claim] = []
    untrained: list[Json] = []
    for path in trained_models(folder):
        model, twins = read(path), _twins(path)
        claims += _claims_of_model(path, model, twins)
        untrained += _described(model, twins)
        # Another run of the same model, for numbers that the first one does not hold.
        further = path.with_name(f"{path.stem}-further.json")
        if further.exists():
            said = {claim.says for claim in claims if claim.source == place_of(path)}
            claims += [claim for claim in _claims_of_model(further, read(further), twins) if claim.says not in said]
        interventions = path.with_name(f"{path.stem}-interventions.json")
        if interventions.exists():
            swaps = read(interventions)["teacher"]["swaps"]
            made = _swaps_of_one(quantities.swaps_of_interventions(swaps))
            claims += [
                _filled(replace(claim, figure="interventions-swaps"), interventions, _model_label(model))
                for claim in made
            ]
    if not claims:
        lines = SECTIONS["dynamics"]["claims"]
        claims = [claim_of(line, SECTIONS["dynamics"], line["says"].format_map(_EVERY)) for line in lines]
    witness = folder / "authors-vitb.json"
    if witness.exists():
        run = read(witness)
        for line in SECTIONS["witness"]["claims"]:
            claim = claim_of(line, SECTIONS["witness"], number=_number(line, run), source=place_of(witness))
            claims.append(replace(claim, on="the authors' ViT-B matrix"))
    return claims, untrained


class _Every(dict[str, str]):
    def __missing__(self, name: str) -> str:
        return "every group" if name == "g" else "each"


_EVERY = _Every()


def trained_models(folder: Path) -> list[Path]:
    """The results of `raptor dynamics` on trained models, where they hold estimates."""
    found = []
    for path in sorted(folder.glob("*.json")):
        saved = json.loads(path.read_text())
        has_estimates = isinstance(saved, dict) and (saved.get("teacher") or {}).get("estimates")
        if has_estimates and "-untrained" not in path.stem and not path.stem.endswith("-further"):
            found.append(path)
    return found


def _twins(path: Path) -> list[tuple[Path, Json]]:
    """The untrained models beside NAME.json, the one with the most images first."""
    files = [*path.parent.glob(f"{path.stem}-untrained.json"), *path.parent.glob(f"{path.stem}-untrained-*.json")]
    found = [(file, read(file)) for file in sorted(files)]
    return sorted(
        found, key=lambda twin: (-twin[1]["teacher"]["num_images"], -twin[1]["teacher"]["num_stability_images"])
    )


def _claims_of_model(path: Path, model: Json, twins: Sequence[tuple[Path, Json]]) -> list[Claim]:
    claims = []
    for line in SECTIONS["dynamics"]["claims"]:
        for names in _expansions(line, model["teacher"]):
            key = line["estimate"].format_map(names)
            number = _estimate(model, key)
            if number is None or not _has_paper_perturbations(key, model):
                continue
            beside = _untrained_beside(key, model, [twin for _, twin in twins])
            figure = line.get("figure", "")
            claim = claim_of(line, SECTIONS["dynamics"], line["says"].format_map(names), number=number, figure=figure)
            claims.append(replace(claim, untrained=tuple(beside)))
    claims += [*_basins(model), *_differences(model, [twin for _, twin in twins])]
    return [_filled(claim, path, _model_label(model)) for claim in claims]


def _expansions(line: Json, teacher: Json) -> Iterator[Json]:
    """The names that a line is filled with: each token group, each phase, or none."""
    if "{g}" in line["estimate"]:
        yield from ({"g": group} for group in GROUPS if group in teacher["direction"]["norm"])
    elif "{first}" in line["estimate"]:
        for number, phase in enumerate(teacher.get("attraction") or [], start=1):
            yield {"number": number, "first": phase["first"], "last": phase["last"]}
    else:
        yield {}


def _has_paper_perturbations(key: str, model: Json) -> bool:
    """The claims about perturbations are judged under the paper's own, whose size does not follow the state's norm."""
    stability = model["teacher"]["stability"]
    is_about_them = key.startswith(("sensitivity", "path", "attraction"))
    return not is_about_them or (stability is not None and stability["kind"] == "paper")


def _estimate(model: Json, key: str) -> Number | None:
    found = model["teacher"]["estimates"].get(key)
    if found is None:
        return None
    return Number(found["value"], found["lower"], found["upper"], "images", found["num_images"])


def _untrained_beside(key: str, model: Json, twins: Sequence[Json]) -> list[tuple[Number, str]]:
    """The number of the first untrained model; where it depends on the cut, of the first with each kind of cut."""
    found: list[tuple[Number, str]] = []
    for twin in twins:
        number = _estimate(twin, key)
        if number is None or number.value is None:
            continue
        cut = _cut(model, twin) if key.startswith(_OF_THE_CUT) else ""
        if not any(cut == other for _, other in found):
            found.append((number, cut))
    return found


def _cut(model: Json, twin: Json) -> str:
    alike = twin["phases"] == model["phases"]
    return f"{'cut alike' if alike else 'its own cut'}, {sum_of(twin['phases'] or [])}"


def _basins(model: Json) -> list[Claim]:
    basins, section = model["teacher"]["basins"], SECTIONS["basins"]
    if basins is None:
        return []
    (line,), num = section["claims"], sum(basins["images_per_class"])
    claims = []
    for group, found in basins["groups"].items():
        num_right = found["accuracy"][-1] * num
        ends = stats.binomtest(round(num_right), num).proportion_ci(0.95, method="wilson")
        number = Number(num_right / num, float(ends.low), float(ends.high), "images", num)
        claim = claim_of(line, section, line["says"].format(g=group), number=number, figure=line["figure"])
        claims.append(replace(claim, above=basins["chance"]))
    return claims


def _differences(model: Json, twins: Sequence[Json]) -> list[Claim]:
    """What training did to this model: its number minus that of each untrained seed.

    As in the paper each model has its own cut: one found on the trained model is not the best of an untrained one.
    """
    claims = []
    for line in SECTIONS["differences"]["claims"]:
        number = _difference(model, twins, line["estimate"])
        if number is not None:
            claims.append(claim_of(line, SECTIONS["differences"], number=number))
    return claims


def _difference(model: Json, twins: Sequence[Json], key: str) -> Number | None:
    trained = _estimate(model, key)
    known = [twin for twin in twins if key in twin["teacher"]["estimates"]]
    own_cut = [twin for twin in known if twin["phases"] != model["phases"]]
    by_seed: dict[int, Json] = {}
    for twin in own_cut or known:
        by_seed.setdefault(twin["seed"], twin)  # the same weights measured twice are not two seeds
    numbers = [_estimate(twin, key) for twin in by_seed.values()]
    values = [number.value for number in numbers if number is not None and number.value is not None]
    if trained is None or trained.value is None or not values:
        return None
    value, lower, upper = over_seeds([trained.value - other for other in values])
    if lower is None or upper is None or trained.lower is None or trained.upper is None:
        return Number(value, None, None, "seeds", len(values))
    half = hypot(upper - value, 0.5 * (trained.upper - trained.lower))
    return Number(value, value - half, value + half, "seeds", len(values))


def _described(model: Json, twins: Sequence[tuple[Path, Json]]) -> list[Json]:
    """What the page says of the untrained models: which rows show their numbers."""
    described: list[Json] = []
    cuts: set[bool] = set()
    for path, twin in twins:
        alike = twin["phases"] == model["phases"]
        shown = "every row" if not cuts else "differences" if alike in cuts else "rows about phases"
        cuts.add(alike)
        num, num_perturbed = twin["teacher"]["num_images"], twin["teacher"]["num_stability_images"]
        about = {"num_images": num, "num_perturbed": num_perturbed, "cut": _cut(model, twin), "shown_in": shown}
        name = model["teacher"]["model"]["name"]
        described.append({"of": name, "source": place_of(path), "command": twin["provenance"]["command"], **about})
    return described


def _model_label(model: Json) -> str:
    about = model["teacher"]["model"]
    return f"{about['name']} (L = {about['num_layers']}), {data_label(model['data'])}"


def _filled(claim: Claim, path: Path, label: str) -> Claim:
    """A claim with the file, the command, the machine and the figure it comes from."""
    stem = re.sub(r"-(interventions|paper|further)$", "", path.stem)
    image = path.parent / stem / f"{claim.figure}.png"
    made = read(path)["provenance"]
    return replace(
        claim,
        on=label,
        source=place_of(path),
        command=made["command"] or "",
        machine=made["device"] or "",
        figure=place_of(image) if claim.figure and image.exists() else "",
    )


# Phases and certificates


def phases_claims(folder: Path) -> list[Claim]:
    """The claims about models whose phases-NAME.json, cut by pooled tokens as the paper's, is in `folder`."""
    claims = []
    for path in sorted(folder.glob("phases-*.json")):
        image = path.with_suffix(".png")
        for model in read(path)["models"]:
            if model["tokens"] != "pooled":
                continue
            label = f"{Path(model['model']['name']).name}, {data_label(model['data'])}"
            for line in SECTIONS["phases"]["claims"]:
                number = _number(line, model)
                if number is not None:
                    claim = _filled(claim_of(line, SECTIONS["phases"], number=number), path, label)
                    claims.append(replace(claim, figure=place_of(image) if image.exists() else ""))
    return claims


def certificate_claims(folder: Path) -> list[Claim]:
    """The claims about surrogates whose NAME-certificate.json and NAME-complexity.json are in `folder`."""
    claims = []
    for path in sorted(folder.glob("*-certificate.json")):
        name = path.stem.removesuffix("-certificate")
        label = f"{name}, {data_label(read(path)['data'])}"
        complexity = path.with_name(f"{name}-complexity.json")
        for kind, source in (("certificates", path), ("complexity", complexity)):
            for line in SECTIONS[kind]["claims"] if source.exists() else ():
                image = path.parent / path.stem / f"{line.get('figure')}.png"
                claim = _filled(claim_of(line, SECTIONS[kind], number=_number(line, read(source))), source, label)
                claims.append(replace(claim, figure=place_of(image) if image.exists() else ""))
    if not claims:
        claims = [
            claim_of(line, SECTIONS[kind])
            for kind in ("certificates", "complexity")
            for line in SECTIONS[kind]["claims"]
        ]
    return claims


def _number(line: Json, run: Json, **names: object) -> Number | None:
    """The number that a line names, of a run."""
    if "number" not in line:
        return None
    function, *arguments = line["number"]
    filled = [argument.format(**names) if isinstance(argument, str) else argument for argument in arguments]
    measure: Callable[..., Number | None] = getattr(quantities, function)
    return measure(run, *filled)


# Experiments


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
                claim_of(line, section, _says_of_none(line)) for line in section["claims"] if not _is_of_one(line)
            ]
    return _without_gaps(claims)


def _claims_of_run(name: str, run: Json) -> list[Claim]:
    if name == "swaps":
        return _claims_of_swaps(run)
    section, claims = SECTIONS[name], []
    for line in section["claims"]:
        for names in _names_of_run(name, line, run):
            place = line["place"].format(base=_base(run))
            number = _number(line, run, **names)
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
    claims = [claim for row in named for claim in _swaps_of_one(quantities.swaps_of_model(row))]
    if run["rows"] and len(named) == len(run["rows"]):
        return claims
    section = SECTIONS["swaps"]
    of_sweep = [line for line in section["claims"] if not _is_of_one(line)]
    return [claim_of(line, section, number=_number(line, run)) for line in of_sweep] + claims


def _swaps_of_one(swaps: Json) -> list[Claim]:
    section, claims = SECTIONS["swaps"], []
    for line in section["claims"]:
        function, *_, without = line["number"]
        if function.startswith("turn") or (_is_of_one(line) and swaps["stays"][without] is not None):
            claims.append(claim_of(line, section, number=_number(line, swaps)))
    return claims


def _is_of_one(line: Json) -> bool:
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


# All claims


def _without_gaps(claims: Sequence[Claim]) -> list[Claim]:
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


def once_per_model(claims: Sequence[Claim]) -> list[Claim]:
    """The claims, without a second measurement of the same model and data: the narrowest interval decides.

    What depends on training stays: two runs of it are two experiments.
    """
    best: dict[tuple[str, str, str], Claim] = {}
    for claim in claims:
        if claim.number is not None and claim.number.basis == "images":
            key = _same_model(claim)
            if key not in best or _width(claim) < _width(best[key]):
                best[key] = claim
    return [c for c in claims if c.number is None or c.number.basis != "images" or best[_same_model(c)] is c]


def _same_model(claim: Claim) -> tuple[str, str, str]:
    without_depth_and_folder = re.sub(r" \(L = \d+\)| \([\w.-]+\)$", "", claim.on)
    return claim.place, claim.says, without_depth_and_folder


def _width(claim: Claim) -> float:
    number = claim.number
    if number is None or number.lower is None or number.upper is None:
        return inf
    return number.upper - number.lower


def in_order(claims: Sequence[Claim]) -> list[Claim]:
    """Claims by figure, table and section of the paper; rows of the same claim together."""
    first = list(dict.fromkeys((claim.place, claim.says) for claim in claims))
    kinds = PLACES[1 : PLACES.index(")")].split("|")

    def key(claim: Claim) -> tuple[int, int, str, int]:
        found, row = re.match(PLACES, claim.place), first.index((claim.place, claim.says))
        if found is None:
            return -1, 0, claim.place, row
        number = found[2]
        return kinds.index(found[1]), int(number) if number.isdigit() else 0, number, row

    return sorted(claims, key=key)


@dataclass(kw_only=True)
class Claims:
    """Judge the paper's claims by the JSON of our runs: results/claims.json, and the pages that show it."""

    results: str = "paper/results"
    """Folder of the experiments' results; claims.json is written there."""
    dynamics: str = "docs/results/dynamics"
    """Folder of the results of raptor dynamics."""
    certificates: str = "docs/results"
    """Folder of NAME-certificate.json and NAME-complexity.json of surrogates, and phases-NAME.json of models."""
    page: str | None = "docs/results/claims.md"
    """The page of the claims; none for no page."""


def evaluate(config: Claims) -> Json:
    """What claims.json holds: every claim, how many have each verdict, and the untrained models beside them."""
    of_depth, untrained = depth_claims(Path(config.dynamics))
    of_models = [*phases_claims(Path(config.certificates)), *certificate_claims(Path(config.certificates))]
    of_runs = experiment_claims(find_runs(Path(config.results)))
    claims = once_per_model(in_order([*of_depth, *of_models, *of_runs]))
    counts = {str(verdict): sum(claim.verdict is verdict for claim in claims) for verdict in Verdict}
    return {"claims": [claim.to_dict() for claim in claims], "counts": counts, "untrained": untrained}


def main(config: Claims) -> Json:
    from claims_page import claims_page, experiments_page

    found = evaluate(config)
    folder = Path(config.results)
    write_json(folder / "claims.json", found)
    (folder / "experiments.md").write_text(experiments_page(folder))
    if config.page is not None:
        Path(config.page).write_text(claims_page(found))
    print(", ".join(f"{num} {verdict}" for verdict, num in found["counts"].items()))
    return found


if __name__ == "__main__":
    main(read_config(Claims))
