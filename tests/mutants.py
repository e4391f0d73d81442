"""Small faults put into the numerical modules one at a time, and how many of them the tests notice.

    python tests/mutants.py                          # every module below, twelve faults in each
    python tests/mutants.py raptor/phases/cut.py --num 30 --seed 1

A fault changes one operator, comparison or number. The tests named beside the module run on a copy of the tree; a fault
that they all pass survives and is printed. A fault takes a second or two, so this runs on demand and not in CI.
The exit code is 1 if fewer than 95 % of the faults are noticed, not counting the equivalents named below.
"""

from __future__ import annotations

import argparse
import ast
import compileall
import importlib
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import pytest

ROOT = Path(__file__).resolve().parents[1]
TIMEOUT_SECONDS = 300
WANTED_RATE = 0.95

TESTS = {
    "raptor/phases/cut.py": ["tests/phases/test_cut.py"],
    "raptor/phases/evidence.py": ["tests/phases/test_evidence.py"],
    "raptor/phases/similarity.py": ["tests/phases/test_similarity.py"],
    "raptor/phases/cka.py": ["tests/phases/test_cka.py"],
    "raptor/phases/outliers.py": ["tests/phases/test_outliers.py"],
    "raptor/phases/function.py": ["tests/phases/test_function.py"],
    "raptor/certificate/error_curves.py": ["tests/certificate/test_error_curves.py"],
    "raptor/certificate/bootstrap.py": ["tests/certificate/test_bootstrap.py"],
    "raptor/certificate/definition.py": ["tests/certificate/test_definition.py"],
    "raptor/certificate/ridge.py": ["tests/certificate/test_ridge.py"],
    "raptor/certificate/rate.py": ["tests/certificate/test_rate.py"],
    "raptor/train/losses.py": ["tests/train/test_losses.py"],
    "raptor/train/optimizer.py": ["tests/train/test_optimizer.py"],
    "raptor/data/augment.py": ["tests/data/test_augment.py"],
    "raptor/dynamics/dmd.py": ["tests/dynamics/test_dmd.py"],
    "raptor/dynamics/modes.py": ["tests/dynamics/test_modes.py"],
    "raptor/dynamics/rank.py": ["tests/dynamics/test_rank.py"],
    "raptor/dynamics/direction.py": ["tests/dynamics/test_direction.py"],
    "raptor/dynamics/stability.py": ["tests/dynamics/test_stability.py"],
    "raptor/dynamics/states.py": ["tests/dynamics/test_states.py", "tests/dynamics/test_rank.py"],
    "raptor/streaming.py": ["tests/test_streaming.py"],
}
LIBRARIES = ("torch", "torchvision", "timm", "scipy.stats", "sklearn.linear_model", "hypothesis", "lightning_fabric")
"""Loaded once, before the first fault."""

_TIE = "no total lies exactly at the tolerance"
_ONE_SHAPE = "all states of a batch have one shape"
_TOGETHER = "how many layers are measured at once changes no result"

