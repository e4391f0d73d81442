"""The run folder: nothing is overwritten, a failed write is one line, what a checkpoint holds comes back."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
import yaml
from safetensors import SafetensorError

from raptor import run as run_module
from raptor.cli import main
from raptor.data import Preprocess, iterate, open_data
from raptor.files import RunError, write_text
from raptor.provenance import versions
from raptor.run import (
    Interrupted,
    ResultFile,
    Run,
    StopSignal,
    check_folder,
    check_stop,
    load_checkpoint,
    read_config,
    read_metrics,
    read_summary,
    unfinished,
)
from raptor.streaming import Array, ComplexArray, NotSaved, Record

CONFIG = {"model": "scenes", "recipe": {"lr": 1e-3, "crop_scale": (0.35, 1.0)}, "seed": 0}
TENSORS = {"w": torch.arange(6.0).view(2, 3), "step": torch.tensor(3.0)}


def test_a_checkpoint_comes_back(tmp_path):
    tensors = {**TENSORS, "half": torch.randn(3).bfloat16(), "turned": torch.randn(2, 3).T}
    with Run(tmp_path / "a" / "b", CONFIG) as run:
        assert run.load_checkpoint() is None
        run.save_checkpoint(7, tensors, {"step": 2, "stage": "stage2"})
        loaded, state = run.load_checkpoint() or ({}, {})
    assert state["step"] == 2 and state["stage"] == "stage2"
    assert loaded.keys() == tensors.keys()
    assert all(torch.equal(loaded[k], v) and loaded[k].dtype == v.dtype for k, v in tensors.items())
    assert run.latest() == tmp_path / "a" / "b" / "checkpoint" / "step-7"


def test_the_two_newest_are_kept_whatever_their_dates(tmp_path):
    with Run(tmp_path, CONFIG) as run:
        for number in (8, 9, 10, 11):
            run.save_checkpoint(number, TENSORS, {})
            os.utime(tmp_path / "checkpoint" / f"step-{number}", (10_000 - number, 10_000 - number))
    names = {p.name for p in (tmp_path / "checkpoint").iterdir()}
    assert names == {"step-10", "step-11", "latest"}


def test_a_save_that_was_killed_half_way_does_not_count(tmp_path):
    with Run(tmp_path, CONFIG) as run:
        run.save_checkpoint(1, TENSORS, {"step": 1})
        partial = tmp_path / "checkpoint" / "step-2.tmp"
        partial.mkdir()
        (partial / "tensors.safetensors").write_bytes(b"\0" * 10)
        assert (run.load_checkpoint() or ({}, {}))[1]["step"] == 1
        run.save_checkpoint(2, TENSORS, {"step": 2})
        assert (run.load_checkpoint() or ({}, {}))[1]["step"] == 2
        assert not partial.exists()
    orphan = tmp_path / "checkpoint" / "step-3"
    orphan.mkdir()
    assert (load_checkpoint(tmp_path) or ({}, {}))[1]["step"] == 2


def test_a_partial_checkpoint_of_a_killed_run_is_removed_at_the_next_start(tmp_path):
    with Run(tmp_path, CONFIG) as run:
        run.save_checkpoint(1, TENSORS, {"step": 1})
    partial = tmp_path / "checkpoint" / "step-2.tmp"
    partial.mkdir()
    (partial / "tensors.safetensors").write_bytes(b"half")
    (tmp_path / "checkpoint" / "latest.tmp").write_text("ste")
    with pytest.raises(RunError, match="another config"):
        Run(tmp_path, {**CONFIG, "seed": 1})
    assert partial.exists()  # the folder is not this run's
    with Run(tmp_path, CONFIG) as run:
        assert {path.name for path in (tmp_path / "checkpoint").iterdir()} == {"step-1", "latest"}
        assert (run.load_checkpoint() or ({}, {}))[1]["step"] == 1


def test_the_config_is_written_and_compared(tmp_path):
    with Run(tmp_path, CONFIG) as run:
        run.save_checkpoint(1, TENSORS, {})
    assert yaml.safe_load((tmp_path / "config.yaml").read_text())["recipe"] == {"lr": 1e-3, "crop_scale": [0.35, 1.0]}
    Run(tmp_path, CONFIG).close()
    changed = {**CONFIG, "recipe": {**CONFIG["recipe"], "lr": 2e-3}, "seed": 1}  # type: ignore[dict-item]
    with pytest.raises(RunError, match=r"another config \(--lr: 0\.001 -> 0\.002; --seed: 0 -> 1\)") as error:
        Run(tmp_path, changed)
    assert "\n" not in str(error.value)
    Run(tmp_path, CONFIG).close()  # the refusal let go of the lock


@pytest.mark.parametrize("name", ["surrogate", "teacher"])
def test_a_run_takes_no_folder_with_a_model_of_something_else(name, tmp_path):
    (tmp_path / name).mkdir()
    (tmp_path / name / "model.safetensors").write_bytes(b"weights")
    with pytest.raises(RunError, match=f"{name} holds a model of something else: choose another --out"):
        Run(tmp_path, CONFIG)
    (tmp_path / "config.yaml").write_text("model: x")  # a run that was stopped before its first checkpoint
    Run(tmp_path, CONFIG).close()


def test_a_teacher_is_the_same_by_every_spelling_of_its_path(tmp_path, monkeypatch):
    (tmp_path / "teacher").mkdir()
    monkeypatch.chdir(tmp_path)
    with Run(tmp_path / "run", {**CONFIG, "model": str(tmp_path / "teacher")}) as run:
        run.save_checkpoint(1, TENSORS, {})
    for spelling in ("teacher", "./teacher/"):
        Run(tmp_path / "run", {**CONFIG, "model": spelling}).close()
    with pytest.raises(RunError, match=r"--model: .*teacher -> other\)"):
        Run(tmp_path / "run", {**CONFIG, "model": "other"})


def test_a_folder_with_nothing_to_lose_takes_a_new_config(tmp_path):
    Run(tmp_path, CONFIG).close()
    Run(tmp_path, {**CONFIG, "seed": 5}).close()
    assert read_config(tmp_path)["seed"] == 5
    (tmp_path / "config.yaml").write_text("{half a conf")
    Run(tmp_path, CONFIG).close()
    assert read_config(tmp_path)["seed"] == 0
    with Run(tmp_path, CONFIG):
        (tmp_path / "summary.json").write_text('{"ok": 1}')
    with pytest.raises(RunError, match="seed: 0 -> 5"):
        Run(tmp_path, {**CONFIG, "seed": 5})
    assert read_summary(tmp_path) == {"ok": 1}


def test_a_folder_is_held_by_one_process(tmp_path, monkeypatch):
    with Run(tmp_path, CONFIG):
        with pytest.raises(RunError, match="in use by another process"):
            Run(tmp_path, CONFIG)
        monkeypatch.setenv("RANK", "1")
        reader = Run(tmp_path, CONFIG)
        reader.save_checkpoint(1, TENSORS, {})
        reader.log(a=1)
        assert {p.name for p in tmp_path.iterdir()} == {"config.yaml", "lock"}
        monkeypatch.delenv("RANK")
    Run(tmp_path, CONFIG).close()


def test_a_path_that_cannot_be_a_folder_is_one_line(tmp_path):
    (tmp_path / "file").write_text("mine")
    with pytest.raises(RunError, match="cannot write to") as error:
        Run(tmp_path / "file" / "run", CONFIG)
    assert "\n" not in str(error.value)
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.parametrize(
    "failure",
    [
        OSError(errno.ENOSPC, "No space left on device"),
        SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)"),
    ],
)
def test_a_full_disk_keeps_the_last_good_checkpoint(tmp_path, monkeypatch, failure):
    with Run(tmp_path, CONFIG) as run:
        run.save_checkpoint(1, TENSORS, {"step": 1})

        def save(_tensors: object, path: Path) -> None:
            path.write_bytes(b"half")
            raise failure

        monkeypatch.setattr(run_module, "save_file", save)
        with pytest.raises(RunError, match=r"the disk is full; the last good checkpoint is .*step-1$"):
            run.save_checkpoint(2, TENSORS, {"step": 2})
        assert {p.name for p in (tmp_path / "checkpoint").iterdir()} == {"step-1", "latest"}
        assert (run.load_checkpoint() or ({}, {}))[1]["step"] == 1


@pytest.fixture
def small_disk(tmp_path: Path):
    folder = tmp_path / "small"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=400k", "tmpfs", str(folder)], capture_output=True)
    if mounted.returncode:
        pytest.skip("needs the right to mount a small disk")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_a_disk_that_really_fills_up(small_disk):
    big = {"w": torch.zeros(200_000)}
    with Run(small_disk / "run", CONFIG) as run:
        with pytest.raises(RunError, match="the disk is full; no checkpoint was written yet"):
            run.save_checkpoint(1, big, {})
        run.save_checkpoint(1, TENSORS, {"step": 1})
        with pytest.raises(RunError, match=r"the disk is full; the last good checkpoint is .*step-1$"):
            run.save_checkpoint(2, big, {})
        assert (run.load_checkpoint() or ({}, {}))[1]["step"] == 1
        with pytest.raises(RunError, match="the disk is full"):
            with run.writing():
                write_text(small_disk / "run" / "summary.json", "x" * 500_000)
        assert read_summary(small_disk / "run") is None
        with pytest.raises(RunError, match="the disk is full"):
            run.log(long="x" * 500_000)


def damage(path: Path, how: str) -> None:
    if how == "truncated":
        path.write_bytes(path.read_bytes()[:-5])
    elif how == "overwritten":
        path.write_bytes(b"\xff" * path.stat().st_size)
    elif how == "missing":
        path.unlink()
    else:
        path.write_text("{")


@pytest.mark.parametrize(
    ("name", "how"),
    [
        ("tensors.safetensors", "truncated"),
        ("tensors.safetensors", "overwritten"),
        ("tensors.safetensors", "missing"),
        ("state.json", "truncated"),
        ("state.json", "overwritten"),
        ("state.json", "missing"),
        ("state.json", "half"),
    ],
)
def test_a_damaged_checkpoint_is_one_line_with_a_way_out(tmp_path, name, how):
    with Run(tmp_path, CONFIG) as run:
        run.save_checkpoint(1, TENSORS, {"step": 1})
        run.save_checkpoint(2, TENSORS, {"step": 2})
        damage(tmp_path / "checkpoint" / "step-2" / name, how)
        with pytest.raises(RunError, match=r"checkpoint .*step-2 .*write step-1 into .*latest, or choose") as error:
            run.load_checkpoint()
        assert "\n" not in str(error.value)
        (tmp_path / "checkpoint" / "latest").write_text("step-1")
        assert (run.load_checkpoint() or ({}, {}))[1]["step"] == 1


def test_an_empty_pointer_is_not_a_reason_to_delete_anything(tmp_path):
    with Run(tmp_path, CONFIG) as run:
        run.save_checkpoint(1, TENSORS, {"step": 1})
        (tmp_path / "checkpoint" / "latest").write_text("")
        with pytest.raises(RunError, match="write step-1 into") as error:
            run.load_checkpoint()
    assert "delete" not in str(error.value)


def test_metrics_are_cut_back(tmp_path):
    with Run(tmp_path, CONFIG) as run:
        for step in range(5):
            run.log(step=step)
        with (tmp_path / "metrics.jsonl").open("a") as file:
            file.write('{"step": 5, "lo')
        run.cut_metrics(3)
        assert run.num_logged() == 3
        run.log(step=3)
        lines = [json.loads(line)["step"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
        assert lines == [0, 1, 2, 3]
        run.cut_metrics(0)
        assert run.num_logged() == 0


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_the_first_signal_is_a_flag_and_the_second_acts(number):
    before = signal.getsignal(number)
    seen = []
    signal.signal(number, lambda *_: seen.append(1))
    try:
        with StopSignal() as stop:
            assert not stop.given
            signal.raise_signal(number)
            assert stop.given and not seen
            signal.raise_signal(number)
            assert seen == [1]
        signal.raise_signal(number)
        assert seen == [1, 1]
    finally:
        signal.signal(number, before)


def test_a_context_inside_another_is_that_one_and_batches_end_with_a_line():
    before = signal.getsignal(signal.SIGTERM)
    check_stop()
    with StopSignal() as outer:
        with StopSignal() as inner:
            assert inner is outer
            check_stop()
            signal.raise_signal(signal.SIGTERM)
        with pytest.raises(Interrupted, match="stopped between two batches"):
            check_stop()
        with pytest.raises(Interrupted):
            list(iterate(open_data("scenes", "val", limit=4), Preprocess(24, 24), 2))
    check_stop()
    assert signal.getsignal(signal.SIGTERM) is before
    with outer as again:
        assert not again.given


def test_a_checkpoints_state_is_amended_and_its_tensors_stay(tmp_path):
    with Run(tmp_path, {}) as run:
        run.amend_checkpoint({"step": 0})
        assert run.load_checkpoint() is None
        run.save_checkpoint(3, {"x": torch.ones(2)}, {"step": 3, "unvalidated": True})
        run.amend_checkpoint({"step": 3, "unvalidated": False})
        tensors, state = run.load_checkpoint() or ({}, {})
    assert (state["step"], state["unvalidated"]) == (3, False) and torch.equal(tensors["x"], torch.ones(2))


def test_signals_are_left_alone_off_the_main_thread():
    before = signal.getsignal(signal.SIGINT)
    states = []

    def work() -> None:
        with StopSignal() as stop:
            states.append((stop.given, signal.getsignal(signal.SIGINT) is before))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert states == [(False, True)]
    assert issubclass(Interrupted, ValueError)


def test_a_result_does_not_go_into_another_run(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name / "surrogate").mkdir(parents=True)
        (tmp_path / name / "config.yaml").write_text("k: 2\n")
    for of in ("a", "a/surrogate"):
        assert check_folder(tmp_path / "a", of=tmp_path / of) == tmp_path / "a"
    with pytest.raises(RunError, match="is a run of its own: choose another --out"):
        check_folder(tmp_path / "b", of=tmp_path / "a")
    assert check_folder(tmp_path / "new" / "deep", of="scenes") == tmp_path / "new" / "deep"
    assert not (tmp_path / "new").exists() and sorted(p.name for p in tmp_path.iterdir()) == ["a", "b"]


def test_a_folder_that_cannot_be_written_is_found_out_before_the_work(tmp_path, monkeypatch):
    def refuse(*_args, **_kwargs):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("pathlib.Path.write_text", refuse)
    with pytest.raises(RunError, match=r"cannot write to .*Permission denied"):
        check_folder(tmp_path / "out")


@dataclass
class Inner(Record):
    name: str
    share: float | None = None


@dataclass
class Found(ResultFile):
    FILE: ClassVar[str] = "found.json"

    count: int
    curve: Array
    values: ComplexArray
    pair: tuple[int, float | None]
    by_k: dict[int, Inner]
    inner: list[Inner] = field(default_factory=list)
    kept: NotSaved[str] = "memory"


def test_a_result_file_comes_back(tmp_path):
    curve, values = np.array([[1.0, np.nan], [0.0, 2.5]]), np.array([1 + 2j, -0.5j])
    found = Found(3, curve, values, (1, None), {2: Inner("a", 0.5)}, [Inner("b")], kept="other")
    path = found.write(tmp_path)
    saved = json.loads(path.read_text())
    assert saved.pop("provenance")["versions"] == versions()
    assert saved == {
        "count": 3,
        "curve": [[1.0, None], [0.0, 2.5]],
        "values": [[1.0, 2.0], [0.0, -0.5]],
        "pair": [1, None],
        "by_k": {"2": {"name": "a", "share": 0.5}},
        "inner": [{"name": "b", "share": None}],
    }
    path.write_text(json.dumps({**saved, "unknown": 1}))
    again = Found.read(tmp_path)
    assert again.to_dict() == saved and again.by_k == {2: Inner("a", 0.5)} and again.kept == "memory"
    np.testing.assert_array_equal(again.values, values)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"count": "3"}, "count: Input should be a valid integer"),
        ({"count": True}, "count: Input should be a valid integer"),
        ({"curve": {"a": 1}}, "curve: Input should be an array of numbers"),
        ({"curve": [[1.0], [1.0, 2.0]]}, "curve: Input should be an array of numbers"),
        ({"pair": [1]}, "pair.1: Field required"),
        ({"by_k": {"x": {}}}, "by_k.x.*: Input should be a valid integer"),
        ({"by_k": {"2": {}}}, "by_k.2.name: Field required"),
        ({"inner": [{"name": "a"}, [1]]}, r"inner.1: Input should be an object"),
        ({"inner": [{"name": "a", "share": "b"}]}, r"inner.0.share: Input should be a valid number"),
    ],
)
def test_a_wrong_type_names_the_file_and_the_key(tmp_path, change, message):
    path = Found(3, np.zeros(2), np.zeros(1, complex), (1, 0.5), {}).write(tmp_path)
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(RunError, match=message) as error:
        Found.read(tmp_path)
    assert str(path) in str(error.value) and "run the command" in str(error.value)


def test_a_missing_or_damaged_result_file_is_one_line(tmp_path):
    for text in (None, "{", "[1]"):
        if text is not None:
            (tmp_path / "found.json").write_text(text)
        with pytest.raises(RunError, match=r"found\.json cannot be read"):
            Found.read(tmp_path)


def test_a_run_under_nohup_ignores_the_closed_terminal() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with StopSignal() as stop:
            signal.raise_signal(signal.SIGHUP)
        assert not stop.given
    finally:
        signal.signal(signal.SIGHUP, before)


def test_changed_images_are_refused_and_moved_ones_are_not(tmp_path: Path) -> None:
    def config(data: str, num: int, print_: str) -> dict[str, Any]:
        return {"data": data, "images": {"train": {"num_images": num, "fingerprint": print_}}, "seed": 0}

    with Run(tmp_path, config("photos", 64, "a")):
        (tmp_path / "summary.json").write_text("{}")
    with Run(tmp_path, config("elsewhere/photos", 64, "a")):
        pass
    for num, print_ in ((63, "b"), (64, "b")):
        with pytest.raises(RunError, match=rf"the train images changed since .* began \(64 -> {num} images"):
            Run(tmp_path, config("photos", num, print_))


def test_a_finished_run_with_another_budget_names_the_way_on(tmp_path):
    def config(budget: str, lr: float = 1e-3) -> dict[str, Any]:
        return {"recipe": {"budget": budget, "lr": lr}}

    with Run(tmp_path, config("200steps")):
        (tmp_path / "summary.json").write_text("{}")
    with pytest.raises(RunError, match=r"finished with a budget of 200steps: .* --start .* another --out"):
        Run(tmp_path, config("400steps"))
    with pytest.raises(RunError, match="another config"):
        Run(tmp_path, config("400steps", lr=1e-4))
    with Run(tmp_path, config("200steps")):
        assert read_config(tmp_path) == config("200steps")


def test_a_forked_process_does_not_keep_the_folder(tmp_path):
    """Processes that decode images outlive a run that was killed."""
    run = Run(tmp_path, CONFIG)
    (begun, says_begun), (end, says_end) = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        os.write(says_begun, b".")
        os.close(says_end)
        os.read(end, 1)
        os._exit(0)
    os.read(begun, 1)
    assert run._lock is not None
    run._lock.close()  # as when the process is killed: without a word to the lock
    try:
        Run(tmp_path, CONFIG).close()
    finally:
        os.close(says_end)
        os.waitpid(child, 0)


def test_a_disk_without_locks_is_used_all_the_same(tmp_path, monkeypatch, capsys):
    def refuse(*_args):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(run_module.fcntl, "flock", refuse)
    with Run(tmp_path, CONFIG) as run:
        run.save_checkpoint(1, TENSORS, {"step": 1})
    assert "cannot be locked (No locks available)" in capsys.readouterr().err


def test_half_a_line_of_metrics_does_not_count(tmp_path):
    with Run(tmp_path, CONFIG) as run:
        run.log(step=0)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 1')
    assert read_metrics(tmp_path) == [{"step": 0}]


def test_a_run_that_is_not_finished_says_how_far_it_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert unfinished(tmp_path) == ""
    (tmp_path / "config.yaml").write_text("model: scenes\n")
    assert unfinished(tmp_path) == (
        f"{tmp_path} is not finished (no step is logged yet): the same command that began it goes on"
    )
    lines = [{"stage": "stage1", "step": 53, "num_steps": 600, "loss": 1.0}, {"stage": "stage1", "step": 53, "r2": 0.1}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert "is not finished (stage1: step 54 of 600): the same command" in unfinished(tmp_path)
    for command in ("phases", "probe", "evaluate", "states", "report"):
        assert main([command, str(tmp_path)]) == 2
        assert "is not finished (stage1: step 54 of 600)" in capsys.readouterr().err
    (tmp_path / "summary.json").write_text("{}")
    assert unfinished(tmp_path) == ""
