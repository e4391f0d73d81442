"""raptor evaluate: where it writes, and which images it skipped."""

from __future__ import annotations

import base64
import io
import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from tiny_images import write_tree
from tiny_models import shake, tiny_timm
from tiny_run import tiny_run, tiny_teacher

from raptor.certificate.linear_head import LinearHead
from raptor.cli import main
from raptor.commands.evaluate import evaluate
from raptor.data import iterate, open_data
from raptor.data.images import ImageData
from raptor.files import RunError
from raptor.surrogate.surrogate import make_surrogate
from raptor.train import distill
from raptor.vit.open import open_vit
from raptor.vit.saved import save_vit


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run folder with an untrained surrogate of a tiny teacher."""
    save_vit(tiny_timm("vit_small_patch14_reg4_dinov2", reg_tokens=2, num_classes=2), tmp_path / "tiny")
    save_vit(make_surrogate(open_vit(tmp_path / "tiny"), (1, 3)), tmp_path / "run" / "surrogate")
    return tmp_path / "run"


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """Twelve pictures of two classes, and one file of each split that is no picture."""
    rng = np.random.default_rng(0)
    for split in ("train", "val"):
        for i in range(6):
            path = tmp_path / "photos" / split / "ab"[i % 2] / f"{i}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(rng.integers(0, 255, (30, 30, 3), dtype=np.uint8)).save(path)
        (tmp_path / "photos" / split / "a" / "broken.png").write_text("no picture")
    return tmp_path / "photos"


def test_the_certificate_names_bad_images(run: Path, photos: Path) -> None:
    with pytest.raises(ValueError, match=r"broken\.png"):
        evaluate(str(run), data=str(photos), device="cpu")
    evaluate(str(run), data=str(photos), device="cpu", skip_bad=True)
    saved = json.loads((run / "certificate.json").read_text())
    assert sorted(Path(name).parts[0] for name in saved["bad_images"]) == ["train", "val"]
    assert all(name.endswith("broken.png") for name in saved["bad_images"])
    assert saved["num_images"] == 6


def test_the_text_names_the_data_and_another_teacher(run: Path, photos: Path, tmp_path: Path) -> None:
    for split in ("train", "val"):
        (photos / split / "a" / "broken.png").unlink()
    few = dict(data=str(photos), device="cpu")
    judged = evaluate(str(run), eps=10.0, **few)
    assert judged.text().startswith("Definition 1 holds for eps 10, closest at layer ")
    worst = judged.certificate.definition
    assert worst is not None and worst.worst_image.endswith(".png")
    assert worst.hardest[0].name == worst.worst_image and len(worst.hardest) == 4
    shown = Image.open(io.BytesIO(base64.b64decode(worst.hardest[0].picture)))
    assert shown.size == (min(judged.certificate.image_size, 128),) * 2
    saved = json.loads((run / "certificate.json").read_text())["definition"]
    assert saved["holds"] and saved["num_images"] == 6 and saved["q99"] <= saved["worst"]
    own = evaluate(str(run), **few).text()
    assert f"measured on 6 held-out images of {photos}\n" in own and "another teacher" not in own
    other = tiny_timm("vit_small_patch14_reg4_dinov2", reg_tokens=2, num_classes=2)
    save_vit(replace(other, model=shake(other.model, seed=5), name="m2"), tmp_path / "m2")
    found = evaluate(
        str(run), teacher=str(tmp_path / "m2"), allow_other_teacher=True, out=str(tmp_path / "against"), **few
    )
    with pytest.raises(RunError, match=r"certificate.json is about another model, .*: choose another --out"):
        evaluate(str(run), teacher=str(tmp_path / "m2"), allow_other_teacher=True, **few)
    assert f"measured on 6 held-out images of {photos}, against m2 (another teacher)\n" in found.text()
    assert found.certificate.stitching is None
    assert "no stitching: the surrogate was not made from this teacher" in found.certificate.notes
    assert found.certificate.to_dict()["verdict"]["against"] == "m2 (another teacher)"


def test_labels_are_of_the_runs_classes_by_name(run: Path, photos: Path, tmp_path: Path, capsys: Any) -> None:
    """A head of two classes is right or wrong only about those two, not about any two."""
    (run / "config.yaml").write_text(f"data: {photos}\n")
    write_tree(tmp_path / "c", [f"{part}/c/{part}{i}.png" for part in ("train", "val") for i in range(4)])
    options = dict(device="cpu", out=str(tmp_path / "out"))
    scores = {}
    for name in "cab":  # the same images as a class that the head does not know, as its first and as its second
        for part in ("train", "val") if name != "c" else ():
            shutil.copytree(tmp_path / "c" / part / "c", tmp_path / name / part / name)
        scores[name] = evaluate(str(run), data=str(tmp_path / name), **options).certificate.predictions
        assert ("the labels of" in capsys.readouterr().err) == (name == "c")
    assert "agreement" in scores["c"] and "teacher_accuracy" not in scores["c"]
    assert scores["a"]["teacher_accuracy"].value + scores["b"]["teacher_accuracy"].value == 1
    with pytest.raises(
        ValueError, match=r"\d of \d images of .*train that were compared are also in the training images"
    ):
        evaluate(str(run), data=str(tmp_path / "c"), val=str(photos / "train"), **options)


def test_labels_are_of_the_classes_that_a_teacher_keeps(tmp_path: Path) -> None:
    """As many classes of other names give no accuracy, and one class has its own number."""
    teacher = tiny_timm("vit_tiny_patch16_224", num_classes=2)
    teacher.classes = ["a", "b"]
    save_vit(teacher, tmp_path / "tiny")
    save_vit(make_surrogate(open_vit(tmp_path / "tiny"), (1, 3)), tmp_path / "surrogate")
    found = {}
    for names in ("bc", "b"):
        data = tmp_path / names
        write_tree(data, [f"{part}/{c}/{part}{i}.png" for part in ("train", "val") for c in names for i in range(4)])
        options = dict(device="cpu", out=str(tmp_path / "out" / names))
        found[names] = evaluate(str(tmp_path / "surrogate"), data=str(data), **options).certificate
    assert "no accuracy: the head has 2 classes, the data 2 of other names, such as b" in found["bc"].notes
    assert "teacher_accuracy" not in found["bc"].predictions and "teacher_accuracy" in found["b"].predictions
    (tmp_path / "names.txt").write_text("c\nb")
    named = evaluate(
        str(tmp_path / "surrogate"),
        data=str(tmp_path / "bc"),
        classes=str(tmp_path / "names.txt"),
        **options | {"out": str(tmp_path / "named")},
    )
    assert "teacher_accuracy" in named.certificate.predictions


@pytest.mark.parametrize("kept", [False, True])
def test_only_the_judged_images_are_of_the_heads_classes(kept: bool, tmp_path: Path) -> None:
    """The surrogate was trained on images of other classes. kept: whether the model names its classes itself."""
    teacher = tiny_timm("vit_tiny_patch16_224", num_classes=2)
    teacher.classes = ["b", "a"] if kept else None
    save_vit(teacher, tmp_path / "tiny")
    run, names, options = tmp_path / "run", tmp_path / "names.txt", dict(device="cpu", train_images=4)
    save_vit(make_surrogate(open_vit(tmp_path / "tiny"), (1, 3)), run / "surrogate")
    others = [f"other/{part}/{c}/{part}{i}.png" for part in ("train", "val") for c in "xyz" for i in "12"]
    write_tree(tmp_path, others + [f"own/{c}/{c}{i}.png" for c in "ab" for i in range(5)])
    (run / "config.yaml").write_text(f"data: {tmp_path / 'other'}\n")
    names.write_text("b\na\n")
    given: dict[str, Any] = {} if kept else {"classes": str(names)}
    found = evaluate(str(run), val=str(tmp_path / "own"), **given, **options).certificate.predictions
    images = next(iter(iterate(open_data(str(tmp_path / "own"), "all"), teacher.preprocess, 10)))
    with torch.no_grad():
        right = teacher(images.images).argmax(-1) == 1 - images.labels  # folders are a, b
    assert found["teacher_accuracy"].value == pytest.approx(right.float().mean().item())
    with pytest.raises(ValueError, match=r"class x of .*other is not in --classes"):
        evaluate(str(run), classes=str(names), **options)


def test_a_run_keeps_the_classes_it_was_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In another folder `names.txt` may be another file; the run's images are looked at once."""
    save_vit(tiny_timm("vit_tiny_patch16_224", num_classes=2), tmp_path / "tiny")
    photos, run = tmp_path / "photos", tmp_path / "run"
    write_tree(
        photos, [f"train/{c}/{c}{i}.png" for c in "ab" for i in range(6)] + [f"val/a/v{i}.png" for i in range(7)]
    )
    for place, names in (("here", "b\na"), ("there", "a\nb")):
        (tmp_path / place).mkdir()
        (tmp_path / place / "names.txt").write_text(names)
    monkeypatch.chdir(tmp_path / "here")
    options: dict[str, Any] = dict(phases=[1, 3], budget="2steps", batch_size=4, out=str(run), device="cpu")
    known = distill(str(tmp_path / "tiny"), str(photos), classes="names.txt", **options).summary.validation
    opened = (open_data(str(photos), "train"), open_data(str(photos), "val"))
    same = distill(str(tmp_path / "tiny"), opened, classes="names.txt", **{**options, "out": str(tmp_path / "pair")})
    assert same.summary.validation.teacher_accuracy == known.teacher_accuracy
    monkeypatch.chdir(tmp_path / "there")
    looked_at: list[int] = []
    compute = ImageData.fingerprint

    def counted(self: ImageData) -> str:
        if self._fingerprint is None:
            looked_at.append(len(self))
        return compute(self)

    monkeypatch.setattr(ImageData, "fingerprint", counted)
    measured: dict[str, Any] = dict(train_images=4, device="cpu")
    found = evaluate(str(run), **measured).certificate
    assert found.predictions["teacher_accuracy"].value == known.teacher_accuracy
    assert looked_at.count(12) == 1
    with pytest.raises(RunError, match=r"another config \(--classes\.fingerprint"):
        distill(str(tmp_path / "tiny"), str(photos), classes="names.txt", **options)


