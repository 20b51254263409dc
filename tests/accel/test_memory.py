"""What is asked for to save memory takes effect: hooks are attached, models move, VAEs work piece by piece."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from diffusers import AutoencoderKLWan, AutoencoderTiny, WanTransformer3DModel
from diffusers.hooks.group_offloading import GroupOffloadingHook
from torch.overrides import TorchFunctionMode
from transformers import T5Config, T5EncoderModel

from triptych.accel import memory, quant
from triptych.errors import ConfigError

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def no_gradients() -> None:
    torch.set_grad_enabled(False)


def transformer() -> WanTransformer3DModel:
    torch.manual_seed(0)
    return WanTransformer3DModel(
        num_attention_heads=2, attention_head_dim=24, ffn_dim=64, num_layers=3, text_dim=32, freq_dim=32
    ).eval()


def text_encoder() -> T5EncoderModel:
    torch.manual_seed(0)
    return T5EncoderModel(T5Config(vocab_size=40, d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2)).eval()


def vae() -> AutoencoderKLWan:
    torch.manual_seed(0)
    return AutoencoderKLWan(
        base_dim=4, z_dim=4, dim_mult=[1, 1, 1, 1], num_res_blocks=1, temperal_downsample=[False, True, True]
    ).eval()


def denoise(model: Any) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    latents, text = torch.randn(1, 16, 2, 8, 8, generator=generator), torch.randn(1, 7, 32, generator=generator)
    return model(latents, torch.tensor([500.0]), text, return_dict=False)[0]


def group_hooks(model: torch.nn.Module) -> list[str]:
    """Names of the modules that bring and send away a group of weights."""
    return [
        name
        for name, module in model.named_modules()
        if any(isinstance(hook, GroupOffloadingHook) for hook in _hooks(module))
    ]


def _hooks(module: Any) -> list[Any]:
    registry = getattr(module, "_diffusers_hook", None)
    return [] if registry is None else list(registry.hooks.values())


def test_block_brings_the_blocks_of_a_denoiser_one_by_one() -> None:
    model = transformer()
    before = denoise(model)
    memory.offload({"transformer": model}, {"transformer": "block"}, CPU)
    assert {"blocks.0", "blocks.1", "blocks.2"} <= set(group_hooks(model))
    assert "blocks.0.ffn.net.2" not in group_hooks(model)
    assert torch.equal(denoise(model), before)


def test_layer_brings_single_layers() -> None:
    model = transformer()
    before = denoise(model)
    memory.offload({"transformer": model}, {"transformer": "layer"}, CPU)
    assert {"blocks.0.ffn.net.2", "proj_out"} <= set(group_hooks(model))
    assert torch.equal(denoise(model), before)


def test_a_text_encoder_goes_layer_by_layer_in_both() -> None:
    """Diffusers sees no blocks in it, and would bring all of it at once."""
    model = text_encoder()
    tokens = torch.tensor([[3, 5, 7]])
    before = model(tokens)[0]
    memory.offload({"text_encoder": model}, {"text_encoder": "block"}, CPU)
    assert "encoder.block.1.layer.0.SelfAttention.q" in group_hooks(model)
    assert torch.equal(model(tokens)[0], before)


class Travelling(torch.nn.Linear):
    """A model that notes where it was sent."""

    def __init__(self, log: list[tuple[int, str]]) -> None:
        super().__init__(2, 2)
        self.log = log

    def to(self, *args: Any, **kwargs: Any) -> Any:
        self.log.append((id(self), str(args[0])))
        return super().to(*args, **kwargs)


def test_whole_models_take_turns_on_the_device() -> None:
    log: list[tuple[int, str]] = []
    first, second, still = Travelling(log), Travelling(log), Travelling(log)
    models = {"first": first, "second": second, "still": still}
    memory.offload(models, {"first": "model", "second": "model"}, torch.device("cpu:0"))
    first(torch.ones(1, 2))
    second(torch.ones(1, 2))
    assert log == [(id(second), "cpu"), (id(first), "cpu:0"), (id(first), "cpu"), (id(second), "cpu:0")]


class Elsewhere(TorchFunctionMode):
    """Takes cpu:0 for a device with memory of its own, and counts what is copied from there to the host."""

    def __init__(self) -> None:
        super().__init__()
        self.back = 0
        self._there: list[torch.Tensor] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not torch.Tensor.to:
            return func(*args, **(kwargs or {}))
        tensor, device = args[:2]
        there = any(other.data_ptr() == tensor.data_ptr() for other in self._there)
        if there == (torch.device(device) == torch.device("cpu:0")):
            return tensor
        copy = tensor.clone()
        if there:
            self.back += 1
        else:
            self._there.append(copy)
        return copy


def test_weights_that_nobody_changed_are_not_copied_back_to_the_host() -> None:
    first, second = (torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2)).eval() for _ in range(2))
    host = [tensor.data_ptr() for tensor in first.state_dict().values()]
    memory.offload(
        {"first": first, "second": second}, dict.fromkeys(("first", "second"), "model"), torch.device("cpu:0")
    )
    with Elsewhere() as elsewhere:
        before = first(torch.ones(1, 2))
        assert not set(host) & {tensor.data_ptr() for tensor in first.state_dict().values()}
        second(torch.ones(1, 2))
        assert [tensor.data_ptr() for tensor in first.state_dict().values()] == host
        assert elsewhere.back == 0
        assert torch.equal(first(torch.ones(1, 2)), before)
        first[1].running_mean.add_(3.0)  # what was changed on the device is not lost
        second(torch.ones(1, 2))
        assert elsewhere.back == 1
        assert first[1].running_mean.tolist() == [3.0, 3.0]
        assert not torch.equal(first(torch.ones(1, 2)), before)


@pytest.mark.parametrize("kind", ["model", "block", "layer"])
def test_a_vae_is_brought_when_it_decodes(kind: Any) -> None:
    """It is called past its forward, for which group hooks would wait in vain."""
    model = vae()
    latents = torch.randn(1, 4, 1, 4, 4, generator=torch.Generator().manual_seed(0))
    before = model.decode(latents).sample
    memory.offload({"vae": model}, {"vae": kind}, CPU)
    hook: Any = model._hf_hook
    came: list[bool] = []
    arrive = hook.pre_forward
    hook.pre_forward = lambda *args, **kwargs: (came.append(True), arrive(*args, **kwargs))[1]
    assert torch.equal(model.decode(latents).sample, before)
    assert came == [True]


def test_tiling_decodes_in_tiles_and_slicing_item_by_item() -> None:
    model: Any = vae()
    latents = torch.randn(2, 4, 1, 40, 40, generator=torch.Generator().manual_seed(0))
    shapes: list[tuple[int, ...]] = []
    model.decoder.register_forward_pre_hook(lambda _, args: shapes.append(tuple(args[0].shape)))
    model.decode(latents)
    assert shapes == [(2, 4, 1, 40, 40)]
    shapes.clear()
    done = memory.divide({"vae": model, "other": torch.nn.Linear(2, 2)}, tiling=True, slicing=True)
    assert [t.name for t in done] == ["vae: tiling", "vae: slicing"]
    model.decode(latents)
    assert {shape[0] for shape in shapes} == {1}
    assert max(shape[-1] for shape in shapes) == 32


def test_a_vae_that_cannot_is_refused() -> None:
    class Plain(torch.nn.Module):
        def decode(self, latents: torch.Tensor) -> torch.Tensor:
            return latents

    with pytest.raises(ConfigError, match="vae-tiling: Plain cannot do it"):
        memory.divide({"vae": Plain()}, tiling=True, slicing=False)
    memory.divide({"vae": AutoencoderTiny()}, tiling=True, slicing=True)


def test_the_blocks_of_text_encoders_can_be_quantised_too() -> None:
    assert [type(block).__name__ for block in quant.blocks(text_encoder())] == ["T5Block", "T5Block"]
    assert len(quant.blocks(transformer())) == 3
    assert quant.blocks(vae()) == []