EQUIVALENT: dict[str, dict[str, str]] = {
    "raptor/phases/cut.py": {
        "last = int(np.flatnonzero("
        "[across >= across.max() - tolerance -> across > across.max() - tolerance])[-1])": _TIE,
        "start = max(start for start, (_, gain) in best.items() if "
        "[gain >= top - tolerance -> gain > top - tolerance])": _TIE,
        "last = num_layers - np.argmax(([total_se >= threshold -> total_se > threshold])[::-1], axis=0)": _TIE,
    },
    "raptor/phases/evidence.py": {
        "if [largest < _ROUNDING -> largest <= _ROUNDING]:": "1 - s is a multiple of 2 ** -53, and 1e-6 is not",
    },
    "raptor/phases/similarity.py": {
        "MAX_CHUNK = [2 -> 3]**27  # how many numbers of the stacked states are held at once": _TOGETHER,
        "MAX_CHUNK = 2**[27 -> 28]  # how many numbers of the stacked states are held at once": _TOGETHER,
        "MAX_CHUNK = [2 ** 27 -> 2 * 27]  # how many numbers of the stacked states are held at once": _TOGETHER,
        "x_btd = states[[0 -> 1]]": _ONE_SHAPE,
        "num_tokens = states[[0 -> 1]].shape[0] * states[0].shape[1]": _ONE_SHAPE,
        "num_tokens = states[0].shape[0] * states[[0 -> 1]].shape[1]": _ONE_SHAPE,
        "num_tokens = states[0].shape[0] * states[0].shape[[1 -> 2]]": "weights of batches may have any common factor",
        "num_tokens = [states[0].shape[0] * states[0].shape[1] -> states[0].shape[0] / states[0].shape[1]]": (
            "weights of batches may have any common factor"
        ),
        "inverse = torch.where(std > 0, 1 / std, [0.0 -> 0.01])": "a coordinate that never varies is equal to its mean",
        "self._bad.watch(states[0], [1 -> 2] + mean_ld.square().sum(1)[None] + variance_ld.sum(1)[None])": (
            "only finite and above 0 is asked for"
        ),
        "self._first = torch.full((2, num_layers + 1), -[1 -> 2])": "every negative number stands for no batch",
        "if cka is not None and cka.num_images > [0 -> 1]:": "only batches of four images and more count",
        "diagonal = np.arange(matrix_rll.shape[[1 -> 2]])": "the matrices are square",
    },
    "raptor/phases/cka.py": {
        "hsic_ll = ([self._hsic_ll / self.num_images -> self._hsic_ll * self.num_images]).cpu().numpy()": (
            "a ratio of two such terms is the result"
        ),
    },
    "raptor/phases/outliers.py": {
        "norms_ltd = torch.stack("
        "[torch.linalg.vector_norm(x, dim=[0 -> 1], dtype=float_type(x)) for x in states[1:]])": (
            "both axes are summed over, one after the other"
        ),
    },
    "raptor/certificate/error_curves.py": {
        'STACKED_VALUES = {"cuda": [2 -> 3]**27, "cpu": 1}  '
        "# how many numbers of a model's states are measured at once, at most": _TOGETHER,
        'STACKED_VALUES = {"cuda": 2**[27 -> 28], "cpu": 1}  '
        "# how many numbers of a model's states are measured at once, at most": _TOGETHER,
        'STACKED_VALUES = {"cuda": [2 ** 27 -> 2 * 27], "cpu": 1}  '
        "# how many numbers of a model's states are measured at once, at most": _TOGETHER,
        'STACKED_VALUES = {"cuda": 2**27, "cpu": [1 -> 2]}  '
        "# how many numbers of a model's states are measured at once, at most": _TOGETHER,
        "_BYTES_EACH = [400 -> 401]  # free memory required per number: each takes about 20": _TOGETHER,
        "self._num_stacked = min("
        "STACKED_VALUES.get(device.type, [1 -> 2]), free_bytes(device) // _BYTES_EACH)": _TOGETHER,
        "together = max([1 -> 2], self._num_stacked // teacher_states[1].numel())": _TOGETHER,
        "together = max(1, self._num_stacked // teacher_states[[1 -> 2]].numel())": _ONE_SHAPE,
        "with full_precision(teacher_states[[0 -> 1]].device):": "all states are on one device",
        "if len(teacher_states[[0 -> 1]]) == 0:": _ONE_SHAPE,
        "if shapes[0] != shapes[1] or shapes[[0 -> 1]][1] != self.groups.num_tokens:": "both shapes are equal there",
    },
    "raptor/certificate/bootstrap.py": {
        "CHUNK = [100 -> 101]  # resamples made at once": "the draws are one stream, however it is cut",
        "flat = np.concatenate([c.reshape(len(c), -[1 -> 2]) for c in columns], axis=1)": (
            "numpy takes every negative length for the one that is left"
        ),
    },
    "raptor/certificate/definition.py": {
        "if [square <= 0 -> square < 0]:  # the norms vary so much that no ratio can be excluded": (
            "a difference of measured numbers is not exactly 0"
        ),
    },
    "raptor/certificate/ridge.py": {
        "best = (-[1.0 -> 1.26], 0.0)": "every accuracy is above -1",
        "best = (-1.0, [0.0 -> 0.01])": "every accuracy is above -1",
        "projected = vectors.T @ (z.T @ ([y - target -> y + target]))": "a constant is orthogonal to centred features",
        "return torch.empty([0 -> 1], device=vit.device), None": "only rank 0 fits",
    },
    "raptor/dynamics/states.py": {
        "if self.num_images is None or [self.num_images <= self.num_keep -> self.num_images < self.num_keep]:": (
            "with as many images as places both rules keep every image"
        ),
    },
    "raptor/dynamics/dmd.py": {
        "r = min(rank, int(([sigma > TOLERANCE * sigma[0] -> sigma >= TOLERANCE * sigma[0]]).sum()))": (
            "no singular value lies exactly at the tolerance"
        ),
    },
    "raptor/dynamics/stability.py": {
        "if ([t + e -> t - e] + layer) % ranks.size == ranks.rank:": (
            "the ranks get the paths in another order, and together follow all of them"
        ),
    },
}
"""Faults that change no result, by module and by the line with the fault marked in it, with the reason."""

COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
}
OPERATORS: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.Pow: ast.Mult,
}


@dataclass(frozen=True)
class Fault:
    """One changed line of a module."""

    module: str
    line: int
    before: str
    after: str
    source: str
    left: str = ""
    right: str = ""

    @property
    def name(self) -> str:
        """The line with the fault marked in it."""
        return f"{self.left}[{self.before} -> {self.after}]{self.right}"


