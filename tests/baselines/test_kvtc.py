"""KVTC-like caches: the cut is the optimum, the budget holds, codes crop, statistics are the right ones."""

import copy
import dataclasses
import itertools
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import PreTrainedModel

from kvslim.allocating.partition import Partitions, Piece
from kvslim.baselines import KvtcCache
from kvslim.baselines.kvtc import WIDTHS, best_cuts, layout_of, pieces_of
from kvslim.baselines.kvtc_block import KvtcBlock, KvtcLayout, PcaBasis, encode
from kvslim.caching.block import iter_tensors
from kvslim.decomposing.channel_basis import channel_basis
from kvslim.errors import BudgetError, CacheStateError, CalibrationError, ConfigError
from kvslim.evaluating.baseline_methods import Kvtc
from kvslim.evaluating.graded_methods import bind
from kvslim.evaluating.method_forms import CacheMethod
from kvslim.evaluating.methods import parse_method, parse_methods
from kvslim.graded import GradedCalibration, GradedStats, calibrate
from tiny import VOCAB, build, compress_within

Pair = tuple[PreTrainedModel, GradedStats]


def words(rows: int, tokens: int, seed: int = 0) -> Tensor:
    return torch.randint(2, VOCAB, (rows, tokens), generator=torch.Generator().manual_seed(seed))


@pytest.fixture(scope="module")
def pair() -> Pair:
    model = build("llama-gqa", layers=3)
    return model, calibrate(model, None, words(8, 64), metric="energy")


@torch.no_grad()
def filled(pair: Pair, tokens: int, ratio: float = 4, **options: object) -> KvtcCache:
    cache = KvtcCache(*pair, ratio, **options)  # type: ignore[arg-type]
    pair[0](words(1, tokens, seed=tokens), past_key_values=cache)
    return cache


def compressed(pair: Pair, tokens: int, ratio: float = 4, **options: object) -> KvtcCache:
    cache = filled(pair, tokens, ratio, **options)
    cache.compress()
    assert cache.prefix is not None
    return cache


# ---- cuts ------------------------------------------------------------------------------------------------------------


def every_cut(pieces: list[Piece], length: int, start: int = 0) -> Iterator[tuple[int, float]]:
    """(cost, error) of every cut and every choice of widths."""
    if start == length:
        yield 0, 0.0
    for piece in pieces:
        if piece.start == start:
            for cost, error in every_cut(pieces, length, piece.stop):
                for mine, wrong in zip(piece.costs.tolist(), piece.errors.tolist(), strict=True):
                    yield cost + mine, error + wrong


@settings(max_examples=40, deadline=None)
@given(length=st.integers(1, 5), widths=st.integers(1, 3), seed=st.integers(0, 999))
def test_cuts_are_those_of_brute_force(length: int, widths: int, seed: int) -> None:
    random = np.random.default_rng(seed)
    pieces = [
        Piece(start, stop, random.random(widths), random.integers(0, 5, widths))
        for start, stop in itertools.combinations(range(length + 1), 2)
    ]
    expected: dict[int, float] = {}
    for cost, error in every_cut(pieces, length):
        expected[cost] = min(error, expected.get(cost, np.inf))
    found = Partitions([pieces[i] for i in random.permutation(len(pieces))], length)
    assert {cost: error for cost, error in enumerate(found.errors.tolist()) if np.isfinite(error)} == pytest.approx(
        expected
    )
    table = {(piece.start, piece.stop): piece for piece in pieces}
    for cost, least in expected.items():
        cut = found.best(cost)
        assert [one.start for one in cut] == [0, *(one.stop for one in cut[:-1])]
        assert cut[-1].stop == length
        chosen = [(table[one.start, one.stop], one.width) for one in cut]
        assert sum(int(piece.costs[width]) for piece, width in chosen) == cost
        assert sum(float(piece.errors[width]) for piece, width in chosen) == pytest.approx(least)


def test_measured_groups_against_brute_force() -> None:
    """The real table of a short row: six channels in groups of two, four, or all that are left."""
    pieces = list(pieces_of(torch.tensor([8.0, 4, 2, 1, 0.5, 0.1]), sizes=(2, 4), widths=(0, 2, 4)))
    assert [(p.start, p.stop) for p in pieces] == [(0, 2), (0, 4), (0, 6), (2, 4), (2, 6), (4, 6)]
    assert pieces[0].costs.tolist() == [0, 5, 5]
    assert pieces[0].errors[0] == pytest.approx(80, rel=1e-5)  # dropped channels cost their variance, 64 + 16
    found = Partitions(pieces, 6)
    for budget in range(len(found.errors)):
        least = min(error for cost, error in every_cut(pieces, 6) if cost <= budget)
        assert found.errors[: budget + 1].min() == pytest.approx(least)


