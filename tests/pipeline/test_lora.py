"""LoRA adapters: the bytes of the classic pipeline with the same adapters, whatever other requests do in between."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from triptych.config import Lora, ModelConfig
from triptych.errors import BadRequest, ConfigError, ModelError
from triptych.ids import ROLES, Role
from triptych.pipeline.load import load_pipeline
from triptych.pipeline.lora import Adapters, fold_alphas, inner_name

from .classic_harness import REQUESTS, TOLERATED
from .harness import Inbox, Trio, frames_of, post
from .wan_checkpoints import wan22_distilled

pytestmark = TOLERATED

REQUEST: dict[str, Any] = {
    "prompt": "a cat", "height": 32, "width": 32, "num_frames": 5, "num_inference_steps": 3, "max_sequence_length": 32,
    "seed": 4,
}  # fmt: skip
LAYERS = {"blocks.0.attn1.to_q": (48, 48), "blocks.1.ffn.net.2": (48, 64), "blocks.1.attn2.to_v": (48, 48)}
SECOND_LAYERS = {"blocks.0.attn1.to_v": (48, 48), "blocks.1.ffn.net.2": (48, 48)}
"""Of the second transformer, which is narrower."""
RANK = 4

Checkpoint = Callable[[str], Path]


@pytest.fixture(autouse=True)
def no_gradients() -> None:
    torch.set_grad_enabled(False)


def tensors(seed: int, layers: dict[str, tuple[int, int]] = LAYERS, prefix: str = "transformer.") -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    made: dict[str, Any] = {}
    for layer, (wide, narrow) in layers.items():
        made[f"{prefix}{layer}.lora_A.weight"] = torch.randn(RANK, narrow, generator=generator)
        made[f"{prefix}{layer}.lora_B.weight"] = torch.randn(wide, RANK, generator=generator)
    return made


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("loras")
    found: dict[str, str] = {}
    for name, seed in (("fox", 1), ("snow", 2)):
        found[name] = str(folder / f"{name}.safetensors")
        save_file(tensors(seed), found[name])
    return found


@pytest.fixture(scope="module")
def trio(checkpoint: Checkpoint, files: dict[str, str]) -> Trio:
    loras = (Lora(name="fox", path=files["fox"]), Lora(name="snow", path=files["snow"], scale=0.5))
    config = ModelConfig(path=str(checkpoint("wan_t2v")), device="cpu", loras=loras)
    return Trio.of({role: load_pipeline(config, (role,), "cpu") for role in ROLES})  # type: ignore[misc]


@pytest.fixture(scope="module")
def whole(checkpoint: Checkpoint, files: dict[str, str]) -> Any:
    from diffusers import DiffusionPipeline

    pipeline: Any = DiffusionPipeline.from_pretrained(str(checkpoint("wan_t2v")))
    pipeline.set_progress_bar_config(disable=True)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Already found a `peft_config`")
        for name, file in files.items():
            pipeline.load_lora_weights(file, adapter_name=name)
    return pipeline


def expected(whole: Any, names: list[str], scales: list[float]) -> np.ndarray[Any, Any]:
    if names:
        whole.enable_lora()
        whole.set_adapters(names, scales)
    else:
        whole.disable_lora()
    generator = torch.Generator("cpu").manual_seed(REQUEST["seed"])
    request = {name: value for name, value in REQUEST.items() if name != "seed"}
    return frames_of(whole(**request, generator=generator, output_type="pil").frames[0])


CASES = [
    (None, [], []),
    ("fox", ["fox"], [1.0]),
    ("snow", ["snow"], [0.5]),
    ("fox:0.25,snow:-1.5", ["fox", "snow"], [0.25, -1.5]),
]


def test_each_choice_gives_the_bytes_of_the_classic_pipeline_with_it(trio: Trio, whole: Any) -> None:
    seen: list[np.ndarray[Any, Any]] = []
    for text, names, scales in CASES:
        (clip,) = trio.generate({**REQUEST, "lora": text})
        assert np.array_equal(clip.frames, expected(whole, names, scales)), text
        assert not any(np.array_equal(clip.frames, other) for other in seen), f"{text} changed nothing"
        seen.append(clip.frames)


def test_interleaved_requests_keep_their_own_adapters(trio: Trio) -> None:
    alone = [trio.generate({**REQUEST, "lora": text})[0].frames for text, _, _ in CASES]
    together = interleaved(trio, [{**REQUEST, "lora": text} for text, _, _ in CASES])
    for (text, _, _), frames, lone in zip(CASES, together, alone, strict=True):
        assert np.array_equal(frames, lone), text


def test_adapters_are_set_only_when_they_change(trio: Trio, monkeypatch: pytest.MonkeyPatch) -> None:
    from peft.tuners.lora import LoraLayer

    changes: list[str] = []
    real = LoraLayer.set_scale
    monkeypatch.setattr(
        LoraLayer, "set_scale", lambda self, name, scale: (changes.append(name), real(self, name, scale))[1]
    )
    inbox: Inbox = trio.encoded({**REQUEST, "lora": "fox"})
    run = trio.start(Role.DENOISER, {**REQUEST, "lora": "fox:0.3"}, inbox)
    run.advance()
    first = len(changes)
    assert first == len(LAYERS)
    run.advance()
    assert len(changes) == first
    run.cancel()


@pytest.fixture
def denoiser(checkpoint: Checkpoint) -> Callable[[Lora], Any]:
    def load(lora: Lora) -> Any:
        config = ModelConfig(path=str(checkpoint("wan_t2v")), device="cpu", loras=(lora,))
        return load_pipeline(config, (Role.DENOISER,), "cpu")

    return load


def scales(pipeline: Any) -> Iterator[float]:
    """How much each layer of the adapter at work adds, as a multiple of its matrices' product."""
    pipeline.adapters.choose((("odd", 1.0),))
    for module in pipeline.component(Role.DENOISER, "transformer").modules():
        if hasattr(module, "scaling"):
            yield module.scaling[inner_name("odd")]


