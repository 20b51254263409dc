"""The exceptions table: what a pipeline class needs beyond its own declarations, and the usual settings of its models.

This is the only place where a model family is named. A class that is absent here is served by the generic rules alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from triptych.wire.schema import Param


@dataclass(frozen=True, kw_only=True, slots=True)
class Preset:
    """Defaults and limits of requests. None leaves the value to the pipeline's declarations and the model's config."""

    height: int | None = None
    width: int | None = None
    num_frames: int | None = None
    fps: int | None = None
    num_inference_steps: int | None = None
    guidance_scale: float | None = None
    max_sequence_length: int | None = None
    max_side: int | None = None
    """Largest height or width in pixels."""
    max_pixels: int | None = None
    """Most pixels of one output, over all of its frames."""
    min_frames: int | None = None
    max_frames: int | None = None
    min_steps: int | None = None
    max_steps: int | None = None
    max_n: int | None = None
    """Most outputs of one request."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Pictures:
    """How a pipeline takes the pictures and clips of a request."""

    most: int = 1
    """Most pictures to start from; above 1 the pipeline gets a list."""
    whole: bool = False
    """They go in as they are: the pipeline resizes them itself, and makes its output in their shape if not told else
    (but see `follows`). Otherwise they are cut to the size that is asked for."""
    follows: bool = True
    """Of `whole` ones: the output has their shape, and not a size of its own."""
    needed: bool = False
    """Every request begins with one, though the blocks could do without."""
    optional: bool = False
    """A request may do without, and is then one of text alone."""
    least_side: int = 1
    """The pipeline refuses those with a side of fewer pixels."""
    most_aspect: float = float("inf")
    """The pipeline refuses those whose longer side is more than so many times the other."""
    mode: Literal["RGB", "RGBA"] = "RGB"
    pair_setting: str | None = None
    """The transformer's setting by which it says that it goes from a first to a last picture, and needs both."""
    as_given: Mapping[str, tuple[str, str]] = field(default_factory=dict[str, tuple[str, str]])
    """Blocks that would resize a picture, to their input and output. It has the right size, so it is passed on."""
    references: int = 0
    """Most pictures of what is to be seen, besides those to start from."""
    clips: Mapping[str, bool] = field(default_factory=dict[str, bool])
    """Inputs that are clips of as many frames as asked for, and whether the pipeline cannot do without."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ExactTimestep:
    """How a transformer is told the scheduler's timestep, of 1000."""

    argument: str = "timestep"
    done: bool = False
    """It is told the share that is done, not the timestep."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Family:
    """How one pipeline class differs from the generic rules."""

    preset: Preset = Preset()
    pictures: Pictures = Pictures()
    extras: tuple[Param, ...] = ()
    """Parameters of this class alone, under the names of its inputs."""
    guidance_offset: float = 0.0
    """Added to the client's guidance scale to get the guider's: 1 where the classic formula is ``c + s * (c - u)``."""
    guidance_least: float = 0.0
    """The least scale that a call takes as its argument, at which there is no guidance."""
    encoder_needs_guider: bool = False
    """The text block leaves its negative embeddings unset when its guider is off, so the guider stays on there."""
    text_length: int | None = None
    """The transformer finds the image's tokens behind exactly so many of the text, so no other length is legal."""
    conditions: bool = False
    """The encoder hands on what it makes of the picture in the latents' shape, in as many channels as the transformer
    takes beyond them."""
    streams: bool = False
    """The decoder's last word is what its VAE decodes, so frames can be handed on while later ones are decoded."""
    latent_patch: int = 2
    """Height and width of the latents must divide by this, where the transformer's own patches do not ask for more."""
    facts_only: frozenset[str] = frozenset()
    """Components that the denoise block declares and asks for their config alone, so it gets them without weights."""
    negative_prompt: str | None = None
    """What stands for a negative prompt that is not given, where the blocks would leave guidance out without one."""
    exchanged: Mapping[str, str] = field(default_factory=dict[str, str])
    """Top-level blocks in whose place stand others of Diffusers, as ``module:Class``."""
    system_message: str | None = None
    """What the language model is told before each prompt, where the blocks say other words than the model was made
    for."""
    draw_on_device: frozenset[str] = frozenset()
    """Classes of blocks that draw on the device with the request's generator, which is the CPU's: they are made to draw
    where the generator is."""
    exact_timestep: ExactTimestep | None = None
    """The loop rounds the timestep, to the weights' dtype (999 becomes 1000 in bfloat16) or to an integer, which the
    classic pipeline does not; the transformer is given the scheduler's own value. One with a timestep for each token
    is left as it is: no loop rounds those."""
    float_predictions: bool = False
    """The loop leaves predictions in the weights' dtype, and so the scheduler rounds the latents to it in each step;
    the classic pipeline makes float32 of predictions, and so does the request's guider."""


