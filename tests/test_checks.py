"""The check of one value: types, bounds, choices and words, the same for a terminal and for Python."""

from __future__ import annotations

from pathlib import Path

import pytest

from raptor.checks import expand_home, in_words, near_name, takes_several
from raptor.config import DistillConfig, DynamicsConfig, PhasesConfig, ProbeConfig, TeacherConfig


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(k="two"), "--k must be whole numbers, got two"),
        (dict(k=True), "--k must be whole numbers, got true"),
        (dict(k=[2, 0]), "--k must be at least 1, got 0"),
        (dict(k=[2.5]), "--k must be whole numbers, got 2.5"),
        (dict(num_images="8.5"), "--num_images must be a whole number, got 8.5"),
        (dict(num_images=0), "--num_images must be at least 1, got 0"),
        (dict(skip_bad="maybe"), "--skip_bad must be true or false, got maybe"),
        (dict(method="best"), "--method must be one of maxcut, dp, function, got best"),
        (dict(tokens=" "), "--tokens is empty: give a value, or leave it out"),
        (dict(weights="nowhere.pth"), "--weights: there is no file nowhere.pth"),
        (dict(data="scnes"), "unknown data 'scnes': did you mean scenes"),
        (dict(teacher="scnes"), "unknown model 'scnes': did you mean scenes"),
    ],
)
def test_a_config_refuses_what_no_command_can_use(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message.replace("[", r"\[")):
        PhasesConfig.of("scenes", **options)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (0.0, "more than 0"),
        (-1, "more than 0"),
        (float("inf"), "(a number|numbers)"),
        (float("nan"), "(a number|numbers)"),
    ],
)
def test_a_rate_is_a_finite_number_above_0(value: float, message: str) -> None:
    for kind, options in ((TeacherConfig, {"lr": value}), (DynamicsConfig, {"model": "scenes", "eps": (1e-2, value)})):
        with pytest.raises(ValueError, match=f"must be {message}"):
            kind.of(**options)


def test_the_ends_of_bounds() -> None:
    assert TeacherConfig(smoothing=0.0, warmup=0.999).smoothing == 0.0
    with pytest.raises(ValueError, match="--smoothing must be less than 1, got 1"):
        TeacherConfig(smoothing=1.0)
    assert TeacherConfig(registers=4096).registers == 4096
    with pytest.raises(ValueError, match="--registers must be at most 4096, got 4097"):
        TeacherConfig(registers=4097)


def test_a_file_or_one_of_a_few_words(tmp_path: Path) -> None:
    (tmp_path / "head.safetensors").write_text("")
    for word in ("own", "random", str(tmp_path / "head.safetensors")):
        assert ProbeConfig("scenes", init_head=word).init_head == word
    with pytest.raises(ValueError, match="there is no file other: check its path, or choose from own, random"):
        ProbeConfig("scenes", init_head="other")


def test_paths_of_the_home_folder_are_expanded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    values = ["~/run", ["~/a", "b~"], Path("~/x"), [2], ("a", 3), None]
    assert [expand_home(value) for value in values] == [
        "/home/me/run",
        ["/home/me/a", "b~"],
        Path("/home/me/x"),
        [2],
        ("a", 3),
        None,
    ]


def test_types_in_words() -> None:
    kinds = DistillConfig.kinds()
    assert in_words(kinds["sizes"]) == "whole numbers" and in_words(kinds["lr"]) == "a number"
    assert in_words(kinds["k"]) == "a whole number or a word" and in_words(kinds["compile"]) == "true or false"
    assert in_words(kinds["stage"]) == "one of all, 1, 2" and takes_several(kinds["data"])


@pytest.mark.parametrize(
    ("word", "near"),
    [
        ("vit_tiny_patch16", "vit_tiny_patch16_224"),
        ("vit_tinny", "vit_tiny_patch8_24"),  # the first that begins nearly so
        ("vit", ""),  # the beginning of all of them
        ("resnet50", ""),
    ],
)
def test_a_word_is_near_to_the_name_whose_beginning_it_is(word: str, near: str) -> None:
    assert near_name(word, ["eva_tiny_patch8_24", "vit_tiny_patch8_24", "vit_tiny_patch16_224"]) == near