def test_an_alpha_in_the_header_counts(denoiser: Callable[[Lora], Any], tmp_path: Path) -> None:
    header = {"transformer.r": RANK, "transformer.lora_alpha": 2 * RANK, "transformer.target_modules": list(LAYERS)}
    file = tmp_path / "odd.safetensors"
    save_file(tensors(3), file, {"format": "pt", "lora_adapter_metadata": json.dumps(header)})
    assert list(scales(denoiser(Lora(name="odd", path=str(file))))) == [2.0] * len(LAYERS)


@pytest.mark.parametrize("prefix", ["transformer.", "diffusion_model."])
def test_an_alpha_beside_a_layer_counts(denoiser: Callable[[Lora], Any], tmp_path: Path, prefix: str) -> None:
    """Diffusers refuses the first layout when it has alphas."""
    layers = {"blocks.0.self_attn.q": (48, 48), "blocks.1.ffn.2": (48, 64)} if prefix != "transformer." else LAYERS
    plain = tensors(3, layers, prefix)
    file = tmp_path / "odd.safetensors"
    save_file(plain | {f"{prefix}{layer}.alpha": torch.tensor(2.0) for layer in layers}, file)
    pipeline = denoiser(Lora(name="odd", path=str(file)))
    assert list(scales(pipeline)) == [1.0] * len(layers)
    block = pipeline.component(Role.DENOISER, "transformer").blocks[0]
    first = next(iter(layers))
    added = block.attn1.to_q.lora_B[inner_name("odd")].weight @ block.attn1.to_q.lora_A[inner_name("odd")].weight
    wanted = plain[f"{prefix}{first}.lora_B.weight"] @ plain[f"{prefix}{first}.lora_A.weight"] * (2.0 / RANK)
    assert torch.allclose(added, wanted)


def test_folding_keeps_the_product() -> None:
    up, down = torch.ones(3, 2), torch.ones(2, 3)
    weights = {"x.lora_up.weight": up, "x.lora_down.weight": down}
    folded = fold_alphas({**weights, "x.alpha": torch.tensor(1.0), "y.alpha": torch.tensor(1.0)})
    assert torch.equal(folded.pop("x.lora_up.weight"), up / 2)
    assert folded == {"x.lora_down.weight": down, "y.alpha": torch.tensor(1.0)}


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Names of a layer's tensors in files that carry an alpha beside each layer."""

    family: str
    layer: str
    """As the model calls it."""
    name: str
    """As the file does, without what follows for each tensor."""
    asked: dict[str, Any] = field(default_factory=dict[str, Any])
    wide: int = 1
    """Layers of the model in one of the file's."""
    ends: tuple[str, str] = (".lora_down.weight", ".lora_up.weight")