MANY_PICTURES = 8
"""Most pictures of one request, where a pipeline has no limit of its own."""

GENERIC = Family()
"""What applies to a class that the table does not name."""

BASE = Preset(fps=16, max_side=2048, max_frames=257, max_steps=200, max_n=4)
"""Used where neither the model folder nor the family's preset says anything."""

_WAN = Family(
    preset=Preset(
        height=480, width=832, num_frames=81, fps=16, num_inference_steps=50, guidance_scale=5.0, max_side=1280
    ),
    encoder_needs_guider=True,
    exact_timestep=ExactTimestep(),
    streams=True,
)
# The block that crops the last picture takes height for width, and needs torchvision.
_LAST_AS_GIVEN = {"last_image_resize": ("last_image", "resized_last_image")}
# Its blocks do not repeat the image's embeddings, so one output at a time is all that it can make.
_WAN_I2V = replace(
    _WAN,
    preset=replace(_WAN.preset, num_inference_steps=40, max_n=1),
    text_length=512,
    conditions=True,
    pictures=Pictures(pair_setting="pos_embed_seq_len", as_given=_LAST_AS_GIVEN),
)
_WAN22 = replace(_WAN, preset=replace(_WAN.preset, num_inference_steps=40, guidance_scale=4.0))
# Its blocks, and those of HunyuanVideo-1.5, prepare a part of what the loop needs for one output alone.
_HELIOS = Family(
    preset=Preset(fps=24, guidance_scale=5.0, max_frames=1452, max_n=1),
    pictures=Pictures(optional=True),
    draw_on_device=frozenset({"HeliosAddNoiseToImageLatentsStep", "HeliosAddNoiseToVideoLatentsStep"}),
    exact_timestep=ExactTimestep(),
)
# The audio autoencoder decodes with the decoder role; the denoiser asks how long and how wide its latents are.
_LTX2 = Family(
    preset=Preset(height=512, width=768, num_frames=121), latent_patch=1, facts_only=frozenset({"audio_vae", "vae"})
)
_QWEN = Family(
    preset=Preset(
        height=1328, width=1328, num_inference_steps=50, guidance_scale=4.0, max_side=2752, max_pixels=1536 * 2752
    )
)
_QWEN_EDIT = replace(_QWEN, preset=replace(_QWEN.preset, height=None, width=None), pictures=Pictures(whole=True))

_FLUX2_PICTURES = Pictures(whole=True, most=MANY_PICTURES, optional=True, least_side=64, most_aspect=8)

MODULAR_NAMES: dict[str, str] = {
    "FluxPipeline": "flux",
    "HunyuanVideo15Pipeline": "hunyuan-video-1.5",
    "LTX2Pipeline": "ltx2",
    "QwenImagePipeline": "qwenimage",
    "WanImageToVideoPipeline": "wan-i2v",
    "WanPipeline": "wan",
    "ZImagePipeline": "z-image",
}
"""Classic pipeline class to Diffusers' name of its modular counterpart, for the classes seen to work.

Diffusers' own table answers for others, at the price of importing every pipeline that it has.
"""

PICTURE_NAMES: dict[str, str] = {
    "LTX2ImageToVideoPipeline": "ltx2",
    "LTXImageToVideoPipeline": "ltx",
}
"""The same for classes whose blocks also do without a picture, while they themselves begin with one."""

UNLISTED: dict[str, dict[str, str]] = {
    "text-to-video": {"ltx2": "LTX2Pipeline"},
    "image-to-video": {"ltx2": "LTX2ImageToVideoPipeline"},
}
"""Task to family to class, of families that Diffusers' own lists of automatic pipelines leave out."""

