"""The order in which a head is found, and when a kept one is fitted again."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from tiny_certified import plain_vit, two_class_batches
from tiny_images import save_array, write_tree

from raptor.certificate.heads import head_batches, prediction_hits, resolve_head
from raptor.certificate.measure import certify
from raptor.certificate.ridge import accuracy, collect_features, fit_ridge
from raptor.data import ImageData, open_data
from raptor.data.split import choice_split
from raptor.data.stream import iterate
from raptor.surrogate.surrogate import make_surrogate


def test_accuracy_and_agreement() -> None:
    logits = torch.tensor([[2.0, 1.0], [0.0, 1.0], [3.0, 1.0], [0.0, 4.0]])
    other = torch.tensor([[2.0, 1.0], [1.0, 0.0], [3.0, 1.0], [0.0, 4.0]])
    assert accuracy(logits, torch.tensor([0, 1, 1, 1])) == 0.75
    hits = prediction_hits(logits.argmax(-1), other.argmax(-1), torch.tensor([0, 1, 1, 1]))
    assert hits.float().mean(0).tolist() == [0.75, 0.75, accuracy(other, torch.tensor([0, 1, 1, 1]))]


def test_order_of_heads(tmp_path: Path) -> None:
    vit, cache, batches = plain_vit(), tmp_path / "head.safetensors", two_class_batches()
    own, _ = resolve_head(plain_vit(num_classes=5), batches)
    assert own is not None and own.source == "own"
    with pytest.raises(ValueError, match="no head at nowhere"):
        resolve_head(plain_vit(num_classes=5), batches, file="nowhere.safetensors")

    ridge, reason = resolve_head(vit, batches, cache=cache)
    assert ridge is not None and ridge.source == "ridge" and "24 training images" in reason and cache.is_file()
    features, labels = collect_features(vit, batches)
    assert labels is not None and ridge.linear is not None
    torch.testing.assert_close(ridge.linear.weight, fit_ridge(features, labels, 2).weight)

    states, output = vit.record(batches[0].images)
    with torch.no_grad():
        torch.testing.assert_close(ridge.logits(vit, states[-1], output), ridge.linear(features[:8]))

    kept, _ = resolve_head(vit, None, cache=cache)
    assert kept is not None and kept.linear is not None
    torch.testing.assert_close(kept.linear.weight, ridge.linear.weight, rtol=0, atol=0)

    for model in (vit, plain_vit(num_classes=5)):  # a head that is asked for comes before the model's own
        given, _ = resolve_head(model, batches, file=cache)
        assert given is not None and given.source == "file"

    none, reason = resolve_head(vit, two_class_batches(labels=False))
    assert none is None and "no labels" in reason
    none, reason = resolve_head(vit)
    assert none is None and "no training data" in reason


def test_images_of_a_ridge_head_grow_with_the_classes_and_leave_out_what_probes_choose_on() -> None:
    vit, data = plain_vit(), open_data("scenes", "train", size=28)
    _, choice = choice_split(data.names)
    chosen = {data.names[i] for i in choice}
    batches = head_batches(vit, data, 8)
    assert batches.num_images == 5000 and len(data) > 6000 and data.classes is not None
    assert not chosen & {batches.data.names[i] for i in batches.indices}
    assert head_batches(vit, data, 8, head_images=7).num_images == 7
    many = data.select(range(len(data)))
    many.classes = [f"class {i}" for i in range(300)]
    assert head_batches(vit, many, 8).num_images == 6000
    few = data.select(range(12))
    assert head_batches(vit, few, 8).num_images == len(choice_split(few.names)[0])


@dataclass
class Images:
    """What a head asks of a set of images."""

    name: str
    classes: list[str]
    labels: tuple[int, ...] = (0, 1)
    keys: tuple[str, ...] = ("0", "1")

    def __len__(self) -> int:
        return 2

    def present(self) -> set[int]:
        return {0, 1}

    def fingerprint(self) -> str:
        return self.name


class Stream(list):
    """Batches that say which images they are of, as an image stream does."""

    def __init__(self, name: str, num_batches: int, classes: tuple[str, ...] = ("a", "b")) -> None:
        super().__init__(two_class_batches(num_batches))
        self.data = Images(name, list(classes))
        self.num_images, self.num_passes = 8 * num_batches, 0

    def __iter__(self):
        self.num_passes += 1
        return super().__iter__()


def test_a_kept_ridge_head_is_fitted_again_for_other_images(tmp_path: Path) -> None:
    vit, cache = plain_vit(), tmp_path / "head.safetensors"

    def is_fitted(stream: Stream, **options) -> bool:
        """Whether a head is fitted now; what is said about it is the same either way."""
        before = stream.num_passes
        head, reason = resolve_head(vit, stream, cache=cache, **options)
        assert head is not None and head.num_classes == len(stream.data.classes)
        assert "training images (alpha" in reason and resolve_head(vit, stream, cache=cache, **options)[1] == reason
        return stream.num_passes > before

    photos = Stream("photos", 2)
    assert is_fitted(photos) and not is_fitted(photos)
    for other in (Stream("drawings", 2), Stream("drawings", 2, ("a", "c")), Stream("drawings", 3, ("a", "b", "c"))):
        assert is_fitted(other) and not is_fitted(other)
    # Another number of images is another head only for those who ask for it: all commands on a run judge by one.
    fewer = Stream("drawings", 2, ("a", "b", "c"))
    assert not is_fitted(fewer)
    assert is_fitted(fewer, head_images=16) and not is_fitted(fewer, head_images=16)
    vit.name = "by another name"  # the same weights
    assert not is_fitted(other)
    next(vit.model.parameters()).data[..., 0] += 1  # other weights under the same name
    assert is_fitted(other)
    cache.write_bytes(b"junk")
    assert is_fitted(other)


def test_a_kept_ridge_head_is_fitted_again_for_other_images_of_the_same_name(tmp_path: Path) -> None:
    vit, cache, data = plain_vit(), tmp_path / "head.safetensors", open_data("scenes", "train", size=28)
    data = data.select(choice_split(data.keys)[0])  # all of these are fitted on

    def weight_for(images: ImageData) -> torch.Tensor:
        head, _ = resolve_head(vit, iterate(images, vit.preprocess, 8), cache=cache)
        assert head is not None and head.linear is not None
        return head.linear.weight

    images, others, relabelled = data.select(range(40)), data.select(range(40, 80)), data.select(range(40, 80))
    first = weight_for(images)
    assert torch.equal(weight_for(images), first)
    second = weight_for(others)
    assert not torch.equal(second, first)
    assert others.labels is not None
    relabelled.labels = [*others.labels[1:], others.labels[0]]
    assert not torch.equal(weight_for(relabelled), second)
    assert torch.equal(weight_for(images), first)


def test_images_of_one_class_give_no_head(tmp_path: Path) -> None:
    """Every head would be right about all of them."""
    write_tree(tmp_path, [f"only/{i}.png" for i in range(4)])
    vit = plain_vit()
    head, reason = resolve_head(vit, head_batches(vit, open_data(str(tmp_path), "all"), 4))
    assert head is None and reason.endswith(f"{tmp_path} has one class only")


def test_heads_of_other_tasks_and_layers_are_refused(tmp_path: Path) -> None:
    model = plain_vit()
    weight, bias = torch.randn(3, 2 * model.dim), torch.zeros(3)
    for metadata, message in (
        ({"task": "depth", "layer": str(model.num_layers)}, "is of the task depth"),
        ({"task": "classify", "layer": "2"}, "reads layer 2, not the last one"),
    ):
        save_file({"weight": weight, "bias": bias}, tmp_path / "head.safetensors", metadata)
        with pytest.raises(ValueError, match=message):
            resolve_head(model, file=tmp_path / "head.safetensors")


def test_a_certificate_says_that_a_head_names_no_classes(tmp_path: Path) -> None:
    model = plain_vit()
    for i in range(6):
        save_array(tmp_path / "data" / "abc"[i % 3] / f"{i}.png", np.full((32, 32, 3), 40 * i, dtype=np.uint8))
    batches = iterate(open_data(str(tmp_path / "data"), "all"), model.preprocess, 6)
    for metadata, is_said in (({}, True), ({"classes": json.dumps(["a", "b", "c"])}, False)):
        tensors = {"weight": torch.randn(3, 2 * model.dim), "bias": torch.zeros(3)}
        save_file(tensors, tmp_path / "head.safetensors", metadata)
        head, _ = resolve_head(model, file=tmp_path / "head.safetensors")
        found = certify(
            make_surrogate(model, (1, model.num_layers - 1)), model, batches, null_models=False, head=head, bootstrap=0
        )
        assert any("in the order of the data's" in note for note in found.notes) is is_said