LAYOUTS = {
    "qwen, bare": Layout(
        family="qwen_t2i", layer="transformer_blocks.0.attn.to_q", name="transformer_blocks.0.attn.to_q",
        asked={"negative_prompt": "bad", "guidance_scale": 4.0},
    ),
    "qwen, diffusion_model": Layout(
        family="qwen_t2i", layer="transformer_blocks.0.attn.to_q",
        name="diffusion_model.transformer_blocks.0.attn.to_q",
        asked={"negative_prompt": "bad", "guidance_scale": 4.0},
    ),
    "z_image, bare": Layout(
        family="z_image", layer="layers.0.attention.to_q", name="layers.0.attention.to_q", asked={"guidance_scale": 0.0}
    ),
    "z_image, diffusion_model": Layout(
        family="z_image", layer="layers.0.attention.to_q", name="diffusion_model.layers.0.attention.to_q",
        asked={"guidance_scale": 0.0},
    ),
    "wan, diffusion_model": Layout(
        family="wan_t2v", layer="blocks.0.attn1.to_q", name="diffusion_model.blocks.0.self_attn.q",
        asked={"num_frames": 5, "guidance_scale": 5.0},
    ),
    "flux, kohya": Layout(
        family="flux", layer="transformer_blocks.0.attn.to_q", name="lora_unet_double_blocks_0_img_attn_qkv", wide=3
    ),
    "flux, lora_transformer": Layout(
        family="flux", layer="transformer_blocks.0.attn.to_q", name="lora_transformer_transformer_blocks_0_attn_to_q"
    ),
    "flux, transformer": Layout(
        family="flux", layer="transformer_blocks.0.attn.to_q", name="transformer.transformer_blocks.0.attn.to_q",
        ends=(".lora_A.weight", ".lora_B.weight"),
    ),
    "sdxl, kohya": Layout(
        family="sdxl", layer="down_blocks.1.attentions.0.transformer_blocks.0.attn1.to_q",
        name="lora_unet_down_blocks_1_attentions_0_transformer_blocks_0_attn1_to_q", asked={"guidance_scale": 5.0},
    ),
}  # fmt: skip
"""As published files have them."""


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_files_with_an_alpha_beside_each_layer_work_as_in_the_classic_pipeline(
    checkpoint: Checkpoint, classic_checkpoint: Checkpoint, tmp_path: Path, layout: Layout
) -> None:
    """Alpha over rank is no power of two, so that the scale is the same to the last bit only where it is applied in
    the same place."""
    from diffusers import DiffusionPipeline

    folder = (classic_checkpoint if layout.family in REQUESTS else checkpoint)(layout.family)
    classic: Any = DiffusionPipeline.from_pretrained(str(folder))
    classic.set_progress_bar_config(disable=True)
    model = classic.unet if hasattr(classic, "unet") else classic.transformer
    linear = model.get_submodule(layout.layer)
    random = torch.Generator().manual_seed(5)
    file = tmp_path / "fox.safetensors"
    save_file(
        {
            layout.name + layout.ends[0]: torch.randn(RANK, linear.in_features, generator=random),
            layout.name + layout.ends[1]: torch.randn(layout.wide * linear.out_features, RANK, generator=random),
            layout.name + ".alpha": torch.tensor(7.0),
        },
        file,
    )
    classic.load_lora_weights(str(file), adapter_name="fox")
    request = {"prompt": "a cat", "height": 32, "width": 32, "num_inference_steps": 2, **layout.asked}
    arguments = dict(request)
    if layout.family == "qwen_t2i":
        arguments["true_cfg_scale"] = arguments.pop("guidance_scale")
    made = classic(**arguments, generator=torch.Generator("cpu").manual_seed(4), output_type="pil")
    wanted = frames_of(made.frames[0] if hasattr(made, "frames") else made.images[:1])
    config = ModelConfig(path=str(folder), device="cpu", loras=(Lora(name="fox", path=str(file)),))
    trio = Trio.of({role: load_pipeline(config, (role,), "cpu") for role in ROLES})  # type: ignore[misc]
    assert np.array_equal(trio.generate({**request, "seed": 4, "lora": "fox"})[0].frames, wanted)
    assert not np.array_equal(trio.generate({**request, "seed": 4})[0].frames, wanted)


