"""The routes to a spectrum against a float64 SVD: truncation error, honest tails, bases, batches, starts, odd cells."""

from collections.abc import Callable, Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvslim.decomposing.flash import flash_cap, spectra, spectra_of_many
from kvslim.decomposing.hosvd import ROUTES, Hosvd, SpectrumRoute, hosvd, unfold
from kvslim.errors import ConfigError, NonFiniteError

MakeCell = Callable[..., torch.Tensor]
FLASH = [route for route in ROUTES if route != "exact"]
LARGE = [(4, 300, 24), (6, 90, 24)]  # Gram matrix of the columns, and of the tokens
SHAPES = [(3, 120, 16), (4, 40, 16)]
CAP = 10


def svd_tails(x: torch.Tensor) -> torch.Tensor:
    """Relative squared error of truncation to rank 0, 1, …, by a float64 SVD."""
    energies = torch.linalg.svdvals(unfold(x).double()).square()
    return torch.cat((energies.flip(0).cumsum(0).flip(0), energies.new_zeros(1))) / energies.sum()


def lost(x: torch.Tensor, vectors: torch.Tensor) -> float:
    """Relative squared error of projecting the tokens onto orthonormal ``vectors``."""
    a, v = unfold(x).double(), vectors.double()
    return float((a - a @ v @ v.T).square().sum() / a.square().sum())


def defect(basis: torch.Tensor) -> float:
    wide = basis.double()
    return float((wide.T @ wide - torch.eye(basis.shape[1], dtype=torch.float64)).abs().max())


def vectors_of(found: Hosvd) -> torch.Tensor:
    assert found.token_vectors is not None
    return found.token_vectors


