"""Batches in order, and training batches as a function of the step."""

from __future__ import annotations

import multiprocessing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.stats
import torch
import torch.distributed as dist
from PIL import Image
from tiny_images import picture
from tiny_models import on_ranks

from raptor.data import BadImage, ImageData, InMemory, Preprocess, TrainStream, iterate, open_data
from raptor.data import stream as stream_module
from raptor.data.memory import JoinedImages
from raptor.data.stream import stable_seed
from raptor.devices import Ranks, T

PREPROCESS = Preprocess(size=12, resize=14)


class Alone(Ranks):
    """One of several ranks that are not there: the others know what it knows."""

    def gather(self, value: T) -> list[T]:
        return [value] * self.size


PLAIN = Preprocess(size=1, resize=1, mean=(0.0, 0.0, 0.0), std=(1 / 255, 1 / 255, 1 / 255))


class Numbered(ImageData):
    """Image i is one pixel of the grey value i, so that a batch shows which images it holds."""

    def __init__(self, num_images: int) -> None:
        super().__init__(
            "numbered", [f"{i}" for i in range(num_images)], [i % 3 for i in range(num_images)], list("abc")
        )

    def read(self, position: int, side: int | None = None) -> Image.Image:
        return Image.fromarray(np.full((1, 1, 3), position, dtype=np.uint8))


def seen(stream: TrainStream, step: int, stage: str = "stage1") -> list[int]:
    return stream.batch(step, stage)[:, 0, 0, 0].round().int().tolist()


@pytest.mark.parametrize("num_workers", [0, 2])
def test_iterate_gives_every_image_once(data: ImageData, num_workers: int) -> None:
    done: list[tuple[int, int]] = []
    stream = iterate(data, PREPROCESS, 5, num_workers=num_workers, progress=lambda n, total: done.append((n, total)))
    before = torch.get_rng_state()
    for _ in range(2):
        batches = list(stream)
        assert len(batches) == len(stream) == 5 and [len(b.images) for b in batches] == [5, 5, 5, 5, 3]
        assert torch.cat([b.indices for b in batches]).tolist() == list(range(23))
        assert torch.cat([b.labels for b in batches if b.labels is not None]).tolist() == data.labels
        expected = torch.stack([PREPROCESS(data.load(i)) for i in range(23)])
        assert torch.equal(torch.cat([b.images for b in batches]), expected)
    assert done[:5] == [(5, 23), (10, 23), (15, 23), (20, 23), (23, 23)]
    assert torch.equal(torch.get_rng_state(), before)


def test_a_shuffled_stream_has_every_image_once_in_the_same_order_each_time(data: ImageData) -> None:
    stream = iterate(data, PREPROCESS, 5, shuffle=True)
    orders = [torch.cat([b.indices for b in stream]).tolist() for _ in range(2)]
    assert orders[0] == orders[1] != list(range(23)) and sorted(orders[0]) == list(range(23))
    assert [list(b.places or ()) for b in stream][1] == [5, 6, 7, 8, 9]
    assert data.labels is not None
    assert torch.cat([b.labels for b in stream if b.labels is not None]).tolist() == [data.labels[i] for i in orders[0]]


def test_iterate_limit(data: ImageData) -> None:
    batches = list(iterate(data, PREPROCESS, 4, limit=6))
    indices = torch.cat([batch.indices for batch in batches]).tolist()
    assert len(indices) == 6 and indices == data.sample(6)
    assert torch.equal(batches[0].images[2], PREPROCESS(data.load(indices[2])))


@pytest.mark.parametrize("cache", ["memory", "none"])
def test_an_epoch_is_a_permutation(cache: str) -> None:
    stream = TrainStream(Numbered(50), PLAIN, 8, seed=1, cache=cache)
    assert stream.steps_per_epoch == 6
    epochs = [[i for step in range(start, start + 6) for i in seen(stream, step)] for start in (0, 6)]
    for epoch in epochs:
        assert len(set(epoch)) == 48
    assert epochs[0] != epochs[1]
    assert seen(stream, 0, "stage2") != epochs[0][:8]
    assert seen(TrainStream(Numbered(50), PLAIN, 8, seed=2), 0) != epochs[0][:8]
    assert stream.labels(3).tolist() == [i % 3 for i in seen(stream, 3)]