def test_mistakes_in_cuts() -> None:
    def piece(start: int, stop: int) -> Piece:
        return Piece(start, stop, np.ones(1), np.array([2]))

    with pytest.raises(ConfigError, match="inside the 4 channels"):
        Partitions([piece(0, 5)], 4)
    with pytest.raises(ConfigError, match="end at channel 4"):
        Partitions([piece(0, 3)], 4)
    with pytest.raises(ConfigError, match="covers the 4 channels"):
        Partitions([piece(0, 2), piece(3, 4)], 4)
    with pytest.raises(BudgetError, match="exactly 3"):
        Partitions([piece(0, 4)], 4).best(3)


# ---- codes -----------------------------------------------------------------------------------------------------------


def steep(tokens: int, heads: int = 2, head_dim: int = 48, seed: int = 0) -> Tensor:
    """Vectors ``(heads, tokens, head_dim)`` with deviations that fall by a quarter of an octave, turned, off centre."""
    generator = torch.Generator().manual_seed(seed)
    features = heads * head_dim
    turn, _ = torch.linalg.qr(torch.randn(features, features, generator=torch.Generator().manual_seed(99)))
    x = torch.randn(tokens, features, generator=generator) * 2.0 ** (-torch.arange(features) / 4)
    return (x @ turn.T + 0.3).view(tokens, heads, head_dim).transpose(0, 1).contiguous()


def pca_of(x: Tensor) -> PcaBasis:
    flat = x.transpose(0, 1).flatten(1).double()
    identity = torch.eye(flat.shape[1])
    basis = channel_basis(flat.T @ flat, flat.sum(0), identity, len(flat), groups=1, metric="energy")
    return PcaBasis(basis, x.shape[0])


def test_coefficients_are_a_rotation() -> None:
    x = steep(2000)
    basis = pca_of(x)
    found = basis.coefficients(x)
    flat = x.transpose(0, 1).flatten(1)
    assert torch.allclose(found.norm(dim=1), (flat - flat.mean(0)).norm(dim=1), rtol=2e-3)
    assert torch.allclose(found.std(0)[:30], basis.deviations[:30], rtol=2e-2)
    assert (basis.deviations.diff() <= 0).all()
    assert torch.allclose(basis.rebuild(found, tuple(range(96))), x, atol=1e-4)


def test_the_cut_beats_equal_bits_on_a_steep_spectrum() -> None:
    basis, x = pca_of(steep(4000)), steep(500, seed=1)
    cuts = best_cuts(basis.deviations)
    for bits in (2, 3, 4):
        for size in (16, 32, 96):
            equal = KvtcLayout(tuple((size, bits) for _ in range(0, 96, size)))
            ours = layout_of(cuts, int(cuts.errors[: equal.token_bytes + 1].argmin()))
            assert ours.token_bytes <= equal.token_bytes
            errors = [float((encode(x, basis, one).decode(0) - x).square().sum()) for one in (ours, equal)]
            assert errors[0] < errors[1] / 4


def test_predicted_errors_are_those_found() -> None:
    """Groups are measured on Gaussian numbers; on such data the sum of a cut comes true."""
    basis, x = pca_of(steep(4000)), steep(2000, seed=1)
    cuts = best_cuts(basis.deviations)
    for token_bytes in (20, 40, 60):
        cost = int(cuts.errors[: token_bytes + 1].argmin())
        found = float((encode(x, basis, layout_of(cuts, cost)).decode(0) - x).square().sum()) / 2000
        assert found == pytest.approx(cuts.errors[cost], rel=0.1)


@settings(max_examples=20, deadline=None)
@given(
    tokens=st.sampled_from([1, 2, 33]), scale=st.sampled_from([1e-20, 1.0, 1e25]), seed=st.integers(0, 99),
    groups=st.lists(st.tuples(st.integers(1, 40), st.sampled_from(WIDTHS)), min_size=1, max_size=5), data=st.data(),
)  # fmt: skip
def test_any_layout_round_trips_and_crops(
    tokens: int, scale: float, seed: int, groups: list[tuple[int, int]], data: st.DataObject
) -> None:
    features = sum(size for size, _ in groups)
    x = torch.randn(1, tokens, features, generator=torch.Generator().manual_seed(seed)) * scale
    layout = KvtcLayout(tuple(groups))
    basis = pca_of(torch.randn(1, 500, features, generator=torch.Generator().manual_seed(0)))
    block = encode(x, basis, layout)
    coefficients, decoded = basis.coefficients(x), block.decode(0)
    back = basis.coefficients(decoded)
    start = 0
    for size, bits in groups:
        part, found = coefficients[:, start : start + size], back[:, start : start + size]
        spread = (part.amax(1) - part.amin(1))[:, None]
        noise = coefficients.abs().max() * 2.0**-8 + 1e-3
        assert (
            ((found - part).abs() <= spread / (2**bits - 1) / 2 + noise).all() if bits else (found.abs() <= noise).all()
        )
        start += size
    assert block.nbytes == tokens * layout.token_bytes
    stop = data.draw(st.integers(1, tokens))
    first = data.draw(st.integers(0, stop))
    assert torch.allclose(block.decode(0, first, stop), decoded[:, first:stop], atol=1e-4 * max(1.0, scale))
    cropped = block.crop(stop)
    assert torch.allclose(cropped.decode(0), decoded[:, :stop], atol=1e-4 * max(1.0, scale))
    assert cropped.nbytes == stop * layout.token_bytes


