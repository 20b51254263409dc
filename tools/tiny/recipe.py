"""Every size, share and time of a training run, in three presets."""

from dataclasses import dataclass
from typing import NamedTuple


class Clip(NamedTuple):
    """Frames and pixels of a clip. Frames are 1 + a multiple of 4, sides a multiple of 16."""

    frames: int
    height: int
    width: int

    @property
    def pixels(self) -> int:
        return self.frames * self.height * self.width


class Bucket(NamedTuple):
    """A clip shape, its share of the training steps, and how many encoded clips of it are kept."""

    clip: Clip
    share: float
    kept: int


MAIN_CLIP = Clip(17, 128, 128)
WINDOW = Clip(9, 64, 64)


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """One run. Times are in seconds; a stage ends when its time is over, and its learning rate follows that time."""

    total_seconds: float
    """The whole run, start to end. What the other stages leave is the transformer's."""
    vae_seconds: float
    fill_seconds: float
    text_seconds: float
    judge_seconds: float
    """Kept free at the end for saving and judging."""

    buckets: tuple[Bucket, ...]
    judged_clip: Clip = MAIN_CLIP
    captions_each: int = 6
    """Captions written per combination of attributes, for clips and again for images."""

    vae_base: tuple[int, int] = (16, 32)
    """Channels of encoder and decoder. Below about 27 channels at full resolution PyTorch's CPU convolutions fall on a
    slow path, and the decoder is what a user waits for."""
    vae_scene: Clip = MAIN_CLIP
    vae_window: Clip = WINDOW
    """The first part of the VAE's training sees windows of this size cut out of the scene."""
    vae_window_share: float = 0.7
    vae_batch: tuple[int, int] = (64, 16)
    """Windows, whole scenes."""

    text_width: int = 192
    text_layers: int = 3
    heads: int = 4
    layers: int = 6
    ffn: int = 1024

    batch: int = 256
    encode_batch: int = 128
    """Clips of the main shape encoded at once; other shapes in proportion to their pixels."""
    refresh_every: int = 20
    """Steps between two batches of new clips."""
    caption_drop: float = 0.12
    probe_weight: float = 0.05
    ema: float = 0.999
    flow_shift: float = 3.0
    step_limit: int | None = None
    """Ends each stage early; for runs that only try the plumbing."""
    log_every: int = 200

    steps: int = 20
    guidances: tuple[float, ...] = (2.0, 3.0, 4.0)
    """Tried on prompts of their own; the best becomes the shipped default."""
    trial_prompts: int = 128
    judged_prompts: int = 256
    varied_prompts: int = 64
    """For each of the other settings that the report covers."""
    judge_batch: int = 64


FULL = Recipe(
    total_seconds=525,
    vae_seconds=75,
    fill_seconds=26,
    text_seconds=8,
    judge_seconds=75,
    buckets=(
        Bucket(MAIN_CLIP, 0.58, 32768),
        Bucket(Clip(1, 128, 128), 0.14, 16384),
        Bucket(Clip(9, 128, 128), 0.08, 6144),
        Bucket(Clip(33, 128, 128), 0.04, 2048),
        Bucket(Clip(17, 96, 96), 0.05, 6144),
        Bucket(Clip(17, 96, 160), 0.04, 3072),
        Bucket(Clip(17, 160, 96), 0.04, 3072),
        Bucket(Clip(17, 160, 160), 0.03, 2048),
    ),
)

REHEARSAL = Recipe(
    total_seconds=120,
    vae_seconds=20,
    fill_seconds=3,
    text_seconds=2,
    judge_seconds=8,
    buckets=FULL.buckets[:3],
    log_every=50,
    captions_each=2,
    guidances=(3.0,),
    trial_prompts=16,
    judged_prompts=32,
    varied_prompts=16,
    judge_batch=32,
)
"""The real sizes for two minutes: shows that compilation, graphs and speeds are as they should be."""

SMOKE = Recipe(
    total_seconds=600,
    vae_seconds=30,
    fill_seconds=2,
    text_seconds=5,
    judge_seconds=10,
    buckets=(Bucket(Clip(5, 64, 64), 0.7, 64), Bucket(Clip(1, 64, 64), 0.3, 64)),
    judged_clip=Clip(5, 64, 64),
    captions_each=1,
    vae_base=(8, 8),
    vae_scene=Clip(5, 64, 64),
    vae_window=Clip(5, 32, 32),
    vae_batch=(4, 2),
    text_width=64,
    text_layers=1,
    heads=2,
    layers=2,
    ffn=128,
    batch=8,
    encode_batch=4,
    step_limit=6,
    log_every=2,
    steps=2,
    guidances=(3.0,),
    trial_prompts=2,
    judged_prompts=4,
    varied_prompts=2,
    judge_batch=4,
)
"""Everything tiny: two CPU cores run all stages in about a minute."""

PRESETS = {"full": FULL, "rehearsal": REHEARSAL, "smoke": SMOKE}
