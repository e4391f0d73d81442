"""raptor phases: what it writes and prints; options are checked before any image is read."""

from __future__ import annotations

import functools
import json
import shutil
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from safetensors.torch import save_file
from tiny_models import tiny_timm

import raptor
from raptor.cli import main
from raptor.commands.phases import phases
from raptor.phases.study import PhasesFile
from raptor.report.paper import draw
from raptor.report.phases import figure_phases
from raptor.report.phases import phases as show_phases
from raptor.report.results import read_results
from raptor.vit.trajectory import Trajectories


def test_a_teacher_is_that_of_the_runs_among_the_models(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A module beside a model that is no run was left aside without a word."""
    (tmp_path / "mine.py").write_text(
        "from raptor.vit.open import open_vit\n\ndef make():\n    return open_vit('scenes')\n"
    )
    few = ["--num_images", "4", "--k", "2", "--twin", "false", "--device", "cpu", "--out", str(tmp_path / "out")]
    module = ["--module", f"{tmp_path / 'mine.py'}:make", *few]
    assert main(["phases", "scenes", *module]) == 2
    assert "scenes is not a surrogate and has no teacher: name a run" in capsys.readouterr().err
    assert main(["phases", "scenes-k2", "scenes", *module]) == 0
    sides = [entry.side for entry in PhasesFile.read(tmp_path / "out").models]
    assert sides == ["teacher", "surrogate", ""]


def test_phases_checks_its_options_before_any_image(monkeypatch, capsys):
    def no_pass(*_args, **_options):
        raise AssertionError("images were read")

    monkeypatch.setattr(import_module("raptor.commands.phases").ChosenData, "judged", no_pass)
    assert main(["phases", "scenes", "--k", "13"]) == 2
    assert "k=13" in capsys.readouterr().err


def test_results_of_two_modules_of_one_class_are_kept_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("my2.py").write_text(
        "import timm\n\ndef make(depth):\n    return timm.create_model('vit_tiny_patch16_224', img_size=32, "
        "depth=depth, embed_dim=48, num_heads=3)\n\ndef a():\n    return make(4)\n\ndef b():\n    return make(6)\n"
    )
    few = ["--data", "scenes", "--num_images", "4", "--k", "2", "--twin", "false", "--device", "cpu"]
    for function, num_layers in (("a", 4), ("b", 6)):
        assert main(["phases", "--module", f"my2.py:{function}", *few]) == 0
        assert PhasesFile.read(f"runs/phases-my2-{function}").models[0].model.num_layers == num_layers
    assert main(["phases", "--module", "my2.py:b", *few, "--out", "runs/phases-my2-a"]) == 2
    refused = "runs/phases-my2-a/phases.json is about other weights of VisionTransformer: choose another --out"
    assert refused in capsys.readouterr().err


def test_a_cut_by_function_says_what_it_costs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    vit = tiny_timm(depth=4, num_classes=5)
    found = phases(vit, data="scenes", num_images=6, k=[2], method="function", device="cpu", out=str(tmp_path / "out"))
    (entry,) = PhasesFile.read(tmp_path / "out").models
    cut = entry.phases[2]
    cost = entry.replacement["block"].cost
    expected = 0.0
    for (first, last), block in zip(cut.spans, cut.representatives):
        expected += cost[first - 1 : last, block - 1].sum()
    text = found.text()
    blocks = ", ".join(str(block) for block in cut.representatives)
    assert f"replacing each phase by its representative (blocks {blocks}) costs {expected:.3g} nats of KL" in text
    assert entry.evidence[2].cost == pytest.approx(expected)
    assert found.table_rows()[0]["cost"] == pytest.approx(expected)

    section = show_phases(read_results(tmp_path / "out"))
    (chart,) = [chart for chart in section.charts if chart.id == "replacement"]
    assert [series.when["part"] for series in chart.series] == [["block"], ["attention"], ["mlp"]]
    off_diagonal = ~np.eye(4, dtype=bool)
    np.testing.assert_allclose(10.0 ** np.array(chart.series[0].z)[off_diagonal], cost[off_diagonal])
    assert "representative" in section.html
    # Beside the similarity: the cost of whole blocks, outlined by the same phases.
    axes = draw(figure_phases([entry])).axes
    assert [ax.get_title().split("\n")[0] for ax in axes[:3]][1] == "What replacing a block costs"


def test_text_for_a_number_is_the_same_error_in_python(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="k must be whole numbers, got two"):
        phases(["scenes"], k="two", out=str(tmp_path))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"num_images must be a whole number, got 8\.5"):
        phases(["scenes"], num_images="8.5", out=str(tmp_path))  # type: ignore[arg-type]


@pytest.mark.usefixtures("drawn_figures")
def test_phases_writes_what_it_prints(tmp_path, capsys):
    out = str(tmp_path / "run")
    assert main(["phases", "scenes", "--num-images", "32", "--k", "2", "3", "--out", out, "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    saved = json.loads((tmp_path / "run" / "phases.json").read_text())
    assert saved["models"] == printed["models"]
    assert [sum(p["lengths"]) for p in saved["models"][0]["phases"].values()] == [12, 12]
    assert saved["models"][0]["image_size"] == 48
    assert (tmp_path / "run" / "figures" / "phases.png").stat().st_size > 1000


def test_phases_says_which_images_it_passed_over(tmp_path, capsys):
    for i in range(4):
        Image.new("RGB", (48, 48), (60 * i, 20, 90)).save(tmp_path / f"{i}.png")
    (tmp_path / "torn.png").write_bytes((tmp_path / "0.png").read_bytes()[:60])
    words = ["phases", "scenes", "--data", str(tmp_path), "--split", "train", "--k", "2", "--device", "cpu"]
    assert main([*words, "--out", str(tmp_path / "out"), "--skip-bad"]) == 0
    assert "1 unreadable images were skipped" in capsys.readouterr().out


def test_an_unknown_argument_is_a_type_error() -> None:
    with pytest.raises(TypeError, match="unexpected argument 'num_imges': did you mean num_images"):
        phases(["scenes"], num_imges=3)  # type: ignore[call-arg]


def test_one_weight_file_is_for_one_model() -> None:
    with pytest.raises(ValueError, match="--weights goes with one model"):
        phases(["scenes", "scenes-k3"], weights=__file__, device="cpu")


def test_a_run_folder_gives_teacher_and_surrogate_each_by_name(tmp_path, capsys) -> None:
    shutil.copytree(Path(raptor.__file__).parent / "assets" / "scenes-k3", tmp_path, dirs_exist_ok=True)
    done = phases(
        [tmp_path], data="scenes", k=3, num_images=12, batch_size=4, device="cpu", twin=False
    )  # written to the run folder
    assert [(entry.side, entry.whose) for entry in done.models] == [
        ("teacher", "teacher: scenes"),
        ("surrogate", "surrogate: raptor k=3 of scenes"),
    ]
    assert [m["side"] for m in json.loads((tmp_path / "phases.json").read_text())["models"]] == ["teacher", "surrogate"]
    titles = [axes.get_title() for axes in draw(figure_phases(done.models)).axes]
    assert titles[0].startswith("teacher: scenes") and titles[1].startswith("surrogate: raptor k=3 of scenes")
    section = show_phases(read_results(tmp_path))
    assert "surrogate: raptor k=3 of scenes" in section.html and "(--twin false)" in section.html
    assert section.charts[0].series[0].name == "teacher: scenes"


def test_by_default_as_many_phases_as_there_is_room_for(tmp_path, capsys) -> None:
    shape = dict(img_size=32, patch_size=16, embed_dim=16, depth=3, num_heads=2)
    torch.manual_seed(0)
    model = timm.create_model("vit_tiny_patch16_224", **shape)
    given = dict(data="scenes", num_images=8, batch_size=4, device="cpu", size=32, twin=False)
    given["out"] = str(tmp_path / "model")
    assert list(phases(model, **given).models[0].phases) == [2, 3]
    assert list(phases("scenes", **given | {"out": str(tmp_path / "scenes")}).models[0].phases) == [2, 3, 4]
    with pytest.raises(ValueError, match=r"k=4 phases .* there are 3"):
        phases(model, k=[4], **given)
    with pytest.raises(ValueError, match=r"k=2 phases of at least 2 layers .* there are 3"):
        phases(model, method="dp", **given)


def test_what_there_is_no_room_for_is_refused_before_any_image(tmp_path, monkeypatch) -> None:
    given = dict(data="scenes", num_images=8, batch_size=4, device="cpu", size=32, twin=False, out=str(tmp_path))
    monkeypatch.setattr(import_module("raptor.commands.phases").ChosenData, "judged", None)
    with pytest.raises(ValueError, match=r"k=7 phases of at least 2 layers need 14 layers, but there are 12"):
        phases("scenes", k=[7], method="dp", **given)


def test_the_twin_is_measured_on_images_of_all_classes(tmp_path, monkeypatch) -> None:
    for name, grey in (("ant", 10), ("bee", 250)):
        (tmp_path / name).mkdir()
        for i in range(70):
            Image.new("RGB", (48, 48), (grey, grey, grey)).save(tmp_path / name / f"{name}{i}.png")
    seen = {}

    def trajectories(vit, batches, *rest):
        seen[vit.name] = [float(image.mean()) > 0 for batch in batches for image in batch.images]
        return Trajectories(vit, batches, *rest)

    monkeypatch.setattr("raptor.phases.study.Trajectories", trajectories)
    given = dict(data=str(tmp_path), split="all", batch_size=32, device="cpu", out=str(tmp_path / "out"))
    done = phases("scenes", k=[2], twin=True, **given)
    assert done.models[0].twin == "its untrained twin was measured on 64 images"
    whole, few = seen["scenes"], seen["untrained twin of scenes"]
    assert whole.count(True) == whole.count(False) == 70
    assert len(few) == 64 and 16 < few.count(True) < 48


def test_a_random_model_has_no_more_phases_than_its_twin(tmp_path) -> None:
    given = dict(data="scenes", num_images=16, batch_size=8, device="cpu", pretrained=False, size=64)
    done = phases(["timm/vit_tiny_patch16_224"], twin=True, out=str(tmp_path), **given)
    entry = done.models[0]
    assert entry.twin == "its untrained twin was measured on 16 images" and entry.evidence[3].twin is not None
    assert entry.structure.startswith("at k=4 no more phase structure than its untrained twin (contrast at least ")
    assert not any(row["suggested"] for row in done.table_rows())
    assert "suggest k=" not in done.text() and f"no k is suggested: {entry.structure}" in done.text()
    assert "shuffled" in done.text() and "resamples" in done.text()


def test_checkpoints_side_by_side_as_a_command(tmp_path, capsys) -> None:
    """Two weight files of one architecture; files of the same name are told apart by their folders."""
    shape = dict(img_size=32, embed_dim=48, depth=2, num_heads=3)
    files = [tmp_path / name for name in ("a/last.safetensors", "b/last.safetensors", "first.safetensors")]
    for i, path in enumerate(files):
        path.parent.mkdir(exist_ok=True)
        torch.manual_seed(i)
        model = timm.create_model("vit_tiny_patch16_224", **shape)
        save_file(model.state_dict(), path)
    with pytest.MonkeyPatch.context() as patch:  # the same small architecture by a name of its own
        patch.setattr(timm, "create_model", functools.partial(small, timm.create_model, shape))
        sources = [f"timm/vit_tiny_patch16_224@{path}" for path in files]
        words = [
            "--data",
            "scenes",
            "--size",
            "32",
            "--num_images",
            "8",
            "--k",
            "2",
            "--twin",
            "false",
            "--out",
            str(tmp_path / "out"),
        ]
        assert main(["phases", *sources, *words, "--device", "cpu"]) == 0
    saved = json.loads((tmp_path / "out" / "phases.json").read_text())["models"]
    assert [entry["model"]["name"] for entry in saved] == ["a/last", "b/last", "first"]
    assert saved[0]["similarity"] != saved[1]["similarity"]
    assert "a/last" in capsys.readouterr().out


def small(create, shape, name, **options):
    return create(name, **{**options, **shape})
