"""Streaming cosines against numpy on all states at once; what is said of bad states."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tiny_states import DIM, GROUPS, NUM_LAYERS, direct_cka, in_float64, make_states, split

from raptor.phases import similarity as module
from raptor.phases.similarity import Blocks, CoordinateStatistics, measure_similarity
from raptor.vit.groups import TokenGroups
from raptor.vit.trajectory import NonFiniteStates


def mean_cosine(x_lnd: np.ndarray) -> np.ndarray:
    unit = x_lnd / np.linalg.norm(x_lnd, axis=-1, keepdims=True)
    return np.array([[np.mean(np.sum(a * b, axis=-1)) for b in unit] for a in unit])


def direct_matrices(x_lbtd: np.ndarray, groups: TokenGroups) -> dict[str, np.ndarray]:
    parts = {"all": x_lbtd}
    parts |= {name: x_lbtd[:, :, where] for name, where in groups.present()}
    matrices = {name: mean_cosine(part) for name, part in parts.items()}
    pooled = [mean_cosine(parts[name].mean(axis=2)) for name in ("cls", "patches") if name in parts]
    return matrices | {"pooled": np.mean(pooled, axis=0)}


def assert_close(found: dict[str, np.ndarray], expected: dict[str, np.ndarray], atol: float) -> None:
    assert set(found) == set(expected)
    for name in expected:
        np.testing.assert_allclose(found[name], expected[name], atol=atol, rtol=0, err_msg=name)


@pytest.mark.parametrize(
    ("dtype", "atol"), [(torch.float64, 1e-12), (torch.float32, 1e-6), (torch.bfloat16, 1e-6), (torch.float16, 1e-6)]
)
def test_cosine_equals_a_direct_computation(dtype: torch.dtype, atol: float) -> None:
    states = make_states(11, dtype=dtype)
    result = measure_similarity(split(states, [4, 4, 3]), NUM_LAYERS, GROUPS)
    assert result.num_images == 11
    assert_close(result.matrices, direct_matrices(in_float64(states), GROUPS), atol)


@pytest.mark.parametrize(
    "groups", [TokenGroups(1, 0, 6), TokenGroups(0, 0, 6), TokenGroups(0, 3, 4), TokenGroups(1, 0, 0)]
)
def test_any_group_may_be_absent(groups: TokenGroups) -> None:
    states = make_states(5, groups)
    assert_close(
        measure_similarity([states], NUM_LAYERS, groups).matrices, direct_matrices(in_float64(states), groups), 1e-6
    )


def test_batches_and_chunks_do_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    states = make_states(12)
    whole = measure_similarity([states], NUM_LAYERS, GROUPS)
    monkeypatch.setattr(module, "MAX_CHUNK", 3 * GROUPS.num_tokens * NUM_LAYERS * DIM)
    parts = measure_similarity(split(states, [1, 7, 4]), NUM_LAYERS, GROUPS)
    assert_close(parts.matrices, whole.matrices, 1e-6)
    np.testing.assert_allclose(parts.outliers.coordinates, whole.outliers.coordinates, rtol=1e-6)
    np.testing.assert_allclose(parts.outliers.tokens, whole.outliers.tokens, rtol=1e-6)


def test_known_angles() -> None:
    """Layer l turns every token by l times 20 degrees in one plane and rescales it, so the cosine is known."""
    angles = np.deg2rad(20.0) * np.arange(NUM_LAYERS + 1)
    radius = torch.rand(3, GROUPS.num_tokens, 1, generator=torch.Generator().manual_seed(0)) + 0.5
    states = [radius * 3.0**l * torch.tensor([np.cos(a), np.sin(a), 0.0]).float() for l, a in enumerate(angles)]
    expected = np.cos(angles[1:, None] - angles[None, 1:])
    for matrix in measure_similarity([states], NUM_LAYERS, GROUPS, cka_features=None).matrices.values():
        np.testing.assert_allclose(matrix, expected, atol=1e-6)


def test_the_input_state_is_never_in_the_matrix() -> None:
    states = make_states(5)
    changed = [torch.randn_like(states[0]), *states[1:]]
    first, second = (measure_similarity([s], NUM_LAYERS, GROUPS) for s in (states, changed))
    assert first.matrices["all"].shape == (NUM_LAYERS, NUM_LAYERS)
    assert_close(first.matrices, second.matrices, 0)


def test_autocast_and_tf32_settings_are_left_aside() -> None:
    states = make_states(6)
    before = torch.backends.cuda.matmul.fp32_precision
    with torch.autocast("cpu", dtype=torch.bfloat16):
        result = measure_similarity([states], NUM_LAYERS, GROUPS)
    assert torch.backends.cuda.matmul.fp32_precision == before
    assert_close(result.matrices, direct_matrices(in_float64(states), GROUPS), 1e-6)
    np.testing.assert_allclose(result.cka, direct_cka([states], "both"), atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_standardised_coordinates(dtype: torch.dtype) -> None:
    states = make_states(9, dtype=dtype)
    x_lbtd = in_float64(states)
    mean, std = x_lbtd.mean(axis=(1, 2)), x_lbtd.std(axis=(1, 2))
    statistics = CoordinateStatistics(NUM_LAYERS)
    for batch in split(states, [2, 4, 3]):
        statistics.update(batch)
    np.testing.assert_allclose(statistics.result()[0], mean, atol=1e-6)
    np.testing.assert_allclose(statistics.result()[1], std, rtol=1e-6)

    result = measure_similarity(split(states, [5, 4]), NUM_LAYERS, GROUPS, statistics=statistics)
    standard = (x_lbtd - mean[:, None, None]) / std[:, None, None]
    assert_close(result.matrices, direct_matrices(standard, GROUPS), 2e-6)
    raw = measure_similarity(split(states, [5, 4]), NUM_LAYERS, GROUPS)
    np.testing.assert_allclose(result.outliers.tokens, raw.outliers.tokens, rtol=1e-6)
    assert np.abs(result.matrices["all"] - raw.matrices["all"]).max() > 0.05


def test_statistics_survive_a_large_mean_and_a_constant_coordinate() -> None:
    states = make_states(8)
    for s in states:
        s[..., 0] = 1000 + s[..., 0]
        s[..., 1] = 7
    statistics = CoordinateStatistics(NUM_LAYERS)
    for batch in split(states, [3, 5]):
        statistics.update(batch)
    x_lbtd = in_float64(states)
    _, std_ld = statistics.result()
    np.testing.assert_allclose(std_ld[:, 0], x_lbtd[..., 0].std(axis=(1, 2)), rtol=1e-4)
    np.testing.assert_array_equal(std_ld[:, 1], 0)
    standard_btld = statistics.standardise(torch.stack(states[1:], dim=2))
    assert (standard_btld[..., 1] == 0).all()
    np.testing.assert_allclose(standard_btld[..., 2].std(dim=(0, 1), correction=0), 1, rtol=1e-5)


@pytest.mark.parametrize(("values", "mean", "std"), [((0, 0), 0, 0), ((1, 1), 1, 0), ((1, -1), 0, 1)])
def test_any_finite_states_have_statistics(values: tuple[int, int], mean: float, std: float) -> None:
    """Only the cosine of a zero is undefined. Two images have one value each in the first coordinate."""
    states = torch.zeros(2, GROUPS.num_tokens, 3)
    states[..., 0] = torch.tensor(values)[:, None]
    statistics = CoordinateStatistics(NUM_LAYERS)
    statistics.update([states] * (NUM_LAYERS + 1))
    mean_ld, std_ld = statistics.result()
    assert mean_ld.tolist() == [[mean, 0, 0]] * NUM_LAYERS and std_ld.tolist() == [[std, 0, 0]] * NUM_LAYERS


@pytest.mark.parametrize("layer", [0, 2, 4])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_non_finite_states_name_model_layer_and_batch(layer: int, value: float) -> None:
    batches = split(make_states(12), [4, 4, 4])
    batches[1][layer][2, 5, 1] = value
    message = rf"^the states of tiny are not finite .* at layer {layer} in batch 1 .*: check its weights"
    with pytest.raises(NonFiniteStates, match=message):
        measure_similarity(batches, NUM_LAYERS, GROUPS, model="tiny")
    statistics = CoordinateStatistics(NUM_LAYERS, model="tiny")
    for batch in batches:
        statistics.update(batch)
    with pytest.raises(NonFiniteStates, match=message):
        statistics.result()


def test_the_first_bad_batch_and_layer_are_named() -> None:
    batches = split(make_states(16), [4, 4, 4, 4])
    for batch, layer in ((3, 1), (2, 3), (2, 4)):
        batches[batch][layer][0, 0, 0] = float("nan")
    with pytest.raises(NonFiniteStates, match=r"layer 3 in batch 2 "):
        measure_similarity(batches, NUM_LAYERS, GROUPS)


def test_bad_states_stop_a_long_stream() -> None:
    """They are looked for every 50 batches."""
    states = make_states(4)
    states[3][0, 0, 0] = float("nan")
    left = iter([states] * 60)
    with pytest.raises(NonFiniteStates, match=r"layer 3 in batch 0 "):
        measure_similarity(left, NUM_LAYERS, GROUPS, cka_features=None)
    assert len(list(left)) == 10


def test_a_token_of_norm_zero_is_an_error() -> None:
    batches = split(make_states(8), [4, 4])
    batches[1][3][1, 6] = 0
    with pytest.raises(ValueError, match=r"a vector of norm zero at layer 3 in batch 1 "):
        measure_similarity(batches, NUM_LAYERS, GROUPS)


def test_bad_input_is_refused() -> None:
    states = make_states(4)
    with pytest.raises(ValueError, match=r"expected the 6 states a_0\.\.a_5, got 5"):
        measure_similarity([states], 5, GROUPS)
    with pytest.raises(ValueError, match="do not fit 7 tokens"):
        measure_similarity([states], NUM_LAYERS, TokenGroups(1, 1, 5))
    with pytest.raises(ValueError, match="no images"):
        measure_similarity([], NUM_LAYERS, GROUPS)


@pytest.mark.parametrize("variant", ["all", "patches", "pooled"])
def test_blocks_of_images_average_to_the_whole(variant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "NUM_BLOCKS", 4)
    states = make_states(11)
    result = measure_similarity(split(states, [3, 5, 3]), NUM_LAYERS, GROUPS, blocks_of=variant)
    blocks = result.blocks
    assert blocks is not None and blocks.sizes.tolist() == [3, 3, 3, 2]
    # Images are dealt out in turn.
    second = direct_matrices(in_float64([s[[1, 5, 9]] for s in states]), GROUPS)
    np.testing.assert_allclose(blocks.matrix_nll[1], second[variant], atol=1e-6)
    mean = np.average(blocks.matrix_nll, axis=0, weights=blocks.sizes)
    off_diagonal = ~np.eye(NUM_LAYERS, dtype=bool)
    np.testing.assert_allclose(mean[off_diagonal], result.matrices[variant][off_diagonal], atol=1e-6)
    resampled = blocks.resampled(50)
    assert resampled.shape == (50, NUM_LAYERS, NUM_LAYERS) and resampled.std(0).max() > 0
    assert measure_similarity(split(states, [11]), NUM_LAYERS, GROUPS).blocks is None


def test_the_same_blocks_of_images_serve_any_number_of_them() -> None:
    blocks = measure_similarity([make_states(100)], NUM_LAYERS, GROUPS, blocks_of="all").blocks
    assert blocks is not None and blocks.sizes.tolist() == [2] * 36 + [1] * 28


def test_resamples_by_hand() -> None:
    """Each draws as many blocks as there are, and a block weighs as many images as it has."""
    first = np.array([[1, 0.2, 0.3], [0.4, 1, 0.5], [0.6, 0.7, 1]])
    second = first**2
    draws = np.random.default_rng(0).multinomial(2, [0.5, 0.5], size=4)
    assert {tuple(draw) for draw in draws.tolist()} >= {(1, 1)}
    found = Blocks(np.stack([first, second]), np.array([1, 3])).resampled(4)
    for resample, (num_first, num_second) in zip(found, draws):
        mean = (num_first * first + 3 * num_second * second) / (num_first + 3 * num_second)
        np.testing.assert_allclose(resample, (mean + mean.T) / 2, atol=1e-12)


def test_the_stack_of_states_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    states = make_states(8)
    for num_images, sizes in ((3, [3, 3, 2]), (0, [1] * 8)):
        monkeypatch.setattr(module, "MAX_CHUNK", num_images * GROUPS.num_tokens * NUM_LAYERS * DIM)
        assert [len(x_btld) for x_btld in module._chunks(states)] == sizes


def test_registers_alone_have_no_pooled_cosine() -> None:
    groups = TokenGroups(0, 3, 0)
    found = measure_similarity([make_states(5, groups)], NUM_LAYERS, groups, cka_features=None)
    assert set(found.matrices) == {"all", "registers"}