@pytest.mark.parametrize("augment", ["none", "crop"])
def test_a_batch_depends_only_on_the_step(data: ImageData, augment: str) -> None:
    """Cached, read by workers in order, and read out of order: the same batches."""
    cached = TrainStream(data, PREPROCESS, 6, seed=4, augment=augment, cache="memory")
    read = TrainStream(data, PREPROCESS, 6, seed=4, augment=augment, cache="none", num_workers=2)
    expected = [cached.batch(step) for step in range(8)]
    assert all(torch.equal(read.batch(step), expected[step]) for step in range(8))
    for step in (5, 2, 3, 7):
        assert torch.equal(read.batch(step), expected[step])
        assert torch.equal(cached.batch(step), expected[step])
    read.close()
    assert not torch.equal(cached.batch(0, "stage2"), expected[0])


def test_a_plan_keeps_as_many_images_and_decodes_a_few(data: ImageData) -> None:
    whole, few = (TrainStream(data, PREPROCESS, 6, cache="memory", num_decoded=num) for num in (None, 4))
    assert few.images.shape == whole.images.shape and torch.equal(few.images[:4], whole.images[:4])
    assert bool((few.images[4:] == 128).all()) and not bool((whole.images[4:] == 128).all())
    assert few.batch(0).shape == whole.batch(0).shape


def test_without_augmentation_batches_are_the_analysis_crop(data: ImageData) -> None:
    stream = TrainStream(data, PREPROCESS, 4, seed=0)
    expected = torch.stack([PREPROCESS(data.load(i)) for i in stream.indices(3).tolist()])
    assert torch.equal(stream.batch(3), expected)


@pytest.mark.parametrize("augment", ["none", "crop"])
def test_mixup_mixes_each_image_with_the_one_before_it(data: ImageData, augment: str) -> None:
    options: dict = dict(seed=4, augment=augment)
    plain, mixed = (TrainStream(data, PREPROCESS, 6, mixup=mixup, **options) for mixup in (0.0, 0.7))
    assert torch.equal(mixed.indices(2), plain.indices(2))
    images, share_b = plain.batch(2), mixed.shares(2)
    assert 0 <= share_b.min() < share_b.max() <= 1 and not torch.equal(share_b, mixed.shares(3))
    share = share_b.view(-1, 1, 1, 1)
    torch.testing.assert_close(mixed.batch(2), share * images + (1 - share) * images.roll(1, 0), atol=1e-5, rtol=1e-5)


VARIED: dict[str, Any] = dict(mixup=0.5, cutmix=0.5, jitter=0.4, grey=0.2)


@pytest.mark.parametrize("changes", [{}, {"mixup": 0.5}, VARIED], ids=["crops", "mixed", "varied"])
@pytest.mark.parametrize("cache", ["memory", "none"])
def test_ranks_end_to_end_equal_one_process(data: ImageData, cache: str, changes: dict[str, Any]) -> None:
    options: dict[str, Any] = dict(seed=9, augment="crop", cache=cache, **changes)
    whole = TrainStream(data, PREPROCESS, 8, **options)
    ranks = on_ranks(4, lambda ranks: TrainStream(data, PREPROCESS, 8, ranks=ranks, **options))
    pasted = [whole.boxes(step) is not None for step in range(8)]
    steps = [pasted.index(True), pasted.index(False)] if changes == VARIED else [0, 1, 5]
    for step in steps:
        torch.testing.assert_close(torch.cat([r.batch(step) for r in ranks]), whole.batch(step), atol=1e-5, rtol=0)
        assert torch.cat([r.labels(step) for r in ranks]).tolist() == whole.labels(step).tolist()


