"""Sweeps: who is best at equal bytes is said, and only then."""

from pathlib import Path

import pytest

from kvslim.evaluating.compare import MethodResult
from kvslim.evaluating.methods import parse_methods
from kvslim.evaluating.sweep import beaten, kl_at, near_lossless, plot_sweep, sweep_methods


def one(method: str, family: str, ratio: float, kl: float, agreement: float = 0.9) -> MethodResult:
    return MethodResult(
        method, family, {}, nbytes=100, bytes_per_token=10 / ratio, ratio=ratio, perplexity=10 + kl, kl=kl,
        kl_per_window=(kl,), agreement=agreement, key_error=kl, value_error=kl, seconds=0.1,
    )  # fmt: skip


GRADED = [one("graded-2x", "graded", 2, 1e-4, 0.999), one("graded-4x", "graded", 4, 1e-2)]
NONE = one("none", "none", 1, 0.0, 1.0)


def test_every_name_of_a_sweep_is_a_method() -> None:
    names = sweep_methods((2, 3.5))
    assert [method.name for method in parse_methods(",".join(names))] == names


@pytest.mark.parametrize(("ratio", "kl"), [(2, 1e-4), (3, 1e-3), (4, 1e-2), (1.5, 1e-4), (4.1, None)])
def test_between_two_ratios_the_logarithm_is_a_line(ratio: float, kl: float | None) -> None:
    points = [(2.0, 1e-4), (4.0, 1e-2), (3.0, 5.0)]  # the last is beaten by one of a higher ratio
    assert kl_at(points, ratio) == (None if kl is None else pytest.approx(kl))


def test_only_what_is_better_is_named() -> None:
    worse, better = one("rot4", "rotated", 3, 2e-3), one("magic", "magic", 3, 5e-4)
    assert beaten([NONE, *GRADED, worse]) == []
    assert [line.split()[0] for line in beaten([NONE, *GRADED, worse, better])] == ["magic"]
    assert "no graded cache was measured there" in beaten([NONE, *GRADED, one("rot2", "rotated", 7, 1.0)])[0]


def test_the_near_lossless_zone() -> None:
    assert near_lossless([NONE, *GRADED]) is GRADED[0]
    assert near_lossless([NONE]) is None


def test_the_plot_is_drawn(tmp_path: Path) -> None:
    plot_sweep([NONE, *GRADED, one("rot4", "rotated", 3, 2e-3)], tmp_path / "sweep.png", "title")
    assert (tmp_path / "sweep.png").read_bytes()[:4] == b"\x89PNG"