# ---- caches ----------------------------------------------------------------------------------------------------------


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(tokens=st.integers(1, 700), ratio=st.floats(1, 12), sinks=st.integers(0, 5), window=st.integers(0, 40))
def test_the_budget_holds_on_every_shape_or_is_refused(
    pair: Pair, tokens: int, ratio: float, sinks: int, window: int
) -> None:
    cache = filled(pair, tokens, ratio, sinks=sinks, window=window)
    compress_within(cache, tokens, ratio)


def test_bytes_are_those_of_the_storages_and_the_budget_is_used(pair: Pair) -> None:
    cache = compressed(pair, 600, 3)
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in iter_tensors(cache.prefix)
                if t.numel()}  # fmt: skip
    shared = cache.rope.inv_freq.untyped_storage().nbytes() if cache.rope is not None else 0
    assert cache.nbytes == cache.prefix_nbytes == sum(storages.values()) - shared
    assert cache.prefix_nbytes + cache._header_bytes() >= 0.97 * cache.shape.dense_bytes(600) / 3


def test_more_bytes_less_error(pair: Pair) -> None:
    errors = []
    for ratio in (8, 6, 4, 3, 2.2):
        report = compressed(pair, 1500, ratio).report()
        errors.append(sum(cell.error**2 * cell.energy for cell in report.cells))
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] < errors[0] / 20


def test_deflated_bytes_are_a_figure_of_their_own(pair: Pair) -> None:
    """Tokens that repeat in a short circle give codes that Deflate can shorten; nbytes does not change."""
    cache = KvtcCache(*pair, 3)
    with torch.no_grad():
        pair[0](words(1, 8).repeat(1, 75), past_key_values=cache)
    assert cache.deflated_nbytes == 0
    cache.compress()
    blocks = cache._blocks()
    codes = sum(block.codes.numel() for block in blocks)
    assert len(blocks) == 6
    assert cache.prefix_nbytes - codes < cache.deflated_nbytes < cache.prefix_nbytes
    assert cache.nbytes == cache.prefix_nbytes


@pytest.mark.parametrize("tokens", [1, 13, 44])
def test_crop_keeps_what_was_decoded(pair: Pair, tokens: int) -> None:
    cache = compressed(pair, 300)
    before = [tuple(dense.clone() for dense in layer.dense()) for layer in cache.compressible]
    held = cache.nbytes
    cache.crop(-tokens)
    assert cache.get_seq_length() == 300 - tokens
    for dense_pair, layer in zip(before, cache.compressible, strict=True):
        for dense, cropped in zip(dense_pair, layer.dense(), strict=True):
            assert torch.allclose(cropped, dense[:, :, : 300 - tokens], atol=1e-5)
    assert cache.nbytes < held


def test_sinks_and_window_are_exact(pair: Pair) -> None:
    cache = filled(pair, 400, window=20)
    exact = cache.compressible[1].values.clone()
    cache.compress()
    _, rebuilt = cache.compressible[1].dense()
    assert torch.equal(rebuilt[:, :, :4], exact[:, :, :4])
    assert torch.equal(rebuilt[:, :, 380:], exact[:, :, 380:])
    assert not torch.equal(rebuilt[:, :, 4:380], exact[:, :, 4:380])
    assert cache.report().ratio >= 4


def test_generate_with_left_padding(pair: Pair) -> None:
    """A padded row gets the tokens and the bytes that it gets alone."""
    model, _ = pair
    ids, mask = words(2, 320), torch.ones(2, 320, dtype=torch.long)
    ids[1, :41], mask[1, :41] = 0, 0
    greedy = {"max_new_tokens": 8, "do_sample": False}
    cache = KvtcCache(*pair, 3, attention_mask=mask)
    out = model.generate(ids, attention_mask=mask, past_key_values=cache, **greedy)
    assert cache.get_seq_length() == 327
    alone, other = KvtcCache(*pair, 3), KvtcCache(*pair, 3)
    single = model.generate(ids[1:, 41:], past_key_values=alone, **greedy)
    model.generate(ids[:1], past_key_values=other, **greedy)
    assert out[1, 320:].tolist() == single[0, 279:].tolist()
    assert cache.prefix is not None
    assert [row.length for row in cache.prefix.rows] == [320, 279]
    assert cache.prefix_nbytes == alone.prefix_nbytes + other.prefix_nbytes


