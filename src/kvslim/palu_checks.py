"""What has to hold of calibration statistics before a model is factored by them; errors name the layer."""

from __future__ import annotations

import torch
from torch import Tensor

from kvslim.calibrating.fisher import FisherStats
from kvslim.calibrating.grams import GramStats
from kvslim.errors import CalibrationError, NonFiniteError
from kvslim.palu_config import PaluConfig, PaluPlan

_ROUNDING = 1e-6
"""Largest negative eigenvalue, as a share of the sum of all, that passes as rounding of float32 products."""


def check_statistics(config: PaluConfig, grams: GramStats | None, fisher: FisherStats | None) -> None:
    """Refuse statistics that no calibration makes: they were damaged, edited, or the text gave none.

    Raises:
        CalibrationError: a matrix is zero, not symmetric or not positive semi-definite.
        NonFiniteError: a matrix holds NaN or Inf.
    """
    if config.needs_grams and grams is not None:
        for layer, gram in enumerate(grams.grams):
            check_gram(gram, f"The Gram matrix of layer {layer}'s inputs")
    if config.needs_output_grams and fisher is not None and fisher.output_grams is not None:
        for layer, pair in enumerate(fisher.output_grams):
            for kind, gram in zip(("keys", "values"), pair, strict=True):
                check_gram(gram, f"The Gram matrix of the gradients by layer {layer}'s {kind}")


def check_gram(gram: Tensor, what: str) -> None:
    """Refuse what is no sum of ``x xᵀ``. ``what`` names it in messages.

    Definite up to rounding is decided by a Cholesky factorization, several times cheaper than eigenvalues.
    """
    if gram.ndim != 2 or gram.shape[0] != gram.shape[1]:
        raise CalibrationError(f"{what} is of shape {tuple(gram.shape)}, not square. Calibrate again.")
    if not torch.isfinite(gram).all():
        raise NonFiniteError(f"{what} holds NaN or Inf. Calibrate again.")
    total = gram.double()
    trace = total.diagonal().sum()
    if not total.any():
        raise CalibrationError(f"{what} is zero: the calibration text moves nothing there. Calibrate on other text.")
    slack = _ROUNDING * trace
    if trace <= 0 or (total - total.T).abs().max() > slack:
        raise CalibrationError(f"{what} is not symmetric and positive semi-definite. Calibrate again.")
    shifted = total + slack * torch.eye(len(total), dtype=total.dtype, device=total.device)
    if int(torch.linalg.cholesky_ex(shifted).info):
        raise CalibrationError(f"{what} is not positive semi-definite. Calibrate again.")


def token_notes(config: PaluConfig, chosen: PaluPlan, tokens: int, hidden: int) -> tuple[str, ...]:
    """Words for a plan whose factors rest on few tokens.

    Args:
        config: with a decomposition that weighs errors, for anything to be said.
        chosen: the ranks.
        tokens: behind the Gram matrices.
        hidden: features of each of them.

    Raises:
        CalibrationError: there are fewer tokens than a group has channels to be chosen by them, so that some channels
            would be chosen by nothing. Groups of full rank lose nothing and need none.
    """
    ranks = [rank for row in (*chosen.key_ranks, *chosen.value_ranks) for rank in row if rank < chosen.full_rank]
    if config.decomposition == "svd" or not ranks:
        return ()
    if tokens < max(ranks):
        raise CalibrationError(
            f"{tokens} calibration tokens cannot choose {max(ranks)} channels of a group: at least as many tokens are "
            f"needed, and better {hidden} or more. Calibrate on more text."
        )
    if tokens < hidden:
        return (
            f"Calibrated on {tokens} tokens, fewer than the {hidden} features of the inputs: directions that they do "
            f"not show are ordered by the weights alone.",
        )
    return ()
