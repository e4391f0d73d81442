"""The rows of the paper's claims and their verdicts, from `claims.yaml` and the JSON of our runs."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from pathlib import Path

from model_claims import certificate_claims, depth_claims, phases_claims
from run_claims import experiment_claims, find_runs
from sweep import Json
from verdict import Claim, Verdict

PLACES = r"(Definition|Figure|Table|Section|Appendix) (\d+|[A-Z])"


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
    """Judge the paper's claims by the JSON of our runs, and write results/claims.json, the figures and the pages."""

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
