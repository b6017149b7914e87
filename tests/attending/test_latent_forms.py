"""Which form a second factor takes, counted by hand on Llama-2-7B."""

from __future__ import annotations

import pytest

from kvslim.attending.latent_forms import Forms, LayerSize, choose_forms
from kvslim.errors import ConfigError

LLAMA = LayerSize(hidden=4096, heads=32, kv_heads=32, head_dim=128)


def test_the_paper_s_example() -> None:
    # Groups of four heads at 70 %: (mr + nr) / (mn) = 0.7875 with m = 8 n (Palu, Appendix B).
    ranks = [358] * 8
    rebuilt = LLAMA.compressed(Forms("rebuild", "apply"), ranks, ranks) - 2 * 4096 * 4096
    assert rebuilt / (2 * 4096 * 4096) == pytest.approx(0.7875, abs=2e-3)
    assert LLAMA.dense == 4 * 4096 * 4096


def test_folding_values_of_groups_of_four_at_three_quarters_triples_the_output() -> None:
    ranks = [384] * 8
    assert LLAMA.folded(ranks) == 3 * 4096 * 4096
    assert LLAMA.applied(ranks) - 4096 * 4096 == 1_572_864  # the 1.6 M of one layer
    assert choose_forms("auto", LLAMA, ranks, ranks, rotated=True, clipped=False) == Forms("rebuild", "apply")


def test_folding_pays_for_heads_by_themselves() -> None:
    ranks = [64] * 32
    assert choose_forms("auto", LLAMA, ranks, ranks, rotated=False, clipped=False) == Forms("fold", "fold")
    assert choose_forms("auto", LLAMA, ranks, ranks, rotated=True, clipped=False) == Forms("rebuild", "fold")
    assert choose_forms("apply", LLAMA, ranks, ranks, rotated=True, clipped=False) == Forms("rebuild", "apply")
    assert choose_forms("none", LLAMA, ranks, ranks, rotated=False, clipped=False) == Forms("rebuild", "rebuild")


def test_nothing_moves_past_a_clip() -> None:
    assert choose_forms("auto", LLAMA, [64] * 32, [64] * 32, rotated=False, clipped=True) == Forms("rebuild", "rebuild")
    for fusion in ("fold", "apply"):
        with pytest.raises(ConfigError, match="clips"):
            choose_forms(fusion, LLAMA, [64] * 32, [64] * 32, rotated=False, clipped=True)


def test_unknown_words() -> None:
    with pytest.raises(ConfigError, match="auto, fold, apply, none"):
        choose_forms("melt", LLAMA, [1], [1], rotated=True, clipped=False)
    with pytest.raises(ConfigError, match="rebuild, apply, fold"):
        Forms("rebuild", "melt")
