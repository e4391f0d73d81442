"""Where a result came from."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass, field

import pytest
import torch

from raptor.config import OnDevice
from raptor.provenance import (
    Provenance,
    as_arguments,
    command,
    hash_config,
    module_option,
    note_images,
    stamped,
    versions,
)


@pytest.mark.parametrize(
    ("program", "command"),
    [
        ("/usr/bin/raptor", "raptor phases 'my model' --k 2"),
        ("/x/raptor/__main__.py", "raptor phases 'my model' --k 2"),
        ("benchmarks/scenes.py", "python scenes.py phases 'my model' --k 2"),
    ],
)
def test_the_command_can_be_pasted_into_a_shell(monkeypatch: pytest.MonkeyPatch, program: str, command: str) -> None:
    monkeypatch.setattr(sys, "argv", [program, "phases", "my model", "--k", "2"])
    found = Provenance.since(time.monotonic() - 2.0)
    assert found.command == command
    assert found.device == "cpu" and found.seconds == pytest.approx(2.0, abs=0.2)
    assert found.versions["torch"] == torch.__version__ and found.versions == versions()


def test_a_provenance_comes_back() -> None:
    made = Provenance.since(time.monotonic())
    assert Provenance.from_dict(made.to_dict()) == made


@dataclass(kw_only=True)
class MeasureConfig(OnDevice):
    POSITIONAL = ("model",)

    model: str = field(kw_only=False)
    k: int = 2
    out: str = "runs"
    size: int | None = None


@dataclass
class Named:
    name: str

    def __len__(self) -> int:
        return 3

    def fingerprint(self) -> str:
        return self.name * 32


@command(MeasureConfig)
def measure(config: MeasureConfig) -> Provenance:
    """Measures nothing."""
    for name in ("b", "a", "b"):
        note_images(Named(name), 3)
    return Provenance.here()


def test_a_command_leaves_its_options_and_images_in_its_results() -> None:
    found = measure("scenes")
    assert [entry.name for entry in found.images] == ["a", "b"] and found.versions == versions()
    same = (
        measure("scenes", k=2),
        measure(model="scenes", out="elsewhere"),
        measure(MeasureConfig("scenes", device="cpu")),
    )
    assert {about.config for about in same} == {found.config}
    others = (measure("scenes", k=3), measure("scenes-k2"), measure("scenes", size=32))
    assert len({found.config, *(about.config for about in others)}) == 4
    assert Provenance.here().config is None and Provenance.here().images == []  # outside of a command
    assert "raptor.config.MeasureConfig" in (measure.__doc__ or "")


def test_a_file_is_stamped_with_what_it_lacks() -> None:
    plain = stamped({"score": 1.0})
    assert plain["score"] == 1.0 and plain["provenance"]["versions"] == versions()
    kept = stamped({"provenance": {"command": "raptor phases scenes", "versions": {"torch": "1"}, "seconds": 2.0}})
    assert kept["provenance"]["versions"] == {"torch": "1"} and kept["provenance"]["seconds"] == 2.0


def test_a_hash_does_not_depend_on_the_order_or_on_the_machine() -> None:
    assert hash_config({"a": 1, "b": [1.5, "x"]}) == hash_config(
        {"b": (1.5, "x"), "a": 1, "out": "y", "num_workers": 3}
    )
    assert hash_config({"a": 1}) != hash_config({"a": 2})


def test_the_module_of_a_command_is_named_again() -> None:
    assert module_option(None, "mine.py:make", "other.py:make") == "--module mine.py:make"
    assert module_option("my vit.py:make") == "--module 'my vit.py:make'"
    assert module_option(None) == module_option() == "--module FILE.py:FUNCTION"


@pytest.mark.parametrize(
    ("typed", "written"),
    [
        ("--out is empty: give a value", "out= is empty: give a value"),
        ("give --num_images 64 or more, or others with --data", "give num_images=64 or more, or others with data="),
        ("try --module FILE.py:NAME", "try --module FILE.py:NAME"),
        ("make one with raptor distill scenes --k 3", "make one with raptor distill scenes --k 3"),
    ],
)
def test_options_of_a_message_as_arguments(typed: str, written: str) -> None:
    assert as_arguments(typed) == written


def test_a_message_at_a_prompt_names_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    @command(OnDevice)
    def refuse(_config: OnDevice) -> None:
        raise ValueError("give --out FOLDER")

    with pytest.raises(ValueError, match="give --out FOLDER"):
        refuse()
    monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)
    with pytest.raises(ValueError, match="give out=FOLDER"):
        refuse()
    with pytest.raises(ValueError, match="device= must be one of auto, cpu, cuda"):
        refuse(device="tpu")
    with pytest.raises(ValueError, match="give --out FOLDER"):
        refuse(OnDevice())
