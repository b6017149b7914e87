from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache

from kvslim.decomposing.spectrum import cumulative_share, mode_energies, rank_for_error
from kvslim.errors import ConfigError
from kvslim.evaluating.spectrum import (
    AxisSpectrum,
    cache_spectra,
    check_claims,
    findings,
    plot_spectra,
    spectrum_of,
    tensor_spectra,
)


def known_ranks(*, heads: int, tokens: int, features: int) -> torch.Tensor:
    """``(2, 6, 80, 16)`` with these multilinear ranks in both layers."""
    generator = torch.Generator().manual_seed(0)
    core = torch.randn(2, heads, tokens, features, generator=generator, dtype=torch.float64)
    for mode, (size, rank) in enumerate(((6, heads), (80, tokens), (16, features)), start=1):
        basis = torch.linalg.qr(torch.randn(size, rank, generator=generator, dtype=torch.float64)).Q
        core = torch.tensordot(core, basis, dims=([mode], [1])).movedim(-1, mode)
    return core


def test_energies_are_squared_singular_values() -> None:
    x = torch.randn(3, 40, 5, generator=torch.Generator().manual_seed(0))
    for mode in range(3):
        expected = torch.linalg.svdvals(x.double().movedim(mode, 0).flatten(1)).square()
        torch.testing.assert_close(mode_energies(x, mode), expected, rtol=1e-9, atol=1e-9)


def test_rank_for_error_is_the_least_that_suffices() -> None:
    energies = torch.tensor([90.0, 9.0, 0.9, 0.1], dtype=torch.float64)
    for error in (0.5, 0.2, 0.1, 0.05, 0.01):
        rank = rank_for_error(energies, error)
        lost = [float(energies[r:].sum() / energies.sum()) ** 0.5 for r in range(5)]
        assert lost[rank] <= error
        assert all(loss > error for loss in lost[:rank])
    assert rank_for_error(torch.zeros(4, dtype=torch.float64), 0.1) == 0
    assert cumulative_share(energies).tolist() == pytest.approx([0.9, 0.99, 0.999, 1.0])


def test_known_ranks_are_found() -> None:
    x = known_ranks(heads=4, tokens=20, features=7)
    by_axis = {one.axis: one for one in tensor_spectra("values", x)}
    assert {axis: one.full for axis, one in by_axis.items()} == {"heads": 6, "tokens": 80, "features": 16, "layers": 2}
    for axis, rank in (("heads", 4), ("tokens", 20), ("features", 7)):
        assert by_axis[axis].share[rank - 1] == pytest.approx(1)
        assert by_axis[axis].share[rank - 2] < 1 - 1e-6
        assert by_axis[axis].rank_1 <= rank
        assert by_axis[axis].rank_10 <= by_axis[axis].rank_1


def test_findings_follow_the_numbers() -> None:
    few_tokens = findings(tensor_spectra("values", known_ranks(heads=6, tokens=4, features=16)))
    few_features = findings(tensor_spectra("values", known_ranks(heads=6, tokens=60, features=2)))
    assert "Most redundant: tokens" in few_tokens[0]
    assert "Most redundant: features" in few_features[0]


def spectra_with(**kinds: dict[str, tuple[float, int]]) -> list[AxisSpectrum]:
    """Entries with these ``(rank for 10 %, full rank)`` per kind and axis."""
    return [
        AxisSpectrum(kind, axis, full, rank, full, (1.0,) * full)
        for kind, axes in kinds.items()
        for axis, (rank, full) in axes.items()
    ]


AS_IN_THE_PAPER = {
    "keys_pre": {"heads": (3, 3), "tokens": (40, 100), "features": (20, 64), "layers": (29, 30)},
    "keys_post": {"heads": (3, 3), "tokens": (60, 100), "features": (30, 64), "layers": (29, 30)},
    "values": {"heads": (3, 3), "tokens": (80, 100), "features": (50, 64), "layers": (28, 30)},
}


