"""Every kind of data gives its own batches; images that cannot be read."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from tiny_images import write_tree

from raptor.data import BadImage, ImageData, InMemory, Preprocess, iterate, open_data
from raptor.data.images import choose_workers, fill_uint8

PREPROCESS = Preprocess(size=12, resize=14)


def test_every_kind_of_data_answers_the_same_call(data: ImageData) -> None:
    wanted = [7, 0, 19]
    decoded = next(data.batches([wanted], PREPROCESS, "cpu")).images
    assert torch.equal(decoded, torch.stack([PREPROCESS.decode(data.load(i)) for i in wanted]))
    held = InMemory(data, PREPROCESS)
    assert torch.equal(next(held.batches([wanted], PREPROCESS, "cpu")).images, decoded)
    assert torch.equal(next(held.select([19, 7, 0]).batches([[1, 2, 0]], PREPROCESS, "cpu")).images, decoded)
    assert np.array_equal(np.asarray(held.load(7)), decoded[0].permute(1, 2, 0).numpy())
    own = Preprocess(size=16, resize=16)
    scenes = open_data("scenes", "val", size=16)
    assert torch.equal(next(scenes.batches([[3]], own, "cpu")).images[0], own.decode(scenes.load(3)))


def test_a_number_beyond_the_last_image_says_how_many_there_are(data: ImageData) -> None:
    assert np.array_equal(np.asarray(data.load(-1)), np.asarray(data.load(22)))
    with pytest.raises(IndexError, match=r" has 23 images, numbered from 0: there is no image 999$"):
        data.load(999)


SIGNALLED = """
import os, signal, sys
from raptor.data import Preprocess, iterate, open_data

given = []
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
    signal.signal(number, lambda number, _: given.append(number))
batches = iter(iterate(open_data(sys.argv[1], "all"), Preprocess(size=12, resize=14), 4, num_workers=2))
num_images = len(next(batches).images) + len(next(batches).images)
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
    os.killpg(0, number)
num_images += sum(len(batch.images) for batch in batches)
print(num_images, *sorted(given))
"""


def test_signals_to_the_whole_group_are_left_to_the_first_process(tmp_path: Path) -> None:
    """As `timeout` and a terminal send them. The processes that decode would die of them, and the run with them."""
    write_tree(tmp_path, [f"{i:02}.png" for i in range(60)])
    command = [sys.executable, "-c", SIGNALLED, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, start_new_session=True)
    assert (done.stdout, done.stderr) == ("60 1 2 15\n", "")


@pytest.mark.parametrize("num_workers", [0, 1])
def test_bad_images_are_named(tmp_path: Path, num_workers: int) -> None:
    write_tree(tmp_path, [f"{i}.png" for i in range(6)])
    (tmp_path / "2.png").write_bytes(b"no image")
    (tmp_path / "4.png").write_bytes((tmp_path / "4.png").read_bytes()[:60])
    preprocess = Preprocess(size=8, resize=8)
    with pytest.raises(BadImage, match=r"2\.png") as caught:
        list(iterate(open_data(str(tmp_path), "all"), preprocess, 4, num_workers=num_workers))
    assert "\n" not in str(caught.value)
    data = open_data(str(tmp_path), "all", skip_bad=True)
    for _ in range(2):
        batches = list(iterate(data, preprocess, 4, num_workers=num_workers))
        assert torch.cat([batch.indices for batch in batches]).tolist() == [0, 1, 3, 5]
        assert data.bad == ["2.png", "4.png"]


def test_a_tensor_is_filled_with_readable_images_or_not_at_all(tmp_path: Path) -> None:
    """A bad image is replaced by another of its class; where there is none, no row stays as it was without a word."""
    write_tree(tmp_path, ["a/0.png", "a/1.png", "b/0.png"])
    (tmp_path / "a" / "1.png").write_bytes(b"no image")
    preprocess = Preprocess(size=8, resize=8)
    filled = torch.empty((3, 3, 8, 8), dtype=torch.uint8)
    fill_uint8(filled, open_data(str(tmp_path), "all", skip_bad=True), preprocess, [0, 1, 2], 0, None)
    assert torch.equal(filled[0], filled[1]) and not torch.equal(filled[0], filled[2])
    (tmp_path / "b" / "0.png").write_bytes(b"no image")
    with pytest.raises(BadImage, match=r"1 images of .* cannot be read, and neither can others of their class"):
        fill_uint8(filled, open_data(str(tmp_path), "all", skip_bad=True), preprocess, [0, 1, 2], 0, None)


def test_a_large_jpeg_may_be_decoded_smaller_for_training(tmp_path: Path) -> None:
    rows, columns = np.mgrid[0:128, 0:160]
    smooth = np.stack([rows, columns, (rows + columns) // 2], axis=-1).astype(np.uint8)
    Image.fromarray(smooth).save(tmp_path / "a.jpg", quality=95)
    data = open_data(str(tmp_path), "all")
    assert [data.load(0, side).size for side in (None, 40, 65)] == [(160, 128), (80, 64), (160, 128)]
    small = Preprocess(size=16, resize=16)
    (exact,), (reduced,) = (list(data.batches([[0]], small, "cpu", reduced=r)) for r in (False, True))
    difference = (exact.images.int() - reduced.images.int()).abs()
    assert 0 < difference.max() <= 6 and difference.float().mean() < 1
    analysed = next(iter(iterate(data, small, 1))).images
    assert torch.equal(analysed, small.normalise(exact.images))


def test_workers_are_chosen_by_the_images_and_the_cores(monkeypatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)), raising=False)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert choose_workers(100) == 0 and choose_workers(10**6) == 8
    monkeypatch.setenv("WORLD_SIZE", "16")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert choose_workers(10**6) == 3
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "16")
    assert choose_workers(10**6) == 0


def test_the_message_about_a_bad_image_names_no_object_in_memory(tmp_path: Path) -> None:
    (tmp_path / "0.png").write_bytes(b"no image")
    with pytest.raises(BadImage, match="cannot read image") as caught:
        open_data(str(tmp_path), "all").load(0)
    assert "BytesIO" not in str(caught.value) and "0x" not in str(caught.value)
