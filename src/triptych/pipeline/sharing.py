"""Which models of a pipeline the ranks of an instance share, and what these can be shared by."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Mapping
from typing import Any

from triptych.accel.parallel.decoder import share_decoder
from triptych.accel.parallel.degrees import Degrees, Traits, resolve
from triptych.accel.parallel.denoiser import SharedDenoiser
from triptych.accel.parallel.sequence import ways_of
from triptych.accel.parallel.team import Team
from triptych.accel.parallel.tensor import PLANNED
from triptych.accel.parallel.text import PLANNED as TEXT_PLANNED
from triptych.accel.parallel.text import shard_text
from triptych.accel.tally import Tally
from triptych.accel.wan_vae import supports_class
from triptych.errors import ConfigError
from triptych.ids import Role

log = logging.getLogger(__name__)


class Shares:
    """All that a team will share of a pipeline, known before any weights are read; nothing without a team."""

    def __init__(
        self,
        team: Team | None,
        roles: tuple[Role, ...],
        present: Mapping[str, tuple[str, str]],
        components: Mapping[str, Any],
        used: Iterable[str],
        *,
        guided: bool,
        off: bool = False,
    ) -> None:
        """``present`` are library and class of the model's ``components``, of which the denoiser has ``used``.

        ``off``: requests have no guidance unless they ask for it. Raises `ConfigError` for what cannot be shared.
        """
        self._size = 1 if team is None else team.size
        self._denoiser: SharingPlan | None = None
        self._others: list[TextSharing | PictureSharing] = []
        if team is None:
            return
        if Role.DENOISER in roles:
            self._denoiser = SharingPlan(team, components, used, guided=guided)
        if team.wish.encoder_tp > 1:
            self._others.append(TextSharing(team, present, components))
        if team.wish.decoder_tp > 1:
            self._others.append(PictureSharing(team, present, components))
        if team.rank == 0:
            self._say(off=off)

    @property
    def words(self) -> str:
        """How the ranks share the work, for operators; empty without a team."""
        shared = [] if self._denoiser is None else [str(self._denoiser.degrees)]
        shared += [other.words for other in self._others]
        return f"{self._size} GPUs: {'; '.join(shared)}" if shared else ""

    def _say(self, *, off: bool) -> None:
        """Log who does what, and who does nothing."""
        if self._denoiser is None:
            log.info("%s", self.words)
            return
        degrees, size = self._denoiser.degrees, self._size
        log.info("%s (%s)", self.words, degrees.why)
        working = degrees.plain.ranks * degrees.tp
        if working < size:
            log.warning(
                "requests without guidance%s have work for %d of %d GPUs, and the others compute the same: %s",
                ", as they are by default here," if off else "",
                working,
                size,
                degrees.passed_over,
            )

    @property
    def token_ranks(self) -> tuple[int, int]:
        """How many ranks share the tokens of a forward, in requests with guidance and in those without."""
        if self._denoiser is None:
            return 1, 1
        degrees = self._denoiser.degrees
        return degrees.guided.sp, degrees.plain.sp

    def share(self, loaded: Mapping[str, Any], tally: Tally) -> tuple[SharedDenoiser | None, tuple[str, ...]]:
        """Have the loaded models compute this rank's share; what changes results by it, for the fingerprint.

        ``tally`` counts forwards that could not be shared.
        """
        denoiser = None if self._denoiser is None else self._denoiser.share(loaded, tally)
        techniques = () if denoiser is None else denoiser.techniques
        for other in self._others:
            techniques += other.share(loaded)
        return denoiser, techniques


class SharingPlan:
    """How a team will share a denoiser, known from configs alone, before any weights are read."""

    def __init__(self, team: Team, components: Mapping[str, Any], used: Iterable[str], *, guided: bool) -> None:
        """``components`` are stand-ins of the model, of which the denoiser has ``used``.

        Raises `ConfigError` for a model that cannot be shared so.
        """
        self._team = team
        self._models = [name for name in used if _is_denoiser(components.get(name))]
        if not self._models:
            raise ConfigError(f"num-gpus={team.size}: this pipeline has no transformer that GPUs could share")
        self.degrees: Degrees = resolve(
            team.wish, team.size, _traits([components[name] for name in self._models], guided=guided)
        )

    def share(self, loaded: Mapping[str, Any], tally: Tally) -> SharedDenoiser:
        """Have the loaded models compute this rank's share. All ranks do this at the same time."""
        return SharedDenoiser(self._team, self.degrees, {name: loaded[name] for name in self._models}, tally)