@pytest.mark.parametrize("shape", LARGE)
@pytest.mark.parametrize(("route", "excess"), [("gram", 1.005), ("randomized", 1.02)])
def test_truncation_error_is_near_that_of_the_svd(
    arithmetic: str, make_cell: MakeCell, route: SpectrumRoute, excess: float, shape: tuple[int, int, int]
) -> None:
    for fall in (1.2, 1.6, 2.5):
        x = make_cell(*shape, fall=fall)
        best, vectors = svd_tails(x), vectors_of(spectra(x, route, cap=16))
        for rank in (1, 8, 16):
            assert lost(x, vectors[:, :rank]) <= excess**2 * float(best[rank])


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("route", ROUTES)
def test_tails_are_what_is_lost(
    arithmetic: str, make_cell: MakeCell, route: SpectrumRoute, dtype: torch.dtype, shape: tuple[int, int, int]
) -> None:
    x = make_cell(*shape).to(dtype)
    found = spectra(x, route, cap=CAP)
    assert found.energy == pytest.approx(float(x.double().square().sum()), rel=1e-6)
    tail = found.tail()
    assert tail.shape == (CAP + 1, shape[2] + 1)
    assert float(tail[0, -1]) == 1.0
    for rank in (1, CAP // 2, CAP):
        assert float(tail[rank, -1]) == pytest.approx(lost(x, vectors_of(found)[:, :rank]), abs=1e-5)


@pytest.mark.parametrize("route", FLASH)
def test_tails_of_both_modes_are_near_the_exact_ones(
    arithmetic: str, make_cell: MakeCell, route: SpectrumRoute
) -> None:
    x = make_cell(*SHAPES[0])
    expected, found = hosvd(x, CAP).tail(), spectra(x, route, cap=CAP).tail()
    assert torch.allclose(found, expected, rtol=0.02, atol=2e-4)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("route", ROUTES)
def test_bases_are_orthonormal(
    arithmetic: str, make_cell: MakeCell, route: SpectrumRoute, shape: tuple[int, int, int]
) -> None:
    found = spectra(make_cell(*shape), route, cap=CAP)
    assert vectors_of(found).shape == (shape[0] * shape[2], CAP)
    assert defect(vectors_of(found)) < 5e-6
    assert defect(found.feature_basis) < 5e-6
    assert found.route == route


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("route", ROUTES)
def test_a_batch_is_what_its_cells_are_alone(
    arithmetic: str, make_cell: MakeCell, route: SpectrumRoute, shape: tuple[int, int, int]
) -> None:
    cells = [make_cell(*shape, seed=seed) * 10.0**seed for seed in range(3)]
    for workspace in (1, 2**32):  # one at a time, and all at once
        together = spectra_of_many(iter(cells), route, cap=CAP, workspace=workspace)
        for x, found in zip(cells, together, strict=True):
            alone = spectra(x, route, cap=CAP)
            assert found.energy == pytest.approx(alone.energy, rel=1e-9)
            assert torch.allclose(found.tail(), alone.tail(), atol=1e-6)
            assert lost(x, vectors_of(found)) == pytest.approx(lost(x, vectors_of(alone)), rel=1e-3)


def test_cells_are_read_one_at_a_time_and_let_go(make_cell: MakeCell) -> None:
    """A lazy iterable never has two cells alive where the Gram matrix takes their place."""
    alive = []

    def cells() -> Iterator[torch.Tensor]:
        import weakref

        for seed in range(4):
            assert all(reference() is None for reference in alive[:-1])
            x = make_cell(2, 400, 16, seed=seed)
            alive.append(weakref.ref(x))
            yield x

    assert len(spectra_of_many(cells(), "gram")) == 4


@pytest.mark.parametrize("shape", LARGE)
@pytest.mark.parametrize("route", FLASH)
def test_a_warm_start_needs_fewer_steps(
    arithmetic: str, make_cell: MakeCell, route: SpectrumRoute, shape: tuple[int, int, int]
) -> None:
    """A similar cell's vectors lose less after no step than a random start does, and after one as little as asked."""
    x = make_cell(*shape)
    noise = torch.randn(x.shape, generator=torch.Generator().manual_seed(7))
    start = vectors_of(hosvd(x + 0.05 * x.std() * noise, 16))
    best = float(svd_tails(x)[16])
    excess = [lost(x, vectors_of(spectra(x, route, cap=16, steps=0, start=s))) / best - 1 for s in (None, start)]
    assert excess[1] < 0.5 * excess[0]
    after_one = lost(x, vectors_of(spectra(x, route, cap=16, steps=1, start=start)))
    assert after_one <= {"gram": 1.005, "randomized": 1.02}[route] ** 2 * best


@pytest.mark.parametrize("columns", [1, 8, 30])
def test_a_start_may_have_any_number_of_columns(arithmetic: str, make_cell: MakeCell, columns: int) -> None:
    cells = [make_cell(*SHAPES[0], seed=seed) for seed in range(2)]
    start = vectors_of(hosvd(cells[0], columns))
    for starts in ([start, None], [start, start]):
        for x, found in zip(cells, spectra_of_many(cells, "gram", cap=CAP, starts=starts), strict=True):
            assert lost(x, vectors_of(found)) <= 1.02**2 * float(svd_tails(x)[CAP])


@settings(max_examples=30, deadline=None)
@given(
    slabs=st.integers(1, 3),
    tokens=st.integers(1, 50),
    features=st.integers(1, 12),
    cap=st.integers(1, 60),
    route=st.sampled_from(ROUTES),
)
def test_any_shape_and_cap(slabs: int, tokens: int, features: int, cap: int, route: SpectrumRoute) -> None:
    x = torch.randn(slabs, tokens, features, generator=torch.Generator().manual_seed(cap))
    found = spectra(x, route, cap=cap)
    assert found.cap == min(cap, tokens, slabs * features)
    assert defect(vectors_of(found)) < 1e-5
    assert float(found.tail()[-1, -1]) == pytest.approx(lost(x, vectors_of(found)), abs=1e-5)


@pytest.mark.parametrize("shape", [*SHAPES, (1, 1, 1), (5, 1, 64), (1, 400, 1), (2, 3, 50)])
@pytest.mark.parametrize("kind", ["zero", "constant", "rank three", "one token"])
@pytest.mark.parametrize("route", ROUTES)
def test_degenerate_cells(arithmetic: str, route: SpectrumRoute, kind: str, shape: tuple[int, int, int]) -> None:
    rng = torch.Generator().manual_seed(0)
    slabs, tokens, features = shape
    x = torch.zeros(shape)
    if kind == "constant":
        x += 2.5
    elif kind == "rank three":
        x = torch.einsum(
            "tr,rmd->mtd", torch.randn(tokens, 3, generator=rng), torch.randn(3, slabs, features, generator=rng)
        )
    elif kind == "one token":
        x[:, tokens // 2] = 7.0
    found = spectra(x, route, cap=CAP)
    vectors = vectors_of(found)
    assert defect(vectors) < 5e-6
    assert defect(found.feature_basis) < 5e-6
    tail = found.tail()
    assert torch.isfinite(tail).all()
    if kind == "zero":
        assert not tail.any()
    else:
        assert float(tail[min(3, found.cap), -1]) < 1e-5
        assert lost(x, vectors) < 1e-10


@pytest.mark.parametrize("route", ROUTES)
def test_results_depend_on_the_arguments_alone(arithmetic: str, make_cell: MakeCell, route: SpectrumRoute) -> None:
    x = make_cell(*SHAPES[0])
    torch.manual_seed(1)
    before = torch.get_rng_state()
    first = spectra(x, route, cap=CAP, seed=3)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(2)
    second = spectra(x, route, cap=CAP, seed=3)
    assert torch.equal(vectors_of(first), vectors_of(second))
    assert torch.equal(first.core_energy, second.core_energy)
    if route != "exact":
        assert not torch.equal(vectors_of(first), vectors_of(spectra(x, route, cap=CAP, seed=4)))


def test_a_cell_laid_out_by_tokens_is_the_same_cell(make_cell: MakeCell) -> None:
    x = make_cell(*SHAPES[0])
    view = x.transpose(0, 1).contiguous().transpose(0, 1)
    assert torch.equal(vectors_of(spectra(view, "gram")), vectors_of(spectra(x, "gram")))


def test_the_cap_of_flash_jolt() -> None:
    assert [flash_cap(tokens) for tokens in (1, 1024, 1025, 8192, 16384, 10**6)] == [32, 32, 33, 256, 512, 512]
    assert flash_cap(1024, ratio=5) == 64


def test_the_omitted_mass_is_in_every_tail(make_cell: MakeCell) -> None:
    """A spectrum that stops early says of each rank what the full one says, not that the last one is lossless."""
    x = make_cell(2, 200, 16)
    assert torch.allclose(hosvd(x, 5).tail(), hosvd(x).tail()[:6])
    assert float(hosvd(x, 5).tail()[5, 16]) > 0.05


@pytest.mark.parametrize("route", FLASH)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e30])
def test_numbers_out_of_range_are_refused_in_words(arithmetic: str, route: SpectrumRoute, value: float) -> None:
    x = torch.ones(2, 60, 20)
    x[1, 2, 3] = value
    with pytest.raises(NonFiniteError, match="NaN or Inf"):
        spectra(x, route)


def test_wrong_arguments_are_refused_in_words(make_cell: MakeCell) -> None:
    x = make_cell(2, 40, 8)
    with pytest.raises(ConfigError, match="route is one of exact, gram, randomized"):
        spectra(x, "svd")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="cap"):
        spectra(x, "gram", cap=0)
    with pytest.raises(ConfigError, match="steps"):
        spectra(x, "gram", steps=-1)
    with pytest.raises(ConfigError, match="16 rows, not 17"):
        spectra(x, "gram", start=torch.zeros(17, 3))
    with pytest.raises(ConfigError, match="one shape"):
        spectra_of_many([x, x[:1]], "gram")
