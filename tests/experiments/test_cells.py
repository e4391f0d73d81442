from __future__ import annotations

import errno
import fcntl
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from raptor.experiments.cells import Cell, Sweep, claim, do_cells, run_sweep, time_left
from raptor.run import RunError


def three(folder: Path, **options) -> Sweep:
    return Sweep(folder, tuple(Cell(name, {"value": i, **options}) for i, name in enumerate("abc")))


def square(calls: list[str], cell: Cell) -> dict:
    calls.append(cell.name)
    return {"square": cell.options["value"] ** 2, "nothing": float("nan")}


def test_a_sweep_keeps_each_result_in_its_own_file_and_does_nothing_twice(tmp_path: Path) -> None:
    calls: list[str] = []
    work = partial(square, calls)
    assert run_sweep(three(tmp_path), work, cells="c,a") == {
        "a": {"square": 0, "nothing": None},
        "c": {"square": 4, "nothing": None},
    }
    assert calls == ["a", "c"]
    assert list(run_sweep(three(tmp_path), work)) == ["a", "b", "c"]
    assert calls == ["a", "c", "b"]
    saved = json.loads((tmp_path / "cells" / "b.json").read_text())
    assert saved["options"] == {"value": 1} and saved["result"]["square"] == 1


def test_results_made_with_other_options_are_refused(tmp_path: Path) -> None:
    run_sweep(three(tmp_path, steps=10), partial(square, []), cells="a")
    with pytest.raises(RunError, match=r"steps: 10 -> 20.*another --out"):
        run_sweep(three(tmp_path, steps=20), partial(square, []))


def _images(fingerprint: str, num_images: int = 9) -> dict:
    return {"data": {"train": {"num_images": num_images, "fingerprint": fingerprint}}}


def test_results_made_on_other_images_are_refused_before_anything_runs(tmp_path: Path) -> None:
    calls: list[str] = []
    sweep, work = three(tmp_path, data="photos"), partial(square, calls)
    run_sweep(sweep, work, lambda: _images("old"), cells="a")
    with pytest.raises(
        RunError, match=r"a\.json was made on other images \(data, train: 9 \(old\) -> 8 \(new\)\)"
    ) as error:
        run_sweep(sweep, work, lambda: _images("new", 8))
    assert str(error.value).endswith(": choose another --out") and calls == ["a"]
    assert list(run_sweep(sweep, work, lambda: _images("old"))) == ["a", "b", "c"]
    with pytest.raises(RunError, match="was made on other images"):  # its results are not those of the new images
        run_sweep(sweep, work, lambda: _images("new"))


def test_results_of_earlier_versions_do_not_say_on_which_images(tmp_path: Path) -> None:
    sweep, work = three(tmp_path, data="photos"), partial(square, [])
    run_sweep(sweep, work, lambda: _images("old"), cells="a")
    saved = json.loads(sweep.path("a").read_text())
    del saved["images"]
    sweep.path("a").write_text(json.dumps(saved))
    assert list(run_sweep(sweep, work, lambda: _images("new"))) == ["a", "b", "c"]


def test_a_finished_sweep_is_put_together_where_its_images_are_not(tmp_path: Path) -> None:
    def gone() -> dict:
        raise ValueError("unknown data 'photos'")

    sweep, work = three(tmp_path, data="photos"), partial(square, [])
    run_sweep(sweep, work, lambda: _images("old"), cells="a")
    with pytest.raises(ValueError, match="unknown data"):
        run_sweep(sweep, work, gone)
    assert list(run_sweep(sweep, work, gone, cells="a")) == ["a"]


def test_a_cell_remembers_only_the_images_of_its_own_options(tmp_path: Path) -> None:
    """As the teacher of table1, which is not trained on --more_data."""
    sweep = Sweep(tmp_path, (Cell("teacher", {"value": 1, "data": "x"}),))
    images = _images("old")
    run_sweep(sweep, partial(square, []), lambda: {**images, "more_data": _images("first")["data"]})
    assert json.loads(sweep.path("teacher").read_text())["images"] == images
    run_sweep(sweep, partial(square, []), lambda: {**images, "more_data": _images("second")["data"]})


def test_unknown_cells_and_jobs_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no cell 'x': choose from a, b, c"):
        run_sweep(three(tmp_path), partial(square, []), cells="a,x")
    with pytest.raises(ValueError, match="jobs must be at least 1"):
        run_sweep(three(tmp_path), partial(square, []), jobs=0)


def breaks_on_b(folder: Path, cell: Cell) -> dict:
    if cell.name == "b" and not (folder / "mended").exists():
        raise RuntimeError("no luck")
    return {"name": cell.name}


