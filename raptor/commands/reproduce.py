"""raptor reproduce: a table or figure of the paper, by name. `raptor reproduce list` names them all."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from importlib import import_module
from typing import Any

EXPERIMENTS = {
    "figure1": "layer-layer similarity of seven families, side by side",
    "table1": "classification, segmentation and depth probes, the teacher against k = 2, 3, 4",
    "figure5": "accuracy as a share of the teacher's, and R2, against k, from table1",
    "stochastic-depth": "similarity, R2 and accuracy against stochastic depth p (Figure 4)",
    "partitions": "max-cut against random contiguous partitions (Figure 3)",
    "untrained": "a trained, an untrained and an overfitted teacher (Figure 11)",
    "swaps": "two blocks exchanged, within a phase and across phases",
    "ablation": "what each ingredient of the training adds (Table 2)",
    "claims": "paper says / we measured / agrees?, from the results of the experiments above",
    "budgets": "the default recipe against the paper's at the same short budget, over k",
}


def locate_experiment(name: str) -> str:
    """Where the function of the named experiment is, as `module:function`."""
    if name not in EXPERIMENTS:
        close = difflib.get_close_matches(name, EXPERIMENTS, n=1)
        hint = f": did you mean {close[0]}?" if close else f": choose from {', '.join(EXPERIMENTS)}"
        raise ValueError(f"unknown experiment {name!r}{hint}")
    return f"raptor.experiments.{name.replace('-', '_')}:run"


def experiment(name: str) -> Callable[..., Any]:
    """The function that runs the named experiment; its arguments are the command's options."""
    return import_module(locate_experiment(name).removesuffix(":run")).run


def reproduce(name: str, **options: Any) -> Any:
    """Run an experiment by name, with that experiment's own options; `list` prints the names."""
    if name == "list":
        width = max(map(len, EXPERIMENTS))
        print("\n".join(f"  {key:{width}}  {text}" for key, text in EXPERIMENTS.items()))
        return None
    return experiment(name)(**options)