def test_an_unknown_name_is_the_callers_mistake_and_the_list_is_told(trio: Trio) -> None:
    for role in ROLES:
        param = trio.pipelines[role].schema.param("lora")
        assert param is not None
        assert param.choices == ("fox", "snow")
        assert param.option is not None
        assert param.option.roles == (Role.DENOISER,), "instances of the others may be launched without"
    with pytest.raises(BadRequest, match="'bear' is none of the adapters served here: fox, snow"):
        trio.encoded({**REQUEST, "lora": "bear"})


def test_a_model_without_adapters_takes_none(checkpoint: Checkpoint) -> None:
    config = ModelConfig(path=str(checkpoint("wan_t2v")), device="cpu")
    assert load_pipeline(config, (Role.DECODER,), "cpu").schema.param("lora") is None


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (b"not safetensors", "lora odd: .* cannot be loaded"),
        ({"transformer.nowhere.lora_A.weight": torch.ones(4, 4), "transformer.nowhere.lora_B.weight": torch.ones(4, 4)},
         "lora odd"),
        (None, "lora odd: .* cannot be loaded"),
    ],
)  # fmt: skip
def test_a_file_that_does_not_fit_is_named(
    denoiser: Callable[[Lora], Any], tmp_path: Path, content: Any, complaint: str
) -> None:
    file = tmp_path / "odd.safetensors"
    if isinstance(content, bytes):
        file.write_bytes(content)
    elif content is not None:
        save_file(content, file)
    with pytest.raises(ModelError, match=complaint):
        denoiser(Lora(name="odd", path=str(file)))


def test_the_fingerprint_knows_the_files(
    denoiser: Callable[[Lora], Any], files: dict[str, str], tmp_path: Path
) -> None:
    one = denoiser(Lora(name="odd", path=files["fox"])).fingerprint
    other = tmp_path / "other.safetensors"
    save_file(load_file(files["snow"]), other)
    assert denoiser(Lora(name="odd", path=str(other))).fingerprint != one


def test_replayed_pipelines_switch_adapters_too(classic_checkpoint: Checkpoint, tmp_path: Path) -> None:
    from diffusers import DiffusionPipeline

    folder = classic_checkpoint("cogvideox_t2v")
    probe: Any = DiffusionPipeline.from_pretrained(str(folder))
    linear = probe.transformer.get_submodule("transformer_blocks.0.attn1.to_q")
    layers = {"transformer_blocks.0.attn1.to_q": (linear.out_features, linear.in_features)}
    file = tmp_path / "fox.safetensors"
    save_file(tensors(5, layers), file)
    probe.load_lora_weights(str(file), adapter_name="fox")
    probe.set_adapters(["fox"], [0.5])
    probe.set_progress_bar_config(disable=True)
    request = dict(REQUESTS["cogvideox_t2v"])
    generator = torch.Generator("cpu").manual_seed(4)
    wanted = frames_of(probe(**request, generator=generator, output_type="pil").frames[0])
    config = ModelConfig(path=str(folder), device="cpu", loras=(Lora(name="fox", path=str(file), scale=0.5),))
    pipeline: Any = load_pipeline(config, ROLES, "cpu")
    trio = Trio.of(dict.fromkeys(ROLES, pipeline))
    plain = trio.generate({**request, "seed": 4})[0].frames
    (clip,) = trio.generate({**request, "seed": 4, "lora": "fox"})
    assert np.array_equal(clip.frames, wanted)
    assert not np.array_equal(plain, wanted)
    assert np.array_equal(trio.generate({**request, "seed": 4})[0].frames, plain)
    made = interleaved(trio, [{**request, "seed": 4, "lora": text} for text in ("fox", None, "fox:-1")])
    assert np.array_equal(made[0], wanted)
    assert np.array_equal(made[1], plain)
    assert not np.array_equal(made[2], wanted)


def interleaved(trio: Trio, requests: list[dict[str, Any]]) -> list[np.ndarray[Any, Any]]:
    """Frames of requests whose denoisers take turns, a step each."""
    inboxes = [trio.encoded(request) for request in requests]
    waiting = [
        (trio.start(Role.DENOISER, request, inbox), inbox) for request, inbox in zip(requests, inboxes, strict=True)
    ]
    while waiting:
        for turn in list(waiting):
            if (result := turn[0].advance()) is not None:
                post(result, turn[1])
                waiting.remove(turn)
    return [
        trio.stage(Role.DECODER, request, inbox).clips[0].frames
        for request, inbox in zip(requests, inboxes, strict=True)
    ]


