"""What is read off a classic pipeline's source, on classes that show each shape."""

from __future__ import annotations

from typing import Any

import pytest

from triptych.errors import ModelError
from triptych.pipeline.anatomy import anatomy_of


def diffusers_class(name: str) -> type[Any]:
    import diffusers

    return getattr(diffusers, name)


@pytest.mark.parametrize(
    ("name", "denoisers", "decode", "encodes", "takes_image", "output"),
    [
        ("CogVideoXPipeline", {"transformer"}, "decode_latents", False, False, "video"),
        ("CogVideoXImageToVideoPipeline", {"transformer"}, "decode_latents", True, True, "video"),
        ("StableVideoDiffusionPipeline", {"unet"}, "decode_latents", True, True, "video"),
        ("HunyuanVideoPipeline", {"transformer"}, "vae.decode", False, False, "video"),
        ("StableDiffusionXLPipeline", {"unet"}, "vae.decode", False, False, "image"),
        ("StableDiffusionXLImg2ImgPipeline", {"unet"}, "vae.decode", True, True, "image"),
        ("StableDiffusionControlNetPipeline", {"unet", "controlnet"}, "vae.decode", False, True, "image"),
        ("GlmImagePipeline", {"transformer"}, "vae.decode", True, False, "image"),
        ("Kandinsky3Pipeline", {"unet"}, "movq.decode", False, False, "image"),
        ("WanPipeline", {"transformer", "transformer_2"}, "vae.decode", False, False, "video"),
    ],
)
def test_the_shape_of_a_call(
    name: str, denoisers: set[str], decode: str, encodes: bool, takes_image: bool, output: str
) -> None:
    found = anatomy_of(diffusers_class(name))
    assert found.denoisers == denoisers
    assert (found.decode, found.encodes, found.takes_image, found.output) == (decode, encodes, takes_image, output)


def test_what_looks_at_the_pixels_belongs_to_the_decoder() -> None:
    assert anatomy_of(diffusers_class("StableDiffusionPipeline")).inspectors == {"safety_checker"}
    assert not anatomy_of(diffusers_class("MochiPipeline")).inspectors


def test_a_count_that_the_call_overrules_is_no_parameter() -> None:
    """CogVideoX takes num_videos_per_prompt and makes one video whatever it says."""
    assert "num_videos_per_prompt" not in anatomy_of(diffusers_class("CogVideoXPipeline")).parameters
    assert anatomy_of(diffusers_class("HunyuanVideoPipeline")).parameters["num_videos_per_prompt"] == 1


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("HunyuanVideoFramepackPipeline", "its step loop calls vae.decode, so denoiser and decoder are not apart"),
        ("WanAnimatePipeline", "its step loop calls vae.decode"),
        ("Cosmos2_5_TransferPipeline", "its step loop calls vae.encode"),
        ("KandinskyCombinedPipeline", "its __call__ has no loop of its own that steps a scheduler"),
        ("StableUnCLIPPipeline", "it has 2 step loops"),
        ("StableDiffusionXLPAGPipeline", "it changes its denoiser's attention processors during a request"),
        ("Cosmos2TextToImagePipeline", "its guardrail judges prompts and pixels"),
        ("DDPMPipeline", "it decodes no latents"),
        ("LTX2Pipeline", "it decodes in several ways: audio_vae.decode, vae.decode"),
        ("JoyImageEditPlusPipeline", "it calls vae.decode in a loop"),
        ("StableAudioPipeline", "it makes audios, neither images nor video"),
        ("StableDiffusionXLControlNetUnionPipeline", "it works on control_mode, which requests cannot carry"),
        ("QwenImageControlNetInpaintPipeline", "it works on control_mask, which requests cannot carry"),
        ("DiTPipeline", "it works on class_labels, which requests cannot carry"),
    ],
)
def test_what_cannot_be_split_says_why(name: str, reason: str) -> None:
    with pytest.raises(ModelError, match=f"{name} cannot be split: {reason}"):
        anatomy_of(diffusers_class(name))