def test_copies_of_training_images_are_told_of_once(run: Path, tmp_path: Path, capsys: Any) -> None:
    """They are in the images of the run, and in the sample of those that null models would be fitted on."""
    photos = tmp_path / "own"
    write_tree(photos, [f"{part}/{c}/{part}{i}.png" for part in ("train", "val") for c in "ab" for i in range(4)])
    shutil.copy(photos / "train/a/train0.png", photos / "val/a/copy.png")
    (run / "config.yaml").write_text(f"data: {photos}\n")
    evaluate(str(run), device="cpu")
    assert capsys.readouterr().err.count("1 of 9 images") == 1


def test_labels_follow_a_head_in_a_file(tmp_path: Path, photos: Path) -> None:
    """--classes names the outputs of --head_file where that is the head; a run that was told so asks for them again."""
    teacher = tiny_timm("vit_tiny_patch16_224", num_classes=0)
    save_vit(teacher, tmp_path / "tiny")
    head, names, run = tmp_path / "head.safetensors", tmp_path / "names.txt", tmp_path / "run"
    LinearHead(torch.zeros(2, 2 * teacher.dim), torch.tensor([0.0, 1.0])).save(head)  # always its second class
    for part in ("train", "val"):
        (photos / part / "a" / "broken.png").unlink()
    (photos / "val/b/1.png").unlink()  # three images of a, two of b
    options: dict[str, Any] = dict(phases=[1, 3], budget="2steps", batch_size=4, out=str(run), device="cpu")
    given: dict[str, Any] = dict(head_file=str(head), classes=str(names))
    measured: dict[str, Any] = dict(device="cpu", train_images=4)
    names.write_text("b\na\n")
    known = distill(str(tmp_path / "tiny"), str(photos), **options, **given).summary.validation
    assert known.teacher_accuracy == pytest.approx(0.6)
    certificate = evaluate(str(run), **measured, **given).certificate
    assert certificate.predictions["teacher_accuracy"].value == pytest.approx(0.6)
    with pytest.raises(RunError, match=r"was made with --classes and does not keep these names: give --classes"):
        evaluate(str(run), head_file=str(head), **measured)