def test_a_step_pastes_or_mixes_the_image_before_each(data: ImageData) -> None:
    options: dict = dict(seed=4, augment="crop")
    plain = TrainStream(data, PREPROCESS, 6, **options)
    pasted = TrainStream(data, PREPROCESS, 6, cutmix=1.0, mixup=0.5, **options)
    boxes_b4 = pasted.boxes(2)
    assert boxes_b4 is not None
    images = plain.batch(2)
    before = images.roll(1, 0)
    found = pasted.batch(2)
    is_before = ((found - before).abs() < 1e-4).all(1)
    is_own = ((found - images).abs() < 1e-4).all(1)
    assert (is_before | is_own).all() and is_before.any() and is_own.any()
    # Every second step or so pastes; the others leave the images as they are where nothing is mixed.
    half = TrainStream(data, PREPROCESS, 6, cutmix=0.5, **options)
    step = next(step for step in range(40) if half.boxes(step) is None)
    torch.testing.assert_close(half.batch(step), plain.batch(step))
    assert 100 < sum(half.boxes(step) is not None for step in range(300)) < 200


def test_colours_change_before_the_normalisation(data: ImageData) -> None:
    options: dict = dict(seed=4, augment="crop")
    grey = TrainStream(data, PREPROCESS, 6, grey=1.0, **options).batch(1)
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in (PREPROCESS.mean, PREPROCESS.std))
    channels = (grey * std + mean).unbind(1)
    torch.testing.assert_close(channels[0], channels[1], atol=1e-5, rtol=0)
    torch.testing.assert_close(channels[0], channels[2], atol=1e-5, rtol=0)
    assert not torch.allclose(grey, TrainStream(data, PREPROCESS, 6, **options).batch(1), atol=1e-2)


def test_changes_that_make_no_sense_are_refused(data: ImageData) -> None:
    for options in (dict(jitter=0.4), dict(grey=0.2)):
        with pytest.raises(ValueError, match="take --augment crop"):
            TrainStream(data, PREPROCESS, 6, **options)
    for options in (dict(mixup=0.4), dict(cutmix=0.5)):
        with pytest.raises(ValueError, match="need a second image in the batch: take --batch_size 2 or more"):
            TrainStream(data, PREPROCESS, 1, **options)


def test_mixup_shares_are_a_beta_distribution() -> None:
    stream = TrainStream(Numbered(4000), PLAIN, 4000, mixup=0.5, cache="none")
    found = scipy.stats.kstest(stream.shares(0).numpy(), scipy.stats.beta(0.5, 0.5).cdf)
    assert found.pvalue > 0.01


def test_each_step_draws_one_of_the_sizes(data: ImageData) -> None:
    stream = TrainStream(data, PREPROCESS, 6, seed=4, augment="crop", sizes=[12, 24])
    again = TrainStream(data, PREPROCESS, 6, seed=4, augment="crop", sizes=[12, 24], cache="none", ranks=Alone(1, 2))
    sizes = [stream.size(step) for step in range(40)]
    assert [again.size(step) for step in range(40)] == sizes != [stream.size(step, "stage2") for step in range(40)]
    assert 10 < sizes.count(12) < 30
    assert [stream.batch(step).shape[-1] for step in range(6)] == sizes[:6]
    assert stream.images is not None and stream.images.shape[-1] == 28  # decoded for the largest
    assert stream.batch(0, size=18).shape == (6, 3, 18, 18)
    with pytest.raises(ValueError, match="take --augment crop"):
        TrainStream(data, PREPROCESS, 6, sizes=[12, 24])


def test_seed_is_stable() -> None:
    """The first eight bytes of BLAKE2b, as the command b2sum -l 64 gives them, without the last bit."""
    assert stable_seed(0, "stage1", 3) == stable_seed("0", "stage1", "3") != stable_seed(0, "stage1", 4)
    assert stable_seed("abc") == 0xD8BB14D833D59559 >> 1


@pytest.mark.parametrize("cache", ["memory", "none"])
def test_bad_images_in_training(folder: Path, tmp_path: Path, cache: str) -> None:
    """A bad image is replaced by the next of its class: sizes and labels stay, and both caches agree."""
    for path in sorted(folder.rglob("*.png")):
        target = tmp_path / path.relative_to(folder)
        target.parent.mkdir(exist_ok=True)
        target.write_bytes(b"broken" if path.name == "04.png" else path.read_bytes())
    with pytest.raises(BadImage, match=r"a/04\.png"):
        stream = TrainStream(open_data(str(tmp_path), "all"), PREPROCESS, 23, cache=cache)
        stream.batch(0)
    data = open_data(str(tmp_path), "all", skip_bad=True)
    stream = TrainStream(data, PREPROCESS, 23, cache=cache)
    images, order = stream.batch(0), stream.indices(0).tolist()
    bad, heir = data.names.index("a/04.png"), data.names.index("a/06.png")
    assert data.bad == ["a/04.png"] and len(images) == 23
    assert torch.equal(images[order.index(bad)], PREPROCESS(data.load(heir)))
    assert sum(len(batch.images) for batch in iterate(data, PREPROCESS, 8)) == 22


