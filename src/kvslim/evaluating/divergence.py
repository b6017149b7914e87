"""How far the predictions from a compressed cache are from the uncompressed ones, as sums that can be pooled."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from kvslim.errors import NonFiniteError

_ROWS_AT_ONCE = 64  # rows of the vocabulary that are held in float64 together


@dataclass(frozen=True)
class Divergence:
    """Sums over scored tokens; add two to pool them.

    Attributes:
        tokens: scored tokens.
        nll: negative log likelihood of the text in nats.
        kl: ``KL(P_reference ‖ P_compressed)`` in nats.
        agreed: tokens with the same most likely prediction.
    """

    tokens: int = 0
    nll: float = 0.0
    kl: float = 0.0
    agreed: int = 0

    def __add__(self, other: Divergence) -> Divergence:
        return Divergence(
            self.tokens + other.tokens, self.nll + other.nll, self.kl + other.kl, self.agreed + other.agreed
        )

    @property
    def perplexity(self) -> float:
        return math.exp(min(self.nll / self.tokens, 700.0))  # exp(700) is near the largest float

    @property
    def mean_kl(self) -> float:
        """Nats per token."""
        return self.kl / self.tokens

    @property
    def agreement(self) -> float:
        return self.agreed / self.tokens


def divergence(logits: Tensor, reference: Tensor, targets: Tensor) -> Divergence:
    """Compare ``logits`` with ``reference``, both ``(N, vocab)``, on the next tokens ``targets`` ``(N,)`` int64.

    Computed in float64, because a divergence of 1e-5 nats is a difference of numbers near 10. The rounding that is
    left can make a divergence of zero slightly negative; it is cut at zero per block of rows.

    Raises:
        NonFiniteError: logits hold NaN or Inf, so that there is nothing to compare.
    """
    for name, given in (("compressed", logits), ("uncompressed", reference)):
        if not bool(torch.isfinite(given).all()):
            raise NonFiniteError(f"The logits of the {name} run hold NaN or Inf. Try another dtype for the model.")
    total = Divergence()
    for start in range(0, logits.shape[0], _ROWS_AT_ONCE):
        rows = slice(start, start + _ROWS_AT_ONCE)
        log_q = torch.log_softmax(logits[rows].double(), -1)
        log_p = torch.log_softmax(reference[rows].double(), -1)
        wanted = targets[rows].to(log_q.device)
        total += Divergence(
            tokens=int(wanted.shape[0]),
            nll=float(-log_q.gather(1, wanted[:, None]).sum()),
            kl=max(0.0, float((log_p.exp() * (log_p - log_q)).sum())),
            agreed=int((log_p.argmax(-1) == log_q.argmax(-1)).sum()),
        )
    return total