def test_a_cell_that_fails_costs_no_other_and_is_tried_again(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    sweep, work = three(tmp_path), partial(breaks_on_b, tmp_path)
    assert list(run_sweep(sweep, work)) == ["a", "c"]
    assert "cell b failed: RuntimeError: no luck" in capsys.readouterr().err
    assert sweep.missing_names() == ["b"] and "no luck" in sweep.failed()["b"]
    (tmp_path / "mended").touch()
    assert list(run_sweep(sweep, work)) == ["a", "b", "c"]
    assert sweep.failed() == {}


HOLDER = """
import fcntl, sys, time
file = open(sys.argv[1], "a")
fcntl.flock(file, fcntl.LOCK_EX)
print("held", flush=True)
time.sleep(60)
"""


def test_a_claim_holds_while_its_process_lives_and_not_longer(tmp_path: Path) -> None:
    sweep, calls = three(tmp_path), []
    (tmp_path / "cells").mkdir()
    holder = subprocess.Popen([sys.executable, "-c", HOLDER, sweep.path("a", "claim")], stdout=subprocess.PIPE)
    try:
        assert holder.stdout is not None and holder.stdout.readline() == b"held\n"
        with claim(sweep.path("a", "claim")) as mine:
            assert not mine
        do_cells(sweep, partial(square, calls))
        assert calls == ["b", "c"]
    finally:
        holder.kill()
        holder.wait()
    do_cells(sweep, partial(square, calls))
    assert calls == ["b", "c", "a"]


def test_where_files_cannot_be_locked_the_cells_are_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def no_locks(_file: Any, _how: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    assert list(run_sweep(three(tmp_path), partial(square, []))) == ["a", "b", "c"]
    assert "cannot be locked (No locks available)" in capsys.readouterr().err


def slow(seconds: float, cell: Cell) -> dict:
    if cell.name == "b":
        time.sleep(seconds)
    return {"name": cell.name}


def test_max_seconds_stops_cleanly_in_the_middle_of_a_cell(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    began = time.monotonic()
    results = run_sweep(three(tmp_path), partial(slow, 30), max_seconds=0.3)
    assert time.monotonic() - began < 5
    assert list(results) == ["a"]
    assert "stopped with 2 cells left" in capsys.readouterr().err
    assert list(run_sweep(three(tmp_path), partial(slow, 0))) == ["a", "b", "c"]


def meet(folder: Path, cell: Cell) -> dict:
    """Waits until two processes are at work, so that it ends only if they work at the same time."""
    (folder / f"pid-{os.getpid()}").touch()
    deadline = time.monotonic() + 60
    while len(list(folder.glob("pid-*"))) < 2:
        assert time.monotonic() < deadline, "alone"
        time.sleep(0.02)
    with (folder / f"done-{cell.name}").open("a") as file:
        file.write(f"{os.getpid()}\n")
    return {"pid": os.getpid(), "loaders": multiprocessing.get_start_method()}


@pytest.mark.slow
def test_two_jobs_share_the_cells_and_do_each_once(tmp_path: Path) -> None:
    sweep = Sweep(tmp_path, tuple(Cell(str(i), {}) for i in range(6)))
    results = run_sweep(sweep, partial(meet, tmp_path), jobs=2)
    assert len(results) == 6
    assert os.getpid() not in {result["pid"] for result in results.values()}
    assert len(list(tmp_path.glob("pid-*"))) == 2
    assert {result["loaders"] for result in results.values()} == {multiprocessing.get_start_method()}
    for name, result in results.items():
        assert (tmp_path / f"done-{name}").read_text() == f"{result['pid']}\n"


def die_once(folder: Path, cell: Cell) -> dict:
    """The process that first works on cell 0 dies without a word."""
    meet(folder, cell)
    if cell.name == "0" and not (folder / "died").exists():
        (folder / "died").touch()
        os._exit(9)
    time.sleep(0.1)
    return {"pid": os.getpid()}


def test_another_process_takes_over_the_cell_of_one_that_died(tmp_path: Path, capfd: pytest.CaptureFixture) -> None:
    sweep = Sweep(tmp_path, tuple(Cell(str(i), {}) for i in range(4)))
    results = run_sweep(sweep, partial(die_once, tmp_path), jobs=2)
    assert list(results) == ["0", "1", "2", "3"]
    first, second = (tmp_path / "done-0").read_text().split()
    assert first != second and {r["pid"] for r in results.values()} == {int(second)}


def wait_for_long(cell: Cell) -> dict:
    time.sleep(300)
    return {"name": cell.name}


def test_max_seconds_stops_several_processes(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    began = time.monotonic()
    assert run_sweep(three(tmp_path), wait_for_long, jobs=2, max_seconds=2) == {}
    assert time.monotonic() - began < 200
    assert "stopped with 3 cells left" in capsys.readouterr().err


def test_sigterm_stops_several_processes(tmp_path: Path) -> None:
    timer = threading.Timer(2, os.kill, [os.getpid(), signal.SIGTERM])
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        run_sweep(three(tmp_path), wait_for_long, jobs=2)
    assert multiprocessing.active_children() == []


def test_time_left_comes_from_the_cells_that_are_done(tmp_path: Path) -> None:
    sweep = Sweep(tmp_path, tuple(Cell(str(i), {}) for i in range(5)))
    (tmp_path / "cells").mkdir()
    for name, seconds in (("0", 10.0), ("1", 30.0)):
        sweep.path(name).write_text(json.dumps({"options": {}, "seconds": seconds, "result": {}}))
    # Three cells of 20 s are left: two rounds of two processes.
    assert time_left(sweep, jobs=2) == "2 of 5 cells, about 40 s left"
    assert time_left(sweep, jobs=1) == "2 of 5 cells, about 1 min 00 s left"


def test_results_keep_the_device_their_cells_ran_on(tmp_path: Path) -> None:
    sweep = three(tmp_path)
    assert sweep.made() == {"cell_seconds": 0.0}
    run_sweep(sweep, partial(square, []), cells="a,b")
    assert sweep.made()["device"] == "cpu"
    path = sweep.path("b")
    saved = json.loads(path.read_text())
    versions = {**saved["versions"], "torch": "2.0"}
    path.write_text(json.dumps({**saved, "device": "NVIDIA H200", "seconds": 30, "versions": versions}))
    made = sweep.made()
    assert made["device"] == "cpu, NVIDIA H200" and made["cell_seconds"] >= 30
    assert made["versions"]["torch"].endswith(", 2.0") and made["versions"]["timm"] == saved["versions"]["timm"]