@pytest.mark.parametrize(("share", "where"), [(0.31, "cpu"), (0.29, "meta")])
def test_the_cache_takes_at_most_its_share_of_the_device(
    data: ImageData, monkeypatch: pytest.MonkeyPatch, share: float, where: str
) -> None:
    """`meta` stands for a device with memory of its own."""
    monkeypatch.setattr(stream_module, "free_bytes", lambda device: 23 * 3 * 14 * 14 / share)
    cached = TrainStream(data, PREPROCESS, 4, cache="memory", device="meta").images
    assert cached is not None and cached.device.type == where


def test_images_in_memory_are_not_kept_twice(data: ImageData) -> None:
    held = InMemory(data, PREPROCESS)
    assert TrainStream(held, PREPROCESS, 4, device="meta").images is not None
    expected = TrainStream(data, PREPROCESS, 4, seed=3).batch(2)
    assert torch.equal(TrainStream(held, PREPROCESS, 4, seed=3).batch(2), expected)
    held.images = held.images.to("meta")
    assert TrainStream(held, PREPROCESS, 4, device="meta").images is None
    drawn = next(held.select([5, 2, 9]).batches([[1, 0]], PREPROCESS, "meta")).images
    assert drawn.device.type == "meta" and drawn.shape == (2, 3, 14, 14)


def test_wrong_settings_are_refused(data: ImageData) -> None:
    for settings, message in (
        ({"batch_size": 24}, "--batch_size 23 or less"),
        ({"batch_size": 6, "ranks": Alone(0, 4)}, "does not divide over 4 processes: choose --batch_size 4"),
        ({"batch_size": 4, "crop_scale": (0.5, 0.2)}, "crop_scale"),
    ):
        with pytest.raises(ValueError, match=message):
            TrainStream(data, PREPROCESS, **settings)  # type: ignore[arg-type]
    data.labels = None
    with pytest.raises(ValueError, match="no labels"):
        TrainStream(data, PREPROCESS, 4).labels(0)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("augment", ["none", "crop"])
def test_cached_batches_never_wait_for_the_device(data: ImageData, augment: str) -> None:
    stream = TrainStream(data, PREPROCESS, 6, seed=4, augment=augment, cache="memory", device="cuda")
    on_cpu = TrainStream(data, PREPROCESS, 6, seed=4, augment=augment, cache="memory")
    stream.batch(0)
    torch.cuda.set_sync_debug_mode("error")
    try:
        images, labels = stream.batch(5), stream.labels(5)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.testing.assert_close(images.cpu(), on_cpu.batch(5), atol=1e-2, rtol=0)
    assert labels.tolist() == on_cpu.labels(5).tolist()


def _repeated(tmp_path: Path) -> list[str]:
    """Two folders with other images of the same names; the second is given three times."""
    for name, start in (("a", 0), ("b", 50)):
        for i in range(7):
            path = tmp_path / name / "xy"[i % 2] / f"{i}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            picture(20, 20, start + i).save(path)
    return [str(tmp_path / name) for name in "abbb"]


