"""Every number of a few small runs, so that a change of the code can be shown to change none of them.

    python benchmarks/freeze.py --out before.json                          # in the tree before the change
    python benchmarks/freeze.py --out after.json --compare before.json     # in the tree after it, on the same machine

Four kinds of recipe are distilled for 20 steps on the built-in images, one of them also interrupted and resumed, and
`phases`, `evaluate`, `probe` and `dynamics` measure the built-in models. Losses and weights depend on the processor and
on the version of torch, so records are compared on one machine and are not kept in the tree. It takes about three
minutes on two cores; the exit code is 1 if a number differs.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

RECIPES = {
    "paper": ["--block", "paper", "--conditioning", "mlp", "--optimizer", "adamw", "--lr", "1e-3"],
    "copied": ["--optimizer", "adamw", "--lr", "1e-3"],
    "adapters": ["--adapters", "4", "--optimizer", "adamw", "--lr", "1e-3"],
    "coordinate": ["--normalise", "coordinate", "--optimizer", "adamw", "--lr", "1e-3"],
    "muon": ["--optimizer", "muon", "--lr", "2e-3"],
}
_FEW = ["--data", "scenes", "--train_images", "256"]
DISTILL = ["distill", "scenes", "--data", "scenes", "--phases", "7", "3", "2", "--budget", "20steps"]
DISTILL += ["--batch_size", "16", "--train_images", "256", "--num_images", "64", "--device", "cpu"]
MEASUREMENTS = {
    "phases": ["phases", "scenes", "--data", "scenes", "--k", "2", "3", "4", "--num_images", "128"],
    "evaluate": ["evaluate", "scenes-k3", "--data", "scenes", "--num_images", "64", "--train_images", "128"],
    "classify": [
        "probe",
        "scenes-k3",
        "--task",
        "classify",
        "--data",
        "scenes",
        "--train_images",
        "256",
        "--budget",
        "2epochs",
    ],
    "depth": [
        "probe",
        "scenes-k3",
        "--task",
        "depth",
        "--data",
        "scenes",
        "--train_images",
        "128",
        "--budget",
        "1epochs",
    ],
    "dynamics": ["dynamics", "scenes-k3", "--data", "scenes", "--num_images", "64", "--sample_images", "4"],
}
NOT_NUMBERS = ("provenance", "seconds", "images_per_s", "folder", "out", "path", "command", "milliseconds", "run_time")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--compare", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        record = measure(Path(folder))
    args.out.write_text(json.dumps(record, indent=1))
    if args.compare is None:
        return 0
    differing = differences(json.loads(args.compare.read_text()), record)
    print("\n".join(differing) or "every number is equal to the last bit")
    return 1 if differing else 0


def measure(folder: Path) -> dict[str, Any]:
    record: dict[str, Any] = {}
    for name, options in RECIPES.items():
        out = folder / name
        run_raptor([*DISTILL, *options, "--out", str(out)])
        record[name] = training_record(out)
    out = folder / "resumed"
    interrupt([*DISTILL, *RECIPES["copied"], "--checkpoint_minutes", "0", "--out", str(out)])
    run_raptor([*DISTILL, *RECIPES["copied"], "--checkpoint_minutes", "0", "--out", str(out)])
    record["resumed"] = {"weights": weights_hash(out)}
    for name, words in MEASUREMENTS.items():
        out = folder / name
        run_raptor([*words, "--out", str(out), "--device", "cpu"])
        record[name] = {path.name: numbers(json.loads(path.read_text())) for path in sorted(out.glob("*.json"))}
    return record


def run_raptor(words: list[str]) -> None:
    print("raptor", *words, flush=True)
    subprocess.run([sys.executable, "-m", "raptor", *words], check=True, stdout=subprocess.DEVNULL)


def interrupt(words: list[str]) -> None:
    """Stop a run by SIGTERM, once it has a checkpoint. Ctrl-C is ignored by what a shell started in the background."""
    latest = Path(words[-1]) / "checkpoint" / "latest"
    process = subprocess.Popen([sys.executable, "-m", "raptor", *words], stdout=subprocess.DEVNULL)
    while not latest.exists() and process.poll() is None:
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    if process.wait() != 130:
        raise RuntimeError("the run ended before it could be interrupted: nothing was resumed")


def training_record(out: Path) -> dict[str, Any]:
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return {"weights": weights_hash(out), "metrics": numbers(lines)}


def weights_hash(out: Path) -> str:
    return hashlib.sha256((out / "surrogate" / "model.safetensors").read_bytes()).hexdigest()


def numbers(value: Any) -> Any:
    """The numbers of a result without times, paths and texts."""
    if isinstance(value, dict):
        kept = {key: numbers(entry) for key, entry in value.items() if key not in NOT_NUMBERS}
        return {key: entry for key, entry in kept.items() if entry not in (None, {}, [])}
    if isinstance(value, list):
        return [numbers(entry) for entry in value]
    return value if isinstance(value, int | float) else None


def differences(old: Any, new: Any, place: str = "") -> list[str]:
    """Where two records differ; an entry that only one of them has is a difference, too."""
    if isinstance(old, dict) and isinstance(new, dict):
        found = []
        for key in sorted({*old, *new}):
            found += differences(old.get(key), new.get(key), f"{place}/{key}")
        return found
    if isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        found = []
        for index, (one, other) in enumerate(zip(old, new)):
            found += differences(one, other, f"{place}/{index}")
        return found
    both_nan = isinstance(old, float) and isinstance(new, float) and math.isnan(old) and math.isnan(new)
    return [] if old == new or both_nan else [f"{place}: {str(old)[:80]} -> {str(new)[:80]}"]


if __name__ == "__main__":
    sys.exit(main())