def test_labels_follow_the_classes_that_a_head_file_names(tmp_path: Path, photos: Path) -> None:
    """As heads of `probe` and of runs do. Without names its outputs would be taken in the order of the folders."""
    teacher = tiny_timm("vit_tiny_patch16_224", num_classes=0)
    save_vit(teacher, tmp_path / "tiny")
    head, names, run = tmp_path / "head.safetensors", tmp_path / "names.txt", tmp_path / "run"
    always_second = torch.zeros(2, 2 * teacher.dim), torch.tensor([0.0, 1.0])
    LinearHead(*always_second, classes=["b", "a"]).save(head)
    names.write_text("b\na\n")
    for part in ("train", "val"):
        (photos / part / "a" / "broken.png").unlink()
    (photos / "val/b/1.png").unlink()  # three images of a, two of b
    options: dict[str, Any] = dict(phases=[1, 3], budget="2steps", batch_size=4, out=str(run), device="cpu")
    known = distill(str(tmp_path / "tiny"), str(photos), head_file=str(head), **options).summary.validation
    assert known.teacher_accuracy == pytest.approx(0.6)
    measured: dict[str, Any] = dict(device="cpu", train_images=4)
    for classes in (None, str(names)):
        certificate = evaluate(str(run), head_file=str(head), classes=classes, **measured).certificate
        assert certificate.predictions["teacher_accuracy"].value == pytest.approx(0.6)
    LinearHead(*always_second, classes=["b", "c"]).save(head)
    certificate = evaluate(str(run), head_file=str(head), **measured).certificate
    assert "teacher_accuracy" not in certificate.predictions  # it knows nothing of class a