def faults_of(module: str) -> list[Fault]:
    """All faults that can be put into a module, in the order of its lines."""
    text = (ROOT / module).read_text(encoding="utf-8")
    lines = text.splitlines()
    found = []
    for place in range(sum(1 for _ in _places(ast.parse(text)))):
        tree = ast.parse(text)
        node = list(_places(tree))[place]
        before = ast.unparse(node)
        left = lines[node.lineno - 1][: node.col_offset].lstrip()
        right = lines[node.end_lineno - 1][node.end_col_offset :].rstrip()
        _change(node)
        found.append(Fault(module, node.lineno, before, ast.unparse(node), ast.unparse(tree), left, right))
    return found


def _places(tree: ast.AST) -> Iterator[ast.expr]:
    """Expressions that can be changed; annotations and texts are not."""
    for node in ast.walk(tree):
        is_comparison = isinstance(node, ast.Compare) and type(node.ops[0]) in COMPARISONS
        is_operation = isinstance(node, ast.BinOp) and type(node.op) in OPERATORS and not _joins_text(node)
        is_number = isinstance(node, ast.Constant) and type(node.value) in (int, float)
        if is_comparison or is_operation or is_number:
            assert isinstance(node, ast.expr)
            yield node


def _joins_text(node: ast.BinOp) -> bool:
    """Whether an addition joins texts; changing it would only end in an error."""
    return _is_text(node.left) or _is_text(node.right)


def _is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str))


def _change(node: ast.expr) -> None:
    if isinstance(node, ast.Compare):
        node.ops[0] = COMPARISONS[type(node.ops[0])]()
    elif isinstance(node, ast.BinOp):
        node.op = OPERATORS[type(node.op)]()
    elif isinstance(node, ast.Constant):
        assert isinstance(node.value, int | float)
        node.value = node.value + 1 if isinstance(node.value, int) else node.value * 1.25 + 0.01


def is_noticed(fault: Fault, tree: Path) -> bool:
    """Whether the tests of the module fail with the fault in it.

    They run in a fork of this process, in which the libraries are loaded already: that takes most of a test's time.
    """
    path = tree / fault.module
    whole = path.read_text(encoding="utf-8")
    path.write_text(fault.source, encoding="utf-8")
    try:
        child = os.fork()
        if child == 0:
            run_tests(tree, TESTS[fault.module])
        return exit_code(child) != 0
    finally:
        path.write_text(whole, encoding="utf-8")


def prepare(module: str, tree: Path) -> None:
    """Compile everything but the module, and check that its tests pass without a fault."""
    compileall.compile_dir(tree / "raptor", quiet=2)
    path = tree / module
    for compiled in (path.parent / "__pycache__").glob(f"{path.stem}.*.pyc"):
        compiled.unlink()  # it could be taken for the module with a fault, which may be as long and as old
    whole = path.read_text(encoding="utf-8")
    if is_noticed(Fault(module, 0, "", "", whole), tree):
        raise SystemExit(f"the tests of {module} fail without a fault: {' '.join(TESTS[module])}")


def run_tests(tree: Path, tests: list[str]) -> NoReturn:
    """The tests on the modules of `tree`; their exit code ends this process."""
    code = 1
    try:
        os.chdir(tree)
        sys.path.insert(0, str(tree))
        silence = os.open(os.devnull, os.O_WRONLY)
        os.dup2(silence, 1)
        os.dup2(silence, 2)
        code = int(pytest.main(["-x", "-q", "-p", "no:cacheprovider", *tests]))
    finally:
        os._exit(code)


def exit_code(child: int) -> int:
    """The exit code of a child process; one that takes too long is stopped, and 1."""
    end = time.monotonic() + TIMEOUT_SECONDS
    while time.monotonic() < end:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.02)
    os.kill(child, signal.SIGKILL)  # a loop that no longer ends is noticed
    os.waitpid(child, 0)
    return 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("modules", nargs="*", default=list(TESTS))
    parser.add_argument("--num", type=int, default=12, help="faults per module, drawn at random")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    sys.dont_write_bytecode = True
    num_noticed = num_counted = 0
    for name in LIBRARIES:
        importlib.import_module(name)
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "tree"
        shutil.copytree(ROOT, tree, ignore=shutil.ignore_patterns(".git", ".venv", "runs", "site", "__pycache__"))
        for module in args.modules:
            prepare(module, tree)
            faults = [fault for fault in faults_of(module) if fault.name not in EQUIVALENT.get(module, {})]
            chosen = random.Random(args.seed).sample(faults, min(args.num, len(faults)))
            for fault in chosen:
                noticed = is_noticed(fault, tree)
                num_noticed += noticed
                num_counted += 1
                if not noticed:
                    print(f"survived: {module}:{fault.line}: {fault.name}", flush=True)
            print(f"{module}: {num_noticed} of {num_counted} noticed so far", flush=True)
    rate = num_noticed / num_counted
    print(f"{num_noticed} of {num_counted} faults noticed: {rate:.0%}")
    return 0 if rate >= WANTED_RATE else 1


if __name__ == "__main__":
    sys.exit(main())
