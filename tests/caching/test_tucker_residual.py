"""JoLT's storage form: bytes as planned, errors as predicted, layers and crops consistent."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvslim.caching.block import iter_tensors, map_tensors, storage_bytes
from kvslim.caching.tucker_residual import CellPlan, TuckerResidual, cell_bytes, encode_cell
from kvslim.decomposing.tucker import hosvd
from kvslim.quantizing.rotated import distortion


def low_rank_cell(slabs: int, tokens: int, features: int, seed: int = 0) -> torch.Tensor:
    """A cell whose token spectrum falls, like a real one."""
    rng = torch.Generator().manual_seed(seed)
    rank = min(tokens, slabs * features)
    token, _ = torch.linalg.qr(torch.randn(tokens, rank, generator=rng))
    core = torch.randn(rank, slabs, features, generator=rng) * torch.logspace(1, -1, rank)[:, None, None]
    return torch.einsum("tr,rmd->mtd", token, core)


def decoded(block: TuckerResidual) -> torch.Tensor:
    return torch.cat([block.decode(layer) for layer in range(block.shape[0] // block.kv_heads)])


def relative_error(x: torch.Tensor, plan: CellPlan) -> float:
    block = encode_cell(x, plan, kv_heads=x.shape[0], levels="lloyd_max", seed=0).block
    return float((decoded(block) - x).norm() / x.norm())


@settings(max_examples=60, deadline=None)
@given(
    layers=st.integers(1, 3),
    heads=st.integers(1, 3),
    tokens=st.integers(1, 60),
    features=st.integers(1, 40),
    token_rank=st.integers(0, 10),
    feature_share=st.floats(0.1, 1),
    bits=st.sampled_from([0, 2, 3, 4, 5, 6, 8]),
)
def test_planned_bytes_are_the_stored_bytes(
    layers: int, heads: int, tokens: int, features: int, token_rank: int, feature_share: float, bits: int
) -> None:
    slabs = layers * heads
    feature_rank = max(1, int(features * feature_share))
    plan = CellPlan(min(token_rank, tokens, slabs * feature_rank), feature_rank, bits)
    block = encode_cell(torch.randn(slabs, tokens, features), plan, kv_heads=heads, levels="lloyd_max", seed=0).block
    assert storage_bytes(iter_tensors(block)) == cell_bytes(plan, slabs, tokens, features)
    assert decoded(block).shape == (slabs, tokens, features)


@pytest.mark.parametrize("plan", [CellPlan(8, 16, 4), CellPlan(8, 12, 4), CellPlan(0, 16, 4), CellPlan(20, 16, 2)])
def test_error_is_predicted_by_tail_times_distortion(plan: CellPlan) -> None:
    """What the allocator minimises, ε²(b) · τ(r_T, r_d), is what comes out."""
    x = low_rank_cell(4, 200, 16)
    predicted = distortion(plan.bits, 16) * float(hosvd(x).tail()[plan.token_rank, plan.feature_rank])
    assert relative_error(x, plan) ** 2 == pytest.approx(predicted, rel=0.25)


def test_residual_repairs_the_rounding_of_the_factors() -> None:
    x = low_rank_cell(2, 100, 8)
    assert relative_error(x, CellPlan(16, 8, 0)) < 2e-3  # float16 factors
    assert relative_error(x, CellPlan(16, 8, 8)) < 5e-5


@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e4, 1e9])
def test_the_gain_keeps_any_magnitude_in_float16(scale: float) -> None:
    x = low_rank_cell(2, 100, 8) * scale
    assert relative_error(x, CellPlan(4, 8, 8)) < 0.01


def test_layers_and_crop_agree_with_the_whole() -> None:
    x = low_rank_cell(6, 50, 8)
    block = encode_cell(x, CellPlan(5, 6, 4), kv_heads=2, levels="lloyd_max", seed=3).block
    whole = decoded(block)
    assert torch.equal(block.decode(1), whole[2:4])
    cropped = block.crop(17)
    assert torch.allclose(decoded(cropped), whole[:, :17], atol=1e-5)
    assert cropped.tokens == 17
    assert storage_bytes(iter_tensors(cropped)) == cell_bytes(CellPlan(5, 6, 4), 6, 17, 8)


@pytest.mark.parametrize("value", [0.0, 2.5])
def test_constant_and_zero_cells(value: float) -> None:
    x = torch.full((2, 30, 8), value)
    block = encode_cell(x, CellPlan(1, 8, 4), kv_heads=2, levels="lloyd_max", seed=0).block
    assert torch.allclose(decoded(block), x, atol=1e-3)


def test_map_keeps_shared_tensors_shared() -> None:
    x = torch.randn(3)
    first, second = map_tensors((x, x), torch.Tensor.clone)
    assert first is second
    assert storage_bytes([x, x[:1], x.clone()]) == 24


@settings(max_examples=60, deadline=None)
@given(
    layers=st.integers(1, 2),
    heads=st.integers(1, 3),
    tokens=st.integers(1, 60),
    features=st.integers(1, 40),
    share=st.tuples(st.integers(0, 10), st.floats(0.1, 1), st.sampled_from([0, 2, 3, 5, 8])),
    truncate_slabs=st.booleans(),
    queries=st.sampled_from([1, 3, 50]),
    data=st.data(),
)
def test_products_are_those_of_the_decoded_block(
    layers: int, heads: int, tokens: int, features: int, share: tuple[int, float, int], truncate_slabs: bool,
    queries: int, data: st.DataObject,
) -> None:  # fmt: skip
    token_rank, feature_share, bits = share
    slabs, feature_rank = layers * heads, max(1, int(features * feature_share))
    core_slabs = max(1, slabs // 2) if truncate_slabs else slabs
    plan = CellPlan(min(token_rank, tokens, core_slabs * feature_rank), feature_rank, bits)
    rng = torch.Generator().manual_seed(tokens)
    x = torch.randn(slabs, tokens, features, generator=rng)
    slab = torch.linalg.qr(torch.randn(slabs, core_slabs, generator=rng)).Q if truncate_slabs else None
    block = encode_cell(x, plan, kv_heads=heads, levels="lloyd_max", seed=0, slab=slab)
    layer, start = data.draw(st.integers(0, layers - 1)), data.draw(st.integers(0, tokens - 1))
    stop = data.draw(st.integers(start + 1, tokens))
    dense = block.decode(layer, start, stop).double()
    query = torch.randn(heads, queries, features, generator=rng)
    weights = torch.randn(heads, queries, stop - start, generator=rng)
    got, expected = block.scores(layer, query, start, stop), query.double() @ dense.mT
    assert torch.allclose(got.double(), expected, atol=1e-5 * float(x.norm()))
    got, expected = block.mix(layer, weights, start, stop), weights.double() @ dense
    assert torch.allclose(got.double(), expected, atol=1e-5 * float(x.norm()))