def test_a_built_in_surrogate_is_written_below_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    done = evaluate("scenes-k3", num_images=16, train_images=16, device="cpu")
    assert done.folder == Path("runs/evaluate-scenes-k3")
    assert json.loads((done.folder / "certificate.json").read_text())["bad_images"] == []
    saved = json.loads((done.folder / "complexity.json").read_text())
    points = {(point["side"], point["precision"]): point for point in saved["rates"]["points"]}
    assert saved["rates"]["num_images"] == 16 and len(points) == 7
    assert (
        points["teacher", "int8"]["largest"]
        < points["teacher", "int4"]["largest"]
        < points["surrogate", "int4"]["bits"]
    )
    saved = json.loads((done.folder / "certificate.json").read_text())
    assert saved["lines"][0].startswith("Definition 1 holds for eps ") and list(saved)[1:3] == ["lines", "definition"]
    assert saved["conditioning"]["per_depth"] == 8 * 128  # width of the built-in teacher
    stitched = saved["stitching"]
    assert stitched["num_images"] == 16 and len(stitched["by_teacher"]["error"]) == 13
    assert stitched["by_teacher"]["error"][-1] == pytest.approx(stitched["by_surrogate"]["error"][0])
    assert 0 < saved["floors"]["accuracy"] < 1 and 0 < saved["floors"]["agreement"] < 1