def layer_of(model: Any, ending: str) -> dict[str, tuple[int, int]]:
    """The first linear layer whose name ends so, with its sides."""
    name, linear = next((name, module) for name, module in model.named_modules() if name.endswith(ending))
    return {name: (linear.out_features, linear.in_features)}


def test_an_adapter_may_be_at_work_in_a_text_encoder_too(classic_checkpoint: Checkpoint, tmp_path: Path) -> None:
    """Its two parts go to roles that are apart."""
    from diffusers import DiffusionPipeline

    folder = classic_checkpoint("stable_diffusion")
    probe: Any = DiffusionPipeline.from_pretrained(str(folder))
    probe.set_progress_bar_config(disable=True)
    denoiser = tensors(5, layer_of(probe.unet, "attn1.to_q"), "unet.")
    text = tensors(6, layer_of(probe.text_encoder, "q_proj"), "text_encoder.")
    loras = [Lora(name=name, path=str(tmp_path / f"{name}.safetensors")) for name in ("both", "weaker")]
    save_file(denoiser | text, loras[0].path)
    save_file(denoiser, loras[1].path)
    probe.load_lora_weights(loras[0].path, adapter_name="both")
    request = dict(REQUESTS["stable_diffusion"])
    generator = torch.Generator("cpu").manual_seed(4)
    wanted = frames_of(probe(**request, generator=generator, output_type="pil").images[:1])
    config = ModelConfig(path=str(folder), device="cpu", loras=tuple(loras))
    trio = Trio.of({role: load_pipeline(config, (role,), "cpu") for role in ROLES})  # type: ignore[misc]
    both, weaker, plain = (
        trio.generate({**request, "seed": 4, "lora": text})[0].frames for text in ("both", "weaker", None)
    )
    param = trio.pipelines[Role.DECODER].schema.param("lora")
    assert param is not None
    assert param.option is not None
    assert param.option.roles == (Role.ENCODER, Role.DENOISER), "which both must be launched with them"
    assert np.array_equal(both, wanted)
    assert not np.array_equal(both, weaker)
    assert not np.array_equal(weaker, plain)