@pytest.mark.parametrize("limit", [None, 19])
def test_images_given_several_times_are_kept_once(tmp_path: Path, limit: int | None) -> None:
    """The batches are those of sets that were opened one by one, which nobody knows to be the same."""
    specs = _repeated(tmp_path)
    each = JoinedImages([open_data(spec, "train") for spec in specs])
    apart = each if limit is None else each.select(each.sample(limit))
    data = open_data(specs, limit=limit)
    num = len(set(data.names))
    assert data.names == apart.names and num <= 14
    held = InMemory(data, PREPROCESS)
    streams = [TrainStream(d, PREPROCESS, 6, seed=3, augment="crop", cache="memory") for d in (data, held)]
    old = TrainStream(apart, PREPROCESS, 6, seed=3, augment="crop", cache="memory")
    assert old.images is not None and len(old.images) == len(data) > num
    for kept in (held.images, *(stream.images for stream in streams)):
        assert kept is not None and len(kept) == num
    for step in range(5):  # of two epochs and more
        assert all(torch.equal(stream.batch(step), old.batch(step)) for stream in streams)
        assert all(torch.equal(stream.labels(step), old.labels(step)) for stream in streams)
    wanted = [len(data) - 1, 3, 0, 9]
    kept, decoded = (next(images.batches([wanted], PREPROCESS, "cpu")).images for images in (held, apart))
    assert torch.equal(kept, decoded)


def test_what_replaces_a_bad_image_is_the_same_for_images_given_several_times(tmp_path: Path) -> None:
    specs = _repeated(tmp_path)
    (tmp_path / "b" / "y" / "5.png").write_bytes(b"broken")
    each = JoinedImages([open_data(spec, "train") for spec in specs])
    each.skip_bad = True
    old, new = (
        TrainStream(data, PREPROCESS, len(data), cache="memory") for data in (each, open_data(specs, skip_bad=True))
    )
    assert torch.equal(new.batch(0), old.batch(0)) and new.data.bad


class Counted(Numbered):
    """Counts the images that this process decodes; the one at `broken` cannot be read."""

    broken: int | None = None

    def read(self, position: int, side: int | None = None) -> Image.Image:
        self.num_read = getattr(self, "num_read", 0) + 1
        if position == self.broken:
            raise OSError("broken")
        return super().read(position)


def _share(rank: int, folder: Path, bad: int | None, times: int) -> None:
    """What one of two connected processes does: fill the cache together and write its batches down."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    data = Counted(11)
    data.broken = bad
    joined = JoinedImages([data] * times)
    options = dict(cache="memory", num_workers=0, ranks=Ranks(rank, 2))
    try:
        stream = TrainStream(joined, Preprocess(size=4, resize=4), 4, **options)
        batches = torch.stack([stream.batch(step) for step in range(4)])
        torch.save((data.num_read, batches), folder / f"rank{rank}")
    except BadImage as error:
        (folder / f"rank{rank}").write_text(str(error))


@pytest.mark.parametrize(("bad", "times"), [(None, 1), (4, 1), (None, 2)])
def test_connected_processes_decode_a_part_each(tmp_path: Path, bad: int | None, times: int) -> None:
    context = multiprocessing.get_context("fork")
    ranks = [context.Process(target=_share, args=(rank, tmp_path, bad, times)) for rank in (0, 1)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(60)
        assert rank.exitcode == 0
    if bad is not None:  # the one that met it, and the one that did not, say the same
        said = {(tmp_path / f"rank{rank}").read_text() for rank in (0, 1)}
        assert len(said) == 1 and "broken" in said.pop()
        return
    found, batches = zip(*(torch.load(tmp_path / f"rank{rank}") for rank in (0, 1)))
    assert found == (6, 5)
    one = TrainStream(JoinedImages([Numbered(11) for _ in range(times)]), Preprocess(size=4, resize=4), 4)
    assert torch.equal(torch.cat(batches, dim=1), torch.stack([one.batch(step) for step in range(4)]))


@pytest.mark.parametrize("make", [iterate, TrainStream])
def test_ranks_with_other_images_under_one_name_are_refused(data: ImageData, monkeypatch, make) -> None:
    """They would mix their results, or wait for each other for ever."""
    other = data.select(range(len(data) - 1))
    found: list[list[str]] = []

    def gather(_ranks: Ranks, value: str) -> list[str]:
        mine = value if not found else found[0][0]
        found.append([mine, f"{other.fingerprint()} ({len(other)} images)"])
        return found[-1]

    monkeypatch.setattr(Ranks, "gather", gather)
    with pytest.raises(ValueError, match=r"is not the same on all processes: .*23 images.* on rank 0, .*22 images.* 1"):
        make(data, PREPROCESS, 4, ranks=Ranks(0, 2))
