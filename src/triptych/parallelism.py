"""How the GPUs of one instance are asked to share a denoiser's work, and what no model could ever do of that."""

from __future__ import annotations

from dataclasses import dataclass

from triptych.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class Parallelism:
    """How the GPUs of one instance share the denoiser's work. None: chosen when the model is known.

    The degrees multiply to the number of GPUs.
    """

    cfg: int | None = None
    """Groups of GPUs that compute the two branches of guidance at the same time: 2, or 1 for none
    (``--denoiser-cfg``)."""
    sp: int | None = None
    """GPUs that share the tokens of one forward, the product of the next two (``--denoiser-sp``)."""
    ulysses: int | None = None
    """Those that exchange attention heads for tokens (``--denoiser-ulysses``)."""
    ring: int | None = None
    """Those that pass keys and values around (``--denoiser-ring``)."""
    tp: int = 1
    """GPUs that share the weights (``--denoiser-tp``)."""
    encoder_tp: int = 1
    """GPUs that share the weights of a text encoder: all of the instance's, or 1 (``--encoder-tp``)."""
    decoder_tp: int = 1
    """GPUs that each decode a strip of the pictures: all of the instance's, or 1 (``--decoder-tp``)."""

    def __post_init__(self) -> None:
        for name in ("cfg", "sp", "ulysses", "ring", "tp"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"denoiser-{name}={value}: must be 1 or more")
        for name in ("encoder_tp", "decoder_tp"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name.replace('_', '-')}={getattr(self, name)}: must be 1 or more")
        if self.cfg not in (None, 1, 2):
            raise ConfigError(f"denoiser-cfg={self.cfg}: must be 1 or 2, guidance has two branches")
        if self.sp is not None and self.sp % ((self.ulysses or 1) * (self.ring or 1)):
            raise ConfigError(
                f"denoiser-sp={self.sp}: must be denoiser-ulysses x denoiser-ring, "
                f"{self.ulysses or 1} x {self.ring or 1}"
            )

    @property
    def of_denoiser(self) -> bool:
        """Whether anything was said of denoisers."""
        return self != Parallelism(encoder_tp=self.encoder_tp, decoder_tp=self.decoder_tp)

    @property
    def said_sp(self) -> int | None:
        """How many GPUs share the tokens, where that was said in any way."""
        if self.sp is not None or self.ulysses is None or self.ring is None:
            return self.sp
        return self.ulysses * self.ring

    def check(self, gpus: int) -> None:
        """Raise `ConfigError` for degrees that no model can have on so many GPUs."""
        sp = self.said_sp or (self.ulysses or 1) * (self.ring or 1)
        said = (self.cfg or 1) * sp * self.tp
        fixed = None not in (self.cfg, self.said_sp)
        if gpus % said or (fixed and said != gpus):
            raise ConfigError(
                f"num-gpus={gpus}: denoiser-cfg x denoiser-sp x denoiser-tp = {self.cfg or 1} x {sp} x {self.tp} must "
                f"{'equal' if fixed else 'divide'} it"
            )
        if self.said_sp is not None and gpus // said not in (1, 2):
            raise ConfigError(
                f"num-gpus={gpus}: denoiser-sp={self.said_sp} leaves {gpus // said} groups of GPUs, and guidance has "
                "only two branches for them"
            )