@pytest.mark.parametrize(
    ("kind", "axis", "rank", "broken"),
    [
        ("values", "layers", 26, "Heads and layers are nearly incompressible"),
        ("keys_post", "tokens", 99, "Tokens and features carry the redundancy"),
        ("values", "features", 19, "Values are harder than keys"),
        ("keys_post", "features", 19, "Keys are easier before RoPE than after"),
        (None, None, None, None),
    ],
)
def test_each_claim_fails_by_its_own_numbers(
    kind: str | None, axis: str | None, rank: int | None, broken: str | None
) -> None:
    places = {one: dict(axes) for one, axes in AS_IN_THE_PAPER.items()}
    if kind is not None:
        places[kind][axis] = (rank, places[kind][axis][1])
    claims = check_claims(spectra_with(**places))
    assert [claim.text for claim in claims if not claim.holds] == ([broken] if broken else [])
    assert len(claims) == 4
    assert "values heads 100%, layers" in claims[0].evidence
    features = places["values"]["features"][0]
    assert claims[2].evidence.endswith(f"tokens 40.0 against 80.0 of 100, features 20.0 against {features}.0 of 64")


def test_an_axis_of_one_is_no_evidence() -> None:
    places = {kind: {**axes, "heads": (1, 1)} for kind, axes in AS_IN_THE_PAPER.items()}
    assert "heads" not in check_claims(spectra_with(**places))[0].evidence
    places = {kind: {**axes, "layers": (1, 1)} for kind, axes in places.items()}
    assert [claim.text[:6] for claim in check_claims(spectra_with(**places))] == ["Values", "Keys a"]


@torch.no_grad()
def test_before_rope_means_the_keys_as_projected(tiny_llama: PreTrainedModel) -> None:
    ids = torch.randint(2, 128, (50,), generator=torch.Generator().manual_seed(0))
    projected: list[torch.Tensor] = []
    hooks = [
        layer.self_attn.k_proj.register_forward_hook(lambda _m, _i, out: projected.append(out))
        for layer in tiny_llama.model.layers
    ]
    spectra = {(one.kind, one.axis): one for one in cache_spectra(tiny_llama, ids)}
    for hook in hooks:
        hook.remove()
    keys = torch.stack([out[0].unflatten(-1, (2, 16)).transpose(0, 1) for out in projected])
    expected = {one.axis: one for one in tensor_spectra("keys_pre", keys)}
    for axis in ("heads", "tokens", "features", "layers"):
        assert spectra["keys_pre", axis].share == pytest.approx(expected[axis].share, rel=1e-5)
    assert spectra["keys_post", "tokens"].share != pytest.approx(expected["tokens"].share, rel=1e-3)
    cache = DynamicCache(config=tiny_llama.config)
    tiny_llama(ids[None], past_key_values=cache)
    values = torch.stack([layer.values[0] for layer in cache.layers])
    assert spectra["values", "tokens"] == tensor_spectra("values", values)[1]


def test_results_and_plot(tiny_llama: PreTrainedModel, tmp_path: Path) -> None:
    results = spectrum_of(tiny_llama, "tiny", torch.arange(2, 60), "numbers")
    results.save(tmp_path / "spectrum.json")
    plot_spectra(results, tmp_path / "spectrum.png")
    data = json.loads((tmp_path / "spectrum.json").read_text())
    assert data["schema"] == 1
    assert len(data["spectra"]) == 12
    assert data["spectra"][0]["fraction_10"] == results.spectra[0].fraction_10
    assert len(data["findings"]) == 5
    assert [claim["holds"] for claim in data["claims"]] == [claim.holds for claim in results.claims]
    assert len(data["claims"]) == 4
    assert (tmp_path / "spectrum.png").stat().st_size > 10_000
    assert dataclasses.is_dataclass(results)


def test_too_few_tokens(tiny_llama: PreTrainedModel) -> None:
    with pytest.raises(ConfigError, match="at least 2"):
        cache_spectra(tiny_llama, torch.tensor([5]))
