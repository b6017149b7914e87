"""How the second factor of a key or value is used: rebuilt per token, applied once per query, or folded away.

For values (Palu, Sec. 3.1.1, Eq. 5): ``apply`` multiplies by ``B_v`` once after ``P H``, ``fold`` puts ``B_v`` into
``W_o``. For keys that are not rotated (Eq. 6): ``apply`` multiplies the query by ``B_kᵀ``, ``fold`` puts it into
``W_q``. Rotated keys must be rebuilt before they are rotated. Folding joins two matrices into one of ``heads * rank``
columns: smaller for ranks below ``head_dim``, several times larger for joint groups (Appendix B). ``auto`` counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvslim.errors import ConfigError

FUSIONS = ("auto", "fold", "apply", "none")
"""What a user may ask for; ``none`` rebuilds everything, for comparison."""

FORMS = ("rebuild", "apply", "fold")


@dataclass(frozen=True)
class Forms:
    """The form of one layer's key and value factor, each of :data:`FORMS`.

    Raises:
        ConfigError: a form is unknown.
    """

    key: str
    value: str

    def __post_init__(self) -> None:
        if self.key not in FORMS or self.value not in FORMS:
            raise ConfigError(f"Forms are {', '.join(FORMS)}, not {self.key!r} and {self.value!r}.")


@dataclass(frozen=True)
class LayerSize:
    """What the parameters of one attention layer depend on.

    Attributes:
        hidden: features of the layer's input and output.
        heads: query heads.
        kv_heads: KV heads.
        head_dim: features per head.
    """

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int

    @property
    def dense(self) -> int:
        """Parameters of the uncompressed query, key, value and output projections, biases aside."""
        return 2 * self.hidden * self.head_dim * (self.heads + self.kv_heads)

    def folded(self, ranks: Sequence[int]) -> int:
        """Parameters of a query or output projection that the second factor of these group ranks is folded into."""
        return self.hidden * sum(ranks) * (self.heads // len(ranks))

    def applied(self, ranks: Sequence[int]) -> int:
        """Parameters of the unchanged projection and the second factor beside it."""
        return self.hidden * self.heads * self.head_dim + self._up(ranks)

    def compressed(self, forms: Forms, key: Sequence[int], value: Sequence[int]) -> int:
        """Parameters of all projections of the compressed layer, biases aside (Palu, Appendix B)."""
        total = self.hidden * (sum(key) + sum(value))
        for form, ranks in ((forms.key, key), (forms.value, value)):
            total += self.folded(ranks) if form == "fold" else self.applied(ranks)
        return total

    def _up(self, ranks: Sequence[int]) -> int:
        return sum(ranks) * self.head_dim * self.kv_heads // len(ranks)


def choose_forms(
    fusion: str, size: LayerSize, key: Sequence[int], value: Sequence[int], *, rotated: bool, clipped: bool
) -> Forms:
    """The forms of one layer.

    Args:
        fusion: one of :data:`FUSIONS`; ``auto`` takes the form with fewer parameters.
        size: of the layer.
        key: ranks of the key's groups.
        value: ranks of the value's groups.
        rotated: keys are rotated, so they are rebuilt whatever is asked for.
        clipped: keys and values are cut to a bound after the projection; nothing linear can be moved past that.

    Raises:
        ConfigError: ``fusion`` is unknown, or asks to fold what is clipped.
    """
    if fusion not in FUSIONS:
        raise ConfigError(f"fusion must be one of {', '.join(FUSIONS)}, not {fusion!r}.")
    if clipped and fusion in ("fold", "apply"):
        raise ConfigError(
            f"This model clips keys and values after the projection, so fusion={fusion!r} would change it. Use "
            f"fusion='auto' or 'none', which rebuild them."
        )
    if fusion == "none" or clipped:
        return Forms("rebuild", "rebuild")

    def form(ranks: Sequence[int]) -> str:
        if fusion != "auto":
            return fusion
        return "fold" if size.folded(ranks) <= size.applied(ranks) else "apply"

    return Forms("rebuild" if rotated else form(key), form(value))