@pytest.fixture(scope="module")
def wan22(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A model of two transformers in a folder, and whole with an adapter of a file for each."""
    from diffusers import DiffusionPipeline

    folder = tmp_path_factory.mktemp("wan22")
    wan22_distilled(folder / "model")
    save_file(tensors(6), folder / "high.safetensors")
    save_file(tensors(7, SECOND_LAYERS), folder / "low.safetensors")
    pipeline: Any = DiffusionPipeline.from_pretrained(str(folder / "model"))
    pipeline.set_progress_bar_config(disable=True)
    pipeline.load_lora_weights(str(folder / "high.safetensors"), adapter_name="fox")
    pipeline.load_lora_weights(str(folder / "low.safetensors"), adapter_name="fox", load_into_transformer_2=True)
    return folder, pipeline


@pytest.mark.parametrize("layout", ["a file each", "one file", "the second alone"])
def test_both_transformers_of_a_model_take_an_adapter(wan22: tuple[Path, Any], tmp_path: Path, layout: str) -> None:
    folder, whole = wan22
    first, second = tensors(6), tensors(7, SECOND_LAYERS, "transformer_2.")
    match layout:
        case "a file each":
            lora = Lora(name="fox", path=f"{folder}/high.safetensors", second=f"{folder}/low.safetensors", scale=0.5)
        case "one file":
            save_file(first | second, tmp_path / "both.safetensors")
            lora = Lora(name="fox", path=f"{tmp_path}/both.safetensors", scale=0.5)
        case _:
            save_file(second, tmp_path / "second.safetensors")
            lora = Lora(name="fox", path=f"{tmp_path}/second.safetensors", scale=0.5)
    whole.enable_lora()
    whole.transformer.set_adapters(["fox"], [0.0 if layout == "the second alone" else 0.5])
    whole.transformer_2.set_adapters(["fox"], [0.5])
    generator = torch.Generator("cpu").manual_seed(REQUEST["seed"])
    request = {name: value for name, value in REQUEST.items() if name != "seed"}
    wanted = frames_of(whole(**request, guidance_scale=4.0, generator=generator, output_type="pil").frames[0])
    config = ModelConfig(path=str(folder / "model"), device="cpu", loras=(lora,))
    trio = Trio.of(dict.fromkeys(ROLES, load_pipeline(config, ROLES, "cpu")))  # type: ignore[arg-type]
    (clip,) = trio.generate({**REQUEST, "lora": "fox"})
    assert np.array_equal(clip.frames, wanted)
    assert not np.array_equal(trio.generate(REQUEST)[0].frames, wanted)


def test_a_header_speaks_of_each_transformer_by_its_name(wan22: tuple[Path, Any], tmp_path: Path) -> None:
    header = {
        f"{name}.{key}": value
        for name, alpha, layers in (("transformer", 2 * RANK, LAYERS), ("transformer_2", 3 * RANK, SECOND_LAYERS))
        for key, value in {"r": RANK, "lora_alpha": alpha, "target_modules": list(layers)}.items()
    }
    file = tmp_path / "both.safetensors"
    both = tensors(6) | tensors(7, SECOND_LAYERS, "transformer_2.")
    save_file(both, file, {"format": "pt", "lora_adapter_metadata": json.dumps(header)})
    config = ModelConfig(path=str(wan22[0] / "model"), device="cpu", loras=(Lora(name="odd", path=str(file)),))
    pipeline: Any = load_pipeline(config, (Role.DENOISER,), "cpu")
    pipeline.adapters.choose((("odd", 1.0),))
    for name, scale in (("transformer", 2.0), ("transformer_2", 3.0)):
        modules = pipeline.component(Role.DENOISER, name).modules()
        assert {module.scaling[inner_name("odd")] for module in modules if hasattr(module, "scaling")} == {scale}


def test_a_second_transformers_part_needs_one_and_comes_once(
    denoiser: Callable[[Lora], Any], wan22: tuple[Path, Any], tmp_path: Path
) -> None:
    file, low = tmp_path / "both.safetensors", f"{wan22[0]}/low.safetensors"
    save_file(tensors(6) | tensors(7, SECOND_LAYERS, "transformer_2."), file)
    with pytest.raises(ModelError, match="for transformer_2, which this model has not"):
        denoiser(Lora(name="fox", path=str(file)))
    with pytest.raises(ModelError, match="for which there is a second one"):
        denoiser(Lora(name="fox", path=str(file), second=low))
    with pytest.raises(ModelError, match="for transformer_2, which this model has not"):
        denoiser(Lora(name="fox", path=f"{wan22[0]}/high.safetensors", second=low))


def test_options_that_would_mix_adapters_up_are_refused() -> None:
    lora = Lora(name="fox", path="fox.safetensors")
    for settings, complaint in (
        ({"batching": True}, "lora and batching"),
        ({"loras": (lora, lora)}, "lora fox: given twice"),
    ):
        with pytest.raises(ConfigError, match=complaint):
            ModelConfig(**{"path": "tiny", "loras": (lora,), **settings})  # type: ignore[arg-type]
    assert Adapters((lora,), ()).names == ("fox",)


@pytest.mark.parametrize("name", ["half", "keys", "training", "lora", "A-1"])
def test_an_adapter_may_be_called_what_a_module_has_an_attribute_of(
    trio: Trio, denoiser: Callable[[Lora], Any], files: dict[str, str], name: str
) -> None:
    made: list[Any] = []
    for pipeline, called in (
        (trio.pipelines[Role.DENOISER], "fox"),
        (denoiser(Lora(name=name, path=files["fox"])), name),
    ):
        request = {**REQUEST, "lora": called}
        inbox: Inbox = trio.encoded({**REQUEST, "lora": "fox"})
        run = pipeline.start(Role.DENOISER, request, inbox[Role.DENOISER], ())
        while (result := run.advance()) is None:
            pass
        made.append(result.outputs[0].tensors)
    assert all(torch.equal(mine, other) for mine, other in zip(*made, strict=True))


@pytest.mark.parametrize("said", [{"name": "a.b"}, {"path": "fox.bin"}, {"scale": 11.0}, {"name": ""}])
def test_an_adapter_must_have_a_plain_name_a_safe_file_and_a_sane_scale(said: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="lora"):
        Lora(**{"name": "fox", "path": "fox.safetensors", **said})