class TextSharing:
    """How a team will spread the weights of text encoders, known before any are read."""

    def __init__(self, team: Team, present: Mapping[str, tuple[str, str]], components: Mapping[str, Any]) -> None:
        """``present`` are library and class of the model's components. Raises `ConfigError` if none can be spread."""
        self._team = team
        self._names = [name for name, (_, kind) in present.items() if kind in TEXT_PLANNED]
        if not self._names:
            raise ConfigError(
                f"encoder-tp={team.size}: there is no plan for the weights of this model's text encoders, only for "
                + ", ".join(TEXT_PLANNED)
            )
        for name in self._names:
            if (heads := components[name].config.num_heads) % team.size:
                raise ConfigError(f"encoder-tp={team.size}: must divide the {heads} attention heads of {name}")
            if (wide := components[name].config.d_ff) % team.size:
                raise ConfigError(f"encoder-tp={team.size}: must divide the {wide} features of {name}'s wide layers")

    @property
    def words(self) -> str:
        """What is shared."""
        return f"text encoders spread over {self._team.size}"

    def share(self, loaded: Mapping[str, Any]) -> tuple[str, ...]:
        """Keep this rank's part of the loaded encoders; what changes results by it, for the fingerprint.

        Raises `ConfigError` for one that adapters may change.
        """
        for name in self._names:
            if hasattr(loaded[name], "peft_config"):
                raise ConfigError(f"encoder-tp={self._team.size}: {name} has a LoRA adapter, whose layers stay whole")
        mesh = self._team.everyone()
        for name in self._names:
            shard_text(loaded[name], mesh)
        return (self.words,)


class PictureSharing:
    """Which VAE a team decodes with in strips, known before any weights are read."""

    def __init__(self, team: Team, present: Mapping[str, tuple[str, str]], components: Mapping[str, Any]) -> None:
        """``present`` are library and class of the model's components. Raises `ConfigError` if none can be."""
        self._team = team
        known = [n for n in present if hasattr(components.get(n), "config")]
        self._names = [name for name in known if supports_class(present[name][1], components[name].config)]
        if not self._names:
            kinds = {present[name][1] for name in known if present[name][1].startswith("Autoencoder")}
            raise ConfigError(
                f"decoder-tp={team.size}: strips are known for Wan 2.1's VAE and Qwen-Image's, not for "
                + (", ".join(sorted(kinds)) or "this model's")
            )

    @property
    def words(self) -> str:
        """What is shared."""
        return f"pictures decoded in {self._team.size} strips"

    def share(self, loaded: Mapping[str, Any]) -> tuple[str, ...]:
        """Have the loaded VAE decode this rank's strip; what changes results by it, for the fingerprint."""
        for name in self._names:
            if name in loaded:
                share_decoder(self._team, loaded[name])
        return (self.words,)


def _is_denoiser(component: Any) -> bool:
    """A model of Diffusers other than an autoencoder, or a stand-in of one."""
    return hasattr(component, "_cp_plan") and not hasattr(component, "decode")


def _traits(models: list[Any], *, guided: bool) -> Traits:
    heads = [getattr(model.config, "num_attention_heads", None) for model in models]
    wide = [getattr(model.config, "ffn_dim", None) or 0 for model in models]
    numbers = [n for n in heads if isinstance(n, int)]
    names = [str(model.config.get("_class_name")) for model in models]
    ways = [ways_of(name, model._cp_plan) for name, model in zip(names, models, strict=True)]
    return Traits(
        name=names[0],
        heads=math.gcd(*numbers) if len(numbers) == len(heads) else None,
        guided=guided,
        sequence_plan=all("ulysses" in own for own in ways),
        masked=any("ring" not in own for own in ways),
        wide=math.gcd(*wide),
        tensor_plan=all(name in PLANNED for name in names),
    )
