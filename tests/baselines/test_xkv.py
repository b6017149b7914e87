"""Cross-layer SVD: the best approximation of its rank, one token basis for a layer group, bytes under the ratio."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvslim.baselines import XkvCache
from kvslim.baselines.xkv import encode, ranks_for
from kvslim.errors import BudgetError, ConfigError


def side_by_side(x: Tensor, layers: int) -> Tensor:
    """The matrix that the paper decomposes: tokens by layers, heads and features, put together by hand."""
    heads = x.shape[0] // layers
    return torch.cat([torch.cat([x[at * heads + h] for h in range(heads)], dim=1) for at in range(layers)], dim=1)


@settings(max_examples=40, deadline=None)
@given(
    tokens=st.sampled_from([1, 31, 32, 33, 90]), layers=st.sampled_from([1, 2, 3]), heads=st.sampled_from([1, 2]),
    features=st.sampled_from([4, 15]), seed=st.integers(0, 99), scale=st.sampled_from([1e-20, 1.0, 1e25]),
    data=st.data(),
)  # fmt: skip
def test_error_is_that_of_the_truncated_svd(
    tokens: int, layers: int, heads: int, features: int, seed: int, scale: float, data: st.DataObject
) -> None:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(layers * heads, tokens, features, generator=generator) * scale
    matrix = side_by_side(x, layers).double()
    rank = data.draw(st.integers(1, min(matrix.shape)))
    block = encode(x, layers, rank)
    rebuilt = torch.cat([block.decode(layer) for layer in range(layers)])
    error = float((rebuilt.double() - x).norm() / x.double().norm())
    best = float(torch.linalg.svdvals(matrix)[rank:].square().sum().sqrt() / matrix.norm())
    assert best - 1e-6 <= error <= best + 2e-3  # float16 factors
    assert block.nbytes == 2 * rank * (tokens + matrix.shape[1])

    stop = data.draw(st.integers(1, tokens))
    start = data.draw(st.integers(0, stop - 1))
    bound = 1e-5 * float(x.abs().max()) * features
    layer = data.draw(st.integers(0, layers - 1))
    dense = block.decode(layer)
    assert torch.allclose(block.decode(layer, start, stop), dense[:, start:stop], atol=bound)
    assert torch.allclose(block.crop(stop).decode(layer), dense[:, :stop], atol=bound)
    assert block.crop(stop).nbytes == 2 * rank * (stop + matrix.shape[1])
    query = torch.randn(heads, 3, features, generator=generator)
    assert torch.allclose(block.scores(layer, query, start, stop), query @ dense[:, start:stop].mT, atol=30 * bound)
    weights = torch.rand(heads, 3, stop - start, generator=generator)
    assert torch.allclose(block.mix(layer, weights, start, stop), weights @ dense[:, start:stop], atol=90 * bound)


def test_layers_that_share_their_tokens_cost_one_basis() -> None:
    """The point of xKV: layers whose singular vectors agree need no more rank together than alone."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randn(200, 5, generator=generator)
    x = torch.stack([tokens @ torch.randn(5, 16, generator=generator) for _ in range(8)])  # 4 layers of 2 heads
    together = encode(x, 4, 5)
    alone = [encode(x[2 * at : 2 * at + 2], 1, 5) for at in range(4)]
    rebuilt = torch.cat([together.decode(layer) for layer in range(4)])
    assert float((rebuilt - x).norm() / x.norm()) < 1e-3
    assert together.nbytes == 2 * 5 * (200 + 128)
    assert sum(one.nbytes for one in alone) == 2 * 5 * (800 + 128)


def test_degenerate_tensors() -> None:
    assert torch.equal(encode(torch.zeros(4, 10, 3), 2, 3).decode(1), torch.zeros(2, 10, 3))
    constant = torch.full((2, 10, 3), 7.0)
    assert torch.allclose(encode(constant, 1, 5).decode(0), constant, rtol=2e-3)


@given(
    tokens=st.integers(1, 5000), features=st.integers(1, 3000), ratio=st.floats(1, 20), split=st.floats(0.05, 0.95),
    exact=st.sampled_from([0, 4, 100]), item_bytes=st.sampled_from([2, 4]),
)  # fmt: skip
def test_ranks_keep_the_ratio(
    tokens: int, features: int, ratio: float, split: float, exact: int, item_bytes: int
) -> None:
    allowed = 4 * (tokens + exact) * features / ratio - 2 * exact * features * item_bytes
    per_rank = 2 * (tokens + features)
    if allowed < 2 * per_rank:
        with pytest.raises(BudgetError, match="a ratio of at most"):
            ranks_for(tokens, features, ratio, split, exact, item_bytes)
        return
    keys, values = ranks_for(tokens, features, ratio, split, exact, item_bytes)
    assert 1 <= keys <= min(tokens, features)
    assert 1 <= values <= min(tokens, features)
    used = (keys + values) * per_rank
    assert used <= allowed
    assert used > allowed - per_rank or keys == values == min(tokens, features)


def test_the_split_of_the_paper() -> None:
    keys, values = ranks_for(4000, 2048, 3, 0.4)
    assert values / keys == pytest.approx(1.5, rel=0.01)


@pytest.mark.parametrize("pre_rope", [True, False])
@pytest.mark.parametrize(("ratio", "window"), [(2, 0), (4, 0), (4, 20)])
def test_measured_ratio(make_tiny, ratio: float, window: int, pre_rope: bool) -> None:
    model = make_tiny(layers=5)
    cache = XkvCache(model, ratio, layers=2, pre_rope=pre_rope, window=window)
    with torch.no_grad():
        model(torch.randint(2, 128, (1, 400), generator=torch.Generator().manual_seed(0)), past_key_values=cache)
    cache.compress()
    report = cache.report()
    assert ratio <= report.ratio < 1.15 * ratio
    assert {cell.layers for cell in report.cells} == {(0, 1), (2, 3), (4,)}
    exact = 5 * 2 * 2 * 16 * 4 * (4 + window)  # layers, kinds, heads, features, bytes of a float32, sinks and window
    assert report.prefix_nbytes == sum(cell.nbytes for cell in report.cells) + exact


def test_a_short_prompt_stays_exact_and_says_so(make_tiny) -> None:
    model = make_tiny()
    cache = XkvCache(model, 8)
    with torch.no_grad():
        model(torch.arange(2, 10)[None], past_key_values=cache)
    cache.compress()
    assert cache.prefix is None
    assert "8 tokens at 8x, 4 of them exact, leave no rank" in cache.report().note


def test_mistakes(make_tiny) -> None:
    model = make_tiny()
    for settings_, words in (({"ratio": 0.5}, "ratio"), ({"ratio": 2, "layers": 0}, "layers"),
                             ({"ratio": 2, "split": 1.0}, "split")):  # fmt: skip
        with pytest.raises(ConfigError, match=words):
            XkvCache(model, **settings_)