def test_each_set_of_images_has_a_row(run: Path, photos: Path, tmp_path: Path) -> None:
    write_tree(tmp_path / "others", [f"{c}/other{c}{i}.png" for c in "xyz" for i in range(3)])
    for split in ("train", "val"):
        (photos / split / "a" / "broken.png").unlink()
    few = dict(data=str(photos), device="cpu", sample_images=0)
    found = evaluate(str(run), shift=["noise", "jpeg:5", str(tmp_path / "others")], **few)
    rows = {row.name: row for row in found.certificate.shift}
    assert list(rows) == ["noise:3", "jpeg:5", str(tmp_path / "others")]
    assert [row.num_images for row in rows.values()] == [6, 6, 9]
    assert all(row.agreement is not None and row.eps.value > 0 for row in rows.values())
    assert "noise:3" in found.text() and found.certificate.stitching is None and found.complexity.rates is None
    saved = json.loads((run / "certificate.json").read_text())["shift"]
    assert [row["eps_layer"] for row in saved] == [row.eps_layer for row in rows.values()]
    with pytest.raises(ValueError, match=r"are also in the training images"):
        evaluate(str(run), shift=[str(photos / "train")], **few)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--eps", "0"], "--eps must be more than 0, got 0"),
        (["--eps", "nan"], "--eps"),
        (["--shift", "noise:9"], "--shift noise:9: the severity of noise is 1 to 5, such as noise:3"),
        (["--shift", "noise", "noise:3"], "--shift names two sets noise:3: give each once"),
        (["--shift", "empty"], "empty"),
        (["--shift", "nowhere"], "nowhere"),
        (["--autonomous", "teacher"], "--autonomous teacher is no surrogate: name a run of raptor distill"),
        (["--autonomous", "run"], "--autonomous run is not autonomous: distil one with --conditioning none"),
        (["--autonomous", "other"], "was not made from"),
    ],
)
def test_wrong_input_is_one_line(
    words: list[str], said: str, run: Path, tmp_path: Path, monkeypatch: Any, capsys: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("empty").mkdir()
    shutil.copytree("tiny", "teacher")
    other = open_vit("tiny")
    save_vit(
        make_surrogate(replace(other, model=shake(other.model, seed=5)), (1, 3), conditioning="none"), Path("other")
    )
    assert main(["evaluate", "run", "--data", "scenes", "--device", "cpu", *words]) == 2
    error = capsys.readouterr().err
    assert said in error and len(error.strip().splitlines()) == 1


def test_an_autonomous_surrogate_gives_a_price(run: Path, photos: Path, tmp_path: Path) -> None:
    for split in ("train", "val"):
        (photos / split / "a" / "broken.png").unlink()
    save_vit(make_surrogate(open_vit(tmp_path / "tiny"), (1, 3), conditioning="none"), tmp_path / "plain" / "surrogate")
    few = dict(data=str(photos), device="cpu", sample_images=0)
    found = evaluate(str(run), autonomous=str(tmp_path / "plain"), **few)
    price = found.certificate.autonomy
    assert price is not None and set(price.prices) == {"relative_largest", "relative_last", "r2_last", "agreement"}
    own = found.certificate.curves.relative["all"]
    assert price.prices["relative_largest"].own == pytest.approx(own.max())
    assert f"({tmp_path / 'plain'}; how it was trained is not known)" in found.text()


def test_evaluate_judges_by_the_head_that_the_run_keeps(tmp_path: Path) -> None:
    """Both commands on a teacher without a head: one ridge probe, unless another number of images is asked for."""
    teacher = tiny_timm("vit_tiny_patch16_224", num_classes=0)
    save_vit(teacher, tmp_path / "teacher")
    run, size = tmp_path / "run", teacher.preprocess.size
    options: dict[str, Any] = dict(device="cpu", train_images=64, num_images=16, size=size)
    distill(str(tmp_path / "teacher"), "scenes", k=2, budget="2steps", batch_size=8, out=str(run), **options)
    kept = (run / "head.safetensors").read_bytes()
    same: dict[str, Any] = dict(num_images=16, device="cpu")
    certificate = evaluate(str(run), **same).certificate
    assert (run / "head.safetensors").read_bytes() == kept
    said = json.loads((run / "summary.json").read_text())["validation"]["head"]
    assert f"head: {said}" in certificate.notes and said.startswith("a ridge probe on the teacher's features of ")
    evaluate(str(run), train_images=40, **same)
    assert (run / "head.safetensors").read_bytes() != kept


def test_a_run_of_a_module_of_your_own_is_evaluated_with_it(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text(
        "import timm\nimport torch\n\ndef make_vit(seed=0):\n    torch.manual_seed(seed)\n"
        "    return timm.create_model('vit_tiny_patch16_224', img_size=32, embed_dim=48, num_heads=3, depth=3)\n"
        "\ndef other():\n    return make_vit(1)\n"
    )
    few = ["--device", "cpu", "--data", "scenes", "--size", "32"]
    words = [
        "--phases",
        "1",
        "2",
        "--budget",
        "2steps",
        "--batch_size",
        "4",
        "--train_images",
        "8",
        "--num_images",
        "4",
        "--out",
        "run",
    ]
    made = ["distill", "--module", "mine.py:make_vit", *words, *few]
    monkeypatch.setattr("sys.argv", ["raptor", *made])
    assert main(made) == 0
    assert main(["evaluate", "run", *few]) == 2
    assert "made from a module of your own" in capsys.readouterr().err
    measured = ["--num_images", "8", "--train_images", "8"]
    assert main(["evaluate", "run", "--module", "mine.py:other", *few, *measured]) == 2
    assert "was not made from" in capsys.readouterr().err
    assert main(["report", "run", "--device", "cpu"]) == 0
    module = ["--module", "mine.py:make_vit"]
    assert main(["evaluate", "run", *module, *few, *measured]) == 0
    assert main(["report", "run", *module, "--num_images", "1", "--device", "cpu"]) == 0
    assert Path("run/images.json").exists()
    assert json.loads(Path("run/certificate.json").read_text())["num_images"] == 8


def test_a_module_that_is_no_surrogate_is_told_of_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text(
        "import timm\n\ndef make_vit():\n"
        "    return timm.create_model('vit_tiny_patch16_224', img_size=32, embed_dim=48, num_heads=3, depth=3)\n"
    )
    words = ["evaluate", "--module", "mine.py:make_vit", "--data", "scenes", "--size", "32", "--device", "cpu"]
    monkeypatch.setattr("sys.argv", ["raptor", *words])
    assert main(words) == 2
    said = "VisionTransformer is no surrogate: make one with raptor distill --module mine.py:make_vit"
    assert capsys.readouterr().err.strip().endswith(said)
    with pytest.raises(ValueError, match=r"^scenes is no surrogate: make one with raptor distill scenes$"):
        evaluate(open_vit("scenes"), device="cpu")


def test_the_result_of_distill_stands_for_its_run_and_teacher(tmp_path: Path) -> None:
    """Its teacher is a module of one's own, which the run folder does not hold."""
    done = tiny_run(tmp_path / "run", teacher=tiny_teacher().model)
    found = evaluate(done, num_images=8, device="cpu")
    assert found.folder == done.folder and (done.folder / "certificate.json").exists()


def test_every_pass_of_a_slow_machine_is_counted_in_a_log(
    run: Path, photos: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (photos / "train" / "a" / "broken.png").unlink()
    (photos / "val" / "a" / "broken.png").unlink()
    monkeypatch.setattr("raptor.progress._LOG_INTERVAL", 0.0)  # as if each batch took longer than that
    evaluate(str(run), data=str(photos), device="cpu")
    said = capsys.readouterr().err
    assert all(f"{name}: 1/1 batches" in said for name in ("null models", "rounded weights", "stitching"))
    assert "certificate: 6/6 images" in said