@torch.no_grad()
def test_later_tokens_are_sealed_under_the_ratio(pair: Pair) -> None:
    cache = compressed(pair, 400, 3, seal=200)
    for at in range(7):  # a seal keeps 32 tokens back
        pair[0](words(1, 40, seed=at), past_key_values=cache)
    assert {cell.start for cell in cache.report().cells} == {4, 400}
    assert cache.report().ratio >= 3
    with pytest.raises(BudgetError, match="Seal more tokens"):
        cache.seal(1)


@torch.no_grad()
def test_attention_reads_the_codes_as_they_decode(pair: Pair) -> None:
    cache, logits = compressed(pair, 300), []
    model = build("llama-gqa", layers=3)
    cache.read_by(model.config)
    for attention in ("kvslim", "sdpa"):
        model.set_attn_implementation(attention)
        logits.append(model(words(1, 4, seed=1), past_key_values=copy.deepcopy(cache)).logits)
    assert torch.allclose(*logits, atol=2e-4)


def test_a_16_bit_model() -> None:
    model = build("llama-gqa").to(torch.bfloat16)
    cache = compressed((model, calibrate(model, None, words(4, 64), metric="energy")), 500, 3)
    keys, values = cache.compressible[1].dense()
    assert keys.dtype == values.dtype == torch.bfloat16
    assert 0 < cache.report().key_error < 0.5
    assert all(isinstance(block, KvtcBlock) for block in cache._blocks())


# ---- what is refused, and names --------------------------------------------------------------------------------------


def test_statistics_of_another_kind_are_refused(pair: Pair) -> None:
    model, stats = pair
    by_loss = dataclasses.replace(stats, calibration=GradedCalibration(metric="loss"))
    with pytest.raises(ConfigError, match=r"metric='loss'.*metric='energy'.*--metric energy"):
        KvtcCache(model, by_loss, 4)
    grouped = dataclasses.replace(stats, calibration=GradedCalibration(metric="energy", group_size=1))
    with pytest.raises(ConfigError, match=r"group_size=1.*all KV heads together"):
        KvtcCache(model, grouped, 4)
    with pytest.raises(CacheStateError, match="another model"):
        KvtcCache(build("llama-mqa"), stats, 4)
    with pytest.raises(ConfigError, match="GradedStats"):
        KvtcCache(model, None, 4)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="ratio is at least 1"):
        KvtcCache(model, stats, 0.5)


def test_names(pair: Pair) -> None:
    model, _ = pair
    method = parse_method("kvtc-4.5x:window=16")
    assert isinstance(method, Kvtc)
    assert method.needs_calibration
    assert method.family == "kvtc"
    settings = {key: method.settings[key] for key in ("ratio", "sinks", "window", "seal")}
    assert settings == {"ratio": 4.5, "sinks": 4, "window": 16, "seal": None}
    with pytest.raises(CalibrationError, match="no statistics"):
        method.make_cache(model)
    for name, words_of in (("kvtc-0.5x", "ratio"), ("kvtc-4x:seal=0", "seal"), ("kvtc-4x:gs1", "unknown option")):
        with pytest.raises(ConfigError, match=words_of):
            parse_method(name)
    with pytest.raises(CalibrationError, match="calibration text"):
        bind(model, [method], None)


def test_methods_share_one_calibration(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """KVTC and graded caches by energy need the same statistics, graded caches by the loss others."""
    from kvslim.evaluating import graded_methods

    made = []

    def counted(
        model: PreTrainedModel, windows: Tensor, calibration: GradedCalibration, **options: object
    ) -> GradedStats:
        made.append(calibration)
        return dataclasses.replace(pair[1], calibration=calibration)

    monkeypatch.setattr(graded_methods, "calibrate_graded", counted)
    methods = parse_methods("none,kvtc-4x,kvtc-3x:sinks=0,graded-4x:energy,graded-4x")
    bound = bind(pair[0], methods, words(8, 64))
    assert [method.name for method in bound] == [method.name for method in methods]
    assert [settings.metric for settings in made] == ["energy", "loss"]
    assert not any(method.needs_calibration for method in bound)
    assert isinstance(bound[2], CacheMethod)
    cache = bound[2].make_cache(pair[0])
    assert isinstance(cache, KvtcCache)
    assert cache.n_sinks == 0