FAMILIES: dict[str, Family] = {
    "WanModularPipeline": _WAN,
    "WanImage2VideoModularPipeline": _WAN_I2V,
    "Wan22ModularPipeline": _WAN22,
    "Wan22Image2VideoModularPipeline": replace(
        _WAN22,
        preset=replace(_WAN22.preset, guidance_scale=3.5),
        conditions=True,
        # Its own has the first picture alone; this one, of Wan 2.1, goes to a last one too, as the classic pipeline.
        exchanged={"vae_encoder": "diffusers.modular_pipelines.wan.modular_blocks_wan_i2v:WanAutoVaeEncoderStep"},
        pictures=Pictures(needed=True, as_given=_LAST_AS_GIVEN),
    ),
    "WanVACEPipeline": Family(
        preset=_WAN.preset,
        pictures=Pictures(references=MANY_PICTURES, clips={"video": False, "mask": False}),
        extras=(
            Param(
                name="conditioning_scale",
                type="number",
                default=1.0,
                minimum=0.0,
                maximum=2.0,
                description="How strongly the clip and the reference pictures steer.",
            ),
        ),
    ),
    "WanVideoToVideoPipeline": Family(
        preset=_WAN.preset,
        pictures=Pictures(clips={"video": True}),
        extras=(
            Param(
                name="strength",
                type="number",
                default=0.8,
                minimum=0.0,
                maximum=1.0,
                description="How much of the clip is made anew; 1 is all.",
            ),
        ),
    ),
    "QwenImageModularPipeline": _QWEN,
    "QwenImageEditModularPipeline": _QWEN_EDIT,
    "QwenImageEditPlusModularPipeline": replace(
        _QWEN_EDIT,
        preset=replace(_QWEN_EDIT.preset, num_inference_steps=40),
        pictures=Pictures(whole=True, most=MANY_PICTURES),
    ),
    "QwenImageLayeredModularPipeline": replace(
        _QWEN_EDIT,
        pictures=Pictures(whole=True, mode="RGBA"),
        extras=(
            Param(
                name="layers",
                type="integer",
                default=4,
                minimum=1,
                maximum=8,
                description="Layers to take the picture apart into; each is an output.",
            ),
            Param(
                name="resolution",
                type="integer",
                default=640,
                minimum=640,
                maximum=1024,
                multiple_of=384,
                remainder=256,
                description="Side of the square of as many pixels as the output; 640 or 1024.",
            ),
            Param(
                name="use_en_prompt",
                type="boolean",
                default=False,
                description="Describe the picture in English where the prompt is blank.",
            ),
        ),
    ),
    "StableDiffusion3ModularPipeline": Family(
        preset=Preset(height=1024, width=1024, num_inference_steps=28, guidance_scale=7.0), negative_prompt=""
    ),
    # As published and in the classic pipeline, with its line break; the blocks have a space there.
    "Flux2ModularPipeline": Family(
        pictures=_FLUX2_PICTURES,
        system_message="You are an AI that reasons about image descriptions. You give structured responses focusing on "
        "object relationships, object\nattribution and actions without speculation.",
    ),
    "Flux2KleinModularPipeline": Family(preset=Preset(num_inference_steps=4), pictures=_FLUX2_PICTURES),
    "Flux2KleinBaseModularPipeline": Family(preset=Preset(guidance_scale=4.0), pictures=_FLUX2_PICTURES),
    # Of a picture it makes about a megapixel, and looks at that.
    "FluxKontextModularPipeline": Family(pictures=Pictures(whole=True, follows=False, optional=True)),
    "LTXModularPipeline": Family(
        preset=Preset(guidance_scale=3.0),
        latent_patch=1,
        encoder_needs_guider=True,
        exact_timestep=ExactTimestep(),
        float_predictions=True,
    ),
    "LTX2ModularPipeline": _LTX2,
    "LTX25ModularPipeline": _LTX2,
    "HeliosModularPipeline": _HELIOS,
    "HeliosPyramidModularPipeline": _HELIOS,
    "HeliosPyramidDistilledModularPipeline": replace(
        _HELIOS, preset=replace(_HELIOS.preset, guidance_scale=1.0, num_inference_steps=6)
    ),
    "HunyuanVideo15ModularPipeline": Family(
        preset=Preset(height=480, width=832, num_frames=121, fps=24, guidance_scale=6.0, max_n=1),
        latent_patch=1,
        encoder_needs_guider=True,
    ),
    "ZImageModularPipeline": Family(
        preset=Preset(height=1024, width=1024, guidance_scale=0.0),
        guidance_offset=1.0,
        exact_timestep=ExactTimestep(argument="t", done=True),
    ),
    # Half of its schedule is linear, and divided by how many steps that is.
    "MochiPipeline": Family(preset=Preset(min_steps=2)),
    # Its guidance grows from none at the first frame: with no other one it is off, once the picture was readied for it.
    "StableVideoDiffusionPipeline": Family(preset=Preset(min_frames=2)),
    # Guidance is off at 1 alone; below it the prompt steers away from itself.
    "Cosmos3OmniModularPipeline": Family(guidance_least=1.0),
    "LDMTextToImagePipeline": Family(guidance_least=1.0),
}


def family_of(modular_class: str) -> Family:
    """The entry of a modular pipeline class, or the generic one."""
    return FAMILIES.get(modular_class, GENERIC)
