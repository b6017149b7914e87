"""What to do to a model, the ranks chosen for it, and what was done: the settings and results of :mod:`kvslim.palu`."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from kvslim.caching.latent_codes import CODE_BITS, LatentCodes, check_code_settings
from kvslim.caching.latent_graded import GradedLatentCodes
from kvslim.config import JsonConfig, is_count, is_flag, is_number
from kvslim.errors import ConfigError
from kvslim.recovery_config import RecoveryReport

Widths = tuple[tuple[tuple[int, ...], ...], ...]
"""Per layer and group the bits of each run of channels."""

_GRADED_SINKS = 4


@dataclass(frozen=True)
class PaluConfig(JsonConfig):
    """How to compress.

    Attributes:
        rate: fraction of the latent channels removed over keys and values of all layers together, ``0 <= rate < 1``
            (the paper's compression rate).
        group_size: KV heads that share one decomposition: 1 is M-LRD, ``None`` or all heads is J-LRD, between is G-LRD.
        ranks: ``auto`` (``spectral``, or ``uniform`` for plain SVD, which then needs no data); ``uniform``;
            ``fisher``, in proportion to the summed squared gradients (Palu, Sec. 3.3); ``fisher-rms``, the mean
            root-mean-square gradient of the public implementation, for comparison; or
            ``spectral``, water-filling: every channel goes where it takes away the most loss, by its singular energy
            and the loss gradients by the keys and values.
        decomposition: ``whitened`` (truncation-aware, least output error), ``loss-aware`` (least output error as the
            loss feels it) or ``svd`` (of the weights alone).
        sequential: factor each layer by the inputs that the compressed layers before it give it, instead of the
            uncompressed model's. Ranks and output gradients come from the uncompressed model all the same.
        rank_multiple: ranks are multiples of this, or full.
        rank_floor: least share of its full rank that any group keeps. The paper has none (0): on small models a few
            layers with little Fisher information are then cut to almost nothing, and the model breaks.
        fusion: how the second factors are used: ``auto`` (whichever has fewer parameters), ``fold`` (``B_v`` into
            ``W_o``, Eq. 5; ``B_k`` into ``W_q`` where keys are not rotated, Eq. 6), ``apply`` (the same, once per query
            at run time) or ``none`` (keys and values are rebuilt for every cached token).
        bits: width of the cached latents: 16 keeps them in the model's dtype; 2, 3, 4 and 8 pack them as asymmetric
            integers per token and group (Palu, Sec. 3.4), in whatever passes through a cache.
        hadamard: fold a Walsh-Hadamard rotation into the factors of each group, so that no latent channel is an
            outlier. Costs nothing at run time; used below 16 bits only. ``None`` is true unless ``graded``.
        graded: mean stored bits per channel, of the uncompressed keys and values of all layers together: codes, gains
            and positions; ``16 / graded`` is the ratio to a bf16 cache. Widths of 0 to 8 bits go to runs of eight
            channels by one reverse water-filling over all layers, in place of ``bits`` and ``hadamard``; a channel of
            no bits is a rank cut off, so with ``rate=0`` this number alone decides the ranks.
        sinks: tokens at the start of the cache that stay exact; for coded latents only. ``None`` is 4 with ``graded``,
            else 0.
        window: most recent tokens that stay exact; for coded latents only.
    """

    rate: float = 0.3
    group_size: int | None = None
    ranks: str = "auto"
    decomposition: str = "loss-aware"
    rank_multiple: int = 1
    rank_floor: float = 0.125
    fusion: str = "auto"
    bits: int = 16
    hadamard: bool | None = None
    sinks: int | None = None
    window: int = 0
    sequential: bool = False
    graded: float | None = None

    def __post_init__(self) -> None:
        """Check every field that needs no model, and decide what ``auto`` means."""
        if self.ranks == "auto":
            object.__setattr__(self, "ranks", "uniform" if self.decomposition == "svd" else "spectral")
        if self.hadamard is None:
            object.__setattr__(self, "hadamard", self.graded is None)
        if self.sinks is None:
            object.__setattr__(self, "sinks", 0 if self.graded is None else _GRADED_SINKS)
        if not is_number(self.rate) or not 0 <= self.rate < 1:
            raise ConfigError(f"rate is the fraction of channels to remove, at least 0 and below 1, not {self.rate!r}.")
        if self.group_size is not None and not is_count(self.group_size):
            raise ConfigError(f"group_size must be a positive integer or None (joint), not {self.group_size!r}.")
        if not is_count(self.rank_multiple):
            raise ConfigError(f"rank_multiple must be a positive integer, not {self.rank_multiple!r}.")
        if not is_number(self.rank_floor) or not 0 <= self.rank_floor <= 1:
            raise ConfigError(f"rank_floor is a share of the full rank from 0 to 1, not {self.rank_floor!r}.")
        for name, value, known in (
            ("ranks", self.ranks, ("uniform", "fisher", "fisher-rms", "spectral")),
            ("decomposition", self.decomposition, ("whitened", "loss-aware", "svd")),
            ("fusion", self.fusion, ("auto", "fold", "apply", "none")),
        ):
            if value not in known:
                raise ConfigError(f"{name} must be one of {', '.join(known)}, not {value!r}.")
        if not is_flag(self.sequential):
            raise ConfigError(f"sequential is true or false, not {self.sequential!r}.")
        if self.sequential and self.decomposition == "svd":
            raise ConfigError(
                "sequential says which inputs weigh errors, and decomposition='svd' weighs none. Drop one."
            )
        self._check_codes()

    def _check_codes(self) -> None:
        if not is_count(self.bits) or self.bits not in (*CODE_BITS, 16):
            raise ConfigError(f"bits must be one of {', '.join(map(str, CODE_BITS))} or 16, not {self.bits!r}.")
        if not is_flag(self.hadamard):
            raise ConfigError(f"hadamard is true or false, not {self.hadamard!r}.")
        check_code_settings(min(self.bits, max(CODE_BITS)), self.sinks, self.window)
        if self.graded is not None:
            self._check_graded()
        if not self.coded and (self.sinks or self.window):
            raise ConfigError(
                "sinks and window spare tokens from coding, and 16 bits code none. Set bits below 16, or graded."
            )

    def _check_graded(self) -> None:
        if not is_number(self.graded) or not 0 < float(self.graded or 0) <= max(CODE_BITS):
            raise ConfigError(f"graded is a mean number of bits, above 0 and at most 8, not {self.graded!r}.")
        if self.bits < 16 or self.hadamard:
            raise ConfigError("graded chooses widths by channel: leave bits at 16, and hadamard unset or false.")
        if self.sequential or self.decomposition == "svd":
            raise ConfigError(
                "graded needs the cost of every channel before the first layer is factored, which sequential=True and "
                "decomposition='svd' do not have. Use loss-aware or whitened, not sequential."
            )

    @property
    def coded(self) -> bool:
        """Whether the cache packs latents as codes."""
        return self.bits < 16 or self.graded is not None

    @property
    def needs_grams(self) -> bool:
        """Whether the Gram matrices of the uncompressed model are needed."""
        return (self.decomposition != "svd" and not self.sequential) or self.ranks == "spectral"

    @property
    def needs_calibration(self) -> bool:
        return self.needs_grams or self.needs_fisher or self.sequential

    @property
    def needs_fisher(self) -> bool:
        return self.ranks != "uniform" or self.needs_output_grams or self.graded is not None

    @property
    def needs_output_grams(self) -> bool:
        """Whether the Fisher pass has to sum the whole second moments of the output gradients."""
        return self.decomposition == "loss-aware"


@dataclass(frozen=True)
class PaluPlan:
    """The rank of every group.

    Attributes:
        key_ranks: per layer, the ranks of its groups.
        value_ranks: the same for values.
        group_size: KV heads per group.
        full_rank: the rank of a group at which nothing is lost.
        notes: what differs from the request, in words.
        key_widths: with ``graded``, per layer and group the bits of each run of channels.
        value_widths: the same for values.
    """

    key_ranks: tuple[tuple[int, ...], ...]
    value_ranks: tuple[tuple[int, ...], ...]
    group_size: int
    full_rank: int
    notes: tuple[str, ...] = ()
    key_widths: Widths = ()
    value_widths: Widths = ()

    @property
    def channels(self) -> int:
        """Latent channels kept per token, all layers together."""
        return sum(map(sum, (*self.key_ranks, *self.value_ranks)))

    @property
    def kept(self) -> float:
        """Achieved fraction of the channels kept; the achieved rate is ``1 - kept``."""
        groups = sum(map(len, (*self.key_ranks, *self.value_ranks)))
        return self.channels / (groups * self.full_rank)


def codes_of(config: PaluConfig, plan: PaluPlan) -> LatentCodes | GradedLatentCodes | None:
    """How the cache of a model compressed so codes latents; ``None`` if it keeps them in the model's dtype."""
    if not config.coded:
        return None
    exact, ranks = (config.sinks or 0, config.window), (plan.key_ranks, plan.value_ranks)
    if config.graded is not None:
        return GradedLatentCodes(*exact, *ranks, plan.key_widths, plan.value_widths)
    return LatentCodes(config.bits, *exact, *ranks, fitted=bool(config.hadamard))


@dataclass(frozen=True)
class PaluReport:
    """What was done to a model, as ``model.palu``.

    Attributes:
        config: the request.
        plan: the ranks used.
        calibration_tokens: tokens behind the Gram matrices, 0 if none were needed.
        fisher_windows: windows behind the Fisher information, 0 if none were needed.
        forms: per layer how the second factor of the keys and of the values is used: ``rebuild``, ``apply`` or
            ``fold``, see :mod:`kvslim.attending.latent_forms`.
        dense_parameters: parameters of all query, key, value and output projections before, biases aside.
        parameters: the same after (Palu, Appendix B).
        recoveries: what was trained afterwards, in order; see :mod:`kvslim.recovery`.
        calibration_sha256: hash of the calibration windows; see :func:`kvslim.calibrating.windows.windows_hash`.
            ``None`` if none were needed or only their statistics were given.
    """

    config: PaluConfig
    plan: PaluPlan
    calibration_tokens: int
    fisher_windows: int
    forms: tuple[tuple[str, str], ...]
    dense_parameters: int
    parameters: int
    recoveries: tuple[RecoveryReport, ...] = ()
    calibration_sha256: str | None = None

    @property
    def rate(self) -> float:
        """Achieved fraction of latent channels removed."""
        return 1 - self.plan.kept

    def to_dict(self) -> dict[str, Any]:
        """All fields, the achieved rate included, as JSON values."""
        return {**asdict(self), "rate": self.rate}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> PaluReport:
        """Undo :meth:`to_dict`.

        Raises:
            ConfigError: a field is unknown or out of range.
        """
        stored = data["plan"]
        key_ranks, value_ranks = (tuple(map(tuple, stored[name])) for name in ("key_ranks", "value_ranks"))
        widths = (_widths(stored.get(name, ())) for name in ("key_widths", "value_widths"))
        sizes = (stored["group_size"], stored["full_rank"])
        chosen = PaluPlan(key_ranks, value_ranks, *sizes, tuple(stored["notes"]), *widths)
        config = PaluConfig.from_dict(data["config"])
        return cls(
            config=config,
            plan=chosen,
            calibration_tokens=data["calibration_tokens"],
            fisher_windows=data["fisher_windows"],
            forms=tuple(map(tuple, data["forms"])),
            dense_parameters=data["dense_parameters"],
            parameters=data["parameters"],
            recoveries=tuple(map(RecoveryReport.from_dict, data.get("recoveries", ()))),
            calibration_sha256=data["calibration_sha256"],
        )


def _widths(stored: Any) -> Widths:
    return tuple(tuple(tuple(runs) for runs in groups) for groups in stored)
