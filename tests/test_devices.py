"""Full precision: TF32 is off inside whichever way it was turned on, and the settings come back."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from raptor import devices
from raptor.devices import full_precision, join_ranks, torch_defaults
from raptor.progress import started_processes
from raptor.vit.trajectory import autocast

CPU = torch.device("cpu")
MATMUL, CONV = torch.backends.cuda.matmul, torch.backends.cudnn.conv


@pytest.fixture(autouse=True)
def settings_restored():
    before = MATMUL.fp32_precision, CONV.fp32_precision
    yield
    MATMUL.fp32_precision, CONV.fp32_precision = before


@pytest.mark.parametrize("turn_on", ["new", "old"])
def test_tf32_is_off_inside_and_back_after(turn_on):
    if turn_on == "new":
        MATMUL.fp32_precision = "tf32"  # from here on torch refuses to read the old setting
    else:
        torch.set_float32_matmul_precision("high")
    try:
        with pytest.raises(KeyError), full_precision(CPU):
            assert (MATMUL.fp32_precision, CONV.fp32_precision) == ("ieee", "ieee")
            raise KeyError
        assert MATMUL.fp32_precision == "tf32" and CONV.fp32_precision == "tf32"
    finally:
        torch.set_float32_matmul_precision("highest")


def test_autocast_and_gradients_are_off_inside():
    x = torch.full((2, 2), 1.0009765, requires_grad=True)  # bfloat16 would round it to 1
    with torch.autocast("cpu", dtype=torch.bfloat16), full_precision(CPU):
        y = x @ torch.eye(2)
    assert y.dtype == torch.float32 and not y.requires_grad and y[0, 0] != 1


def test_one_process_is_all_ranks():
    ranks = join_ranks("cpu")
    assert ranks.is_first and ranks.size == 1 and not devices.dist.is_initialized()
    value = torch.arange(3)
    assert ranks.sum(value) is value and ranks.add_(value) is value and ranks.gather(5) == [5]
    assert ranks.share("abc") == "abc" and ranks.first(lambda: 7) == 7


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, (0, 1)),
        ({"RANK": "3", "WORLD_SIZE": "8"}, (3, 8)),
        ({"SLURM_PROCID": "2", "SLURM_NTASKS": "4", "SLURM_STEP_NUM_TASKS": "4"}, (2, 4)),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "4"}, (0, 1)),  # a batch script: srun did not start it
        ({"RANK": "1", "WORLD_SIZE": "2", "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "9"}, (1, 2)),
    ],
)
def test_torchrun_and_srun_say_how_many_there_are(monkeypatch, variables, expected):
    clear(monkeypatch)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert started_processes() == expected


def test_srun_must_say_how_many_processes_a_node_has(monkeypatch):
    clear(monkeypatch)
    for name, value in {"SLURM_PROCID": "0", "SLURM_NTASKS": "2", "SLURM_STEP_NUM_TASKS": "2"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match="srun --ntasks-per-node=N raptor"):
        join_ranks("cpu")


def clear(monkeypatch):
    for name in (
        "RANK",
        "WORLD_SIZE",
        "SLURM_PROCID",
        "SLURM_STEP_NUM_TASKS",
        "SLURM_NTASKS_PER_NODE",
        "TORCHELASTIC_RUN_ID",
    ):
        monkeypatch.delenv(name, raising=False)


def test_the_limit_of_a_job_counts_for_what_is_free(tmp_path: Path) -> None:
    """The tightest of the groups around a process, without cached files; a group without a limit says nothing."""
    groups = {
        "": ("max", 9, 0),
        "jobs": ("1000", 700, 50),
        "jobs/mine": ("max", 3, 0),
        "jobs/mine/step": ("900", 100, 0),
    }
    for name, (limit, used, cached) in groups.items():
        folder = tmp_path / "groups" / name
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "memory.max").write_text(f"{limit}\n")
        (folder / "memory.current").write_text(f"{used}\n")
        (folder / "memory.stat").write_text(f"anon 1\ninactive_file {cached}\n")
    (tmp_path / "own").write_text("4:memory:/other\n0::/jobs/mine/step\n")
    assert sorted(devices._left_in_groups(tmp_path / "own", tmp_path / "groups")) == [350, 800]
    assert devices._left_in_groups(tmp_path / "nothing", tmp_path / "groups") == []


def test_torch_has_its_defaults_inside_and_the_callers_settings_after():
    def settings():
        return (
            torch.is_inference_mode_enabled(),
            torch.is_grad_enabled(),
            torch.is_autocast_enabled("cpu"),
            torch.get_default_dtype(),
            torch.ones(1).device.type,
        )

    torch.set_default_dtype(torch.float64)
    try:
        with torch.inference_mode(), torch.autocast("cpu"), torch.device("meta"):
            before = settings()
            with pytest.raises(KeyError), torch_defaults():
                assert settings() == (False, True, False, torch.float32, "cpu")
                raise KeyError
            assert settings() == before == (True, False, True, torch.float64, "meta")
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("context", [torch_defaults, lambda: full_precision(torch.device("cpu"))])
def test_a_pass_under_autocast_sees_weights_that_have_changed_since_the_last_one(context):
    """Validations of a run in bf16 measured the weights of the first validation."""
    linear = torch.nn.Linear(4, 4)
    outputs = []
    with context(), torch.no_grad():
        for _ in range(2):
            with autocast("bf16", torch.device("cpu")):
                outputs.append(linear(torch.ones(1, 4)).float())
            linear.weight += 1
    assert torch.allclose(outputs[1] - outputs[0], torch.full((1, 4), 4.0), atol=0.05)


def test_a_process_of_no_launcher_is_told_so_at_once(monkeypatch):
    """torch would wait for the other process for hours, without a word."""
    clear(monkeypatch)
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match="WORLD_SIZE says 2 processes, and torchrun did not start this one: start"):
        join_ranks("cpu")
