"""Gram matrices and Fisher information against direct computation; models stay as they were."""

from __future__ import annotations

import pytest
import torch
from transformers import PreTrainedModel

from kvslim.calibrating import fisher
from kvslim.calibrating.drawing import draw_tokens
from kvslim.calibrating.fisher import calibrate_fisher
from kvslim.calibrating.grams import calibrate_grams
from kvslim.errors import NonFiniteError, UnsupportedModelError

WINDOWS = torch.randint(3, 128, (3, 20), generator=torch.Generator().manual_seed(0))


def test_grams_are_the_second_moments_of_the_attention_inputs(tiny_llama: PreTrainedModel) -> None:
    stats = calibrate_grams(tiny_llama, WINDOWS, batch_size=2)
    with torch.no_grad():
        first = tiny_llama.model.layers[0].input_layernorm(tiny_llama.model.embed_tokens(WINDOWS)).flatten(0, 1)
    assert stats.tokens == 60
    assert [gram.dtype for gram in stats.grams] == [torch.float64] * 2
    torch.testing.assert_close(stats.grams[0], first.double().T @ first.double(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(stats.grams[1], calibrate_grams(tiny_llama, WINDOWS).grams[1], rtol=1e-4, atol=1e-4)


def test_fisher_squares_the_gradients_of_the_next_token_loss(tiny_llama: PreTrainedModel) -> None:
    stats = calibrate_fisher(tiny_llama, WINDOWS)
    expected, rms = torch.zeros(2, 2), 0.0
    for window in WINDOWS:
        tiny_llama.zero_grad()
        tiny_llama(input_ids=window[None], labels=window[None]).loss.backward()  # transformers shifts the labels once
        gradient = tiny_llama.model.layers[1].self_attn.v_proj.weight.grad
        expected[1] += gradient.square().view(2, -1).sum(1)
        expected[0] += tiny_llama.model.layers[0].self_attn.k_proj.weight.grad.square().view(2, -1).sum(1)
        rms = rms + gradient.square()
    torch.testing.assert_close(stats.sum_squares[1, 1].float(), expected[1], rtol=1e-4, atol=0)
    torch.testing.assert_close(stats.sum_squares[0, 0].float(), expected[0], rtol=1e-4, atol=0)
    means = (rms / 3).sqrt().view(2, -1).mean(1)
    torch.testing.assert_close(stats.mean_rms[1, 1].float(), means, rtol=1e-4, atol=0)
    assert stats.windows == 3


def test_output_gradients_are_those_of_the_summed_loss(
    tiny_llama: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fisher, "draw_tokens", lambda logits, generator: logits.argmin(-1))
    stats = calibrate_fisher(tiny_llama, WINDOWS, output_grams=True)
    kept: list[torch.Tensor] = []
    projection = tiny_llama.model.layers[1].self_attn.k_proj
    handle = projection.register_forward_hook(lambda module, args, output: kept.append(output))
    logits = tiny_llama(input_ids=WINDOWS).logits[:, :-1].flatten(0, 1)
    handle.remove()
    (gradient,) = torch.autograd.grad(-logits.log_softmax(-1).amin(-1).sum(), kept)
    rows = gradient.flatten(0, 1).double()
    assert stats.output_grams is not None
    assert [gram.dtype for gram in stats.output_grams] == [torch.float64] * 2
    torch.testing.assert_close(stats.output_grams[1][0], rows.T @ rows, rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(stats.output_squares[1, 0], rows.square().sum(0).view(2, 16).sum(1), rtol=1e-4, atol=0)
    traces = torch.stack([gram.diagonal(dim1=1, dim2=2).reshape(2, 2, 16).sum(-1) for gram in stats.output_grams])
    torch.testing.assert_close(stats.output_squares, traces, rtol=1e-4, atol=0)
    assert stats.tokens == 60
    assert calibrate_fisher(tiny_llama, WINDOWS).output_grams is None


def test_tokens_are_drawn_from_the_predictions() -> None:
    shares = torch.tensor([0.5, 0.0, 0.2, 0.3])
    drawn = draw_tokens(shares.log().expand(20000, 4), torch.Generator().manual_seed(1))
    torch.testing.assert_close(drawn.bincount(minlength=4) / 20000, shares, atol=0.02, rtol=0)


def test_output_gradients_foretell_the_divergence(tiny_llama: PreTrainedModel) -> None:
    """A small error in one token's keys or values costs ½ eᵀ F e, here summed over the tokens that have it in turn."""
    draws = 100
    window = WINDOWS[:1, :10]
    stats = calibrate_fisher(tiny_llama, window.repeat(draws, 1), output_grams=True)
    attention = tiny_llama.double().model.layers[0].self_attn
    error = torch.randn(32, generator=torch.Generator().manual_seed(3), dtype=torch.float64) * 1e-2

    @torch.no_grad()
    def predictions() -> torch.Tensor:
        return tiny_llama(input_ids=window).logits[0, :-1].log_softmax(-1)

    own = predictions()
    for kind, projection in enumerate((attention.k_proj, attention.v_proj)):
        divergence = 0.0
        for token in range(10):
            shift = torch.zeros(1, 10, 32, dtype=torch.float64)
            shift[0, token] = error
            handle = projection.register_forward_hook(lambda module, args, output, shift=shift: output + shift)
            divergence += float((own.exp() * (own - predictions())).sum())
            handle.remove()
        assert stats.output_grams is not None
        expected = float(error @ stats.output_grams[0][kind] @ error) / draws / 2
        assert divergence == pytest.approx(expected, rel=0.3)  # 100 draws leave some noise


def test_the_model_is_left_as_it_was(tiny_llama: PreTrainedModel) -> None:
    tiny_llama.train()
    tiny_llama.lm_head.weight.requires_grad_(False)
    before = [p.requires_grad for p in tiny_llama.parameters()]
    seen: list[tuple[int, int]] = []
    calibrate_grams(tiny_llama, WINDOWS, progress=lambda done, total: seen.append((done, total)))
    calibrate_fisher(tiny_llama, WINDOWS, progress=lambda done, total: seen.append((done, total)))
    assert seen == [(1, 3), (2, 3), (3, 3)] * 2
    assert tiny_llama.training
    assert [p.requires_grad for p in tiny_llama.parameters()] == before
    assert all(p.grad is None for p in tiny_llama.parameters())
    assert not any(m._forward_pre_hooks or m._forward_hooks for m in tiny_llama.modules())


def test_broken_weights_name_the_layer_and_leave_no_hooks(tiny_llama: PreTrainedModel) -> None:
    with torch.no_grad():
        tiny_llama.model.layers[0].mlp.down_proj.weight[0, 0] = float("nan")
    with pytest.raises(NonFiniteError, match="layer 1 holds NaN"):
        calibrate_grams(tiny_llama, WINDOWS)
    with pytest.raises(NonFiniteError, match="projection of layer 0"):
        calibrate_fisher(tiny_llama, WINDOWS)
    assert not any(m._forward_pre_hooks or m._forward_hooks for m in tiny_llama.modules())
    assert all(p.requires_grad for p in tiny_llama.parameters())


def test_projections_that_are_not_plain_are_refused(tiny_llama: PreTrainedModel) -> None:
    attention = tiny_llama.model.layers[1].self_attn
    attention.v_proj.weight = attention.k_proj.weight
    with pytest.raises(UnsupportedModelError, match="share one weight"):
        calibrate_grams(tiny_llama, WINDOWS)
    attention.v_proj = torch.nn.Sequential(attention.v_proj)
    with pytest.raises(UnsupportedModelError, match=r"layer 1 are Sequential.*merge adapters"):
        calibrate_fisher(tiny_llama, WINDOWS)
    del attention.v_proj
    with pytest.raises(UnsupportedModelError, match="compressed already"):
        calibrate_fisher(tiny_llama, WINDOWS)
