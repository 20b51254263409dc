"""Second stage: text encoder and transformer learn to denoise latents by flow matching."""

import logging
import random
from dataclasses import dataclass
from typing import Any

import torch
from diffusers import WanTransformer3DModel
from torch import Tensor, nn
from transformers import UMT5EncoderModel

from tools.tiny.clock import Stage
from tools.tiny.conditioning import Probe, WeightedTextAttention, encode_text, padding_weight
from tools.tiny.graphs import GraphedStep
from tools.tiny.latents import LatentPool
from tools.tiny.optim import Optimizers
from tools.tiny.recipe import Recipe
from tools.tiny.tokens import LENGTH, PAD

log = logging.getLogger(__name__)

_ADAM_RATE, _MUON_RATE, _TEXT_MUON_RATE, _DECAY = 1e-3, 0.02, 0.01, 0.01
_WARM_UP_ADAM_RATE = 2e-3
_PADDED_TO = (32, 64, 64, 128, 226, 512, 512)
_NOT_MUON = (
    "shared",
    "relative_attention_bias",
    "probe",
    "proj_out",
    "time_embedder",
    "time_proj",
    "scale_shift_table",
)


def _muon_rate(name: str, parameter: Tensor) -> float:
    if parameter.dim() != 2 or any(part in name for part in _NOT_MUON):
        return 0.0
    return _TEXT_MUON_RATE if name.startswith("text_encoder.") else _MUON_RATE


@dataclass(frozen=True)
class Batch:
    """Inputs of one step, all on the device."""

    noisy: Tensor
    timestep: Tensor
    tokens: Tensor
    told: Tensor
    padding: Tensor
    target: Tensor

    def tensors(self) -> list[Tensor]:
        return [self.noisy, self.timestep, self.tokens, self.told, self.padding, self.target]


def flow_batch(pool: LatentPool, bucket: int, shift: float, padded_to: int) -> Batch:
    """x = (1 - s) latents + s noise and the velocity noise - latents, where UniPC's flow sigmas put them: timestep
    floor(1000 s), and s spread as the sampler's shifted grid is, a quarter of it evenly."""
    drawn, generator = pool.draw(bucket), pool.generator
    count, device = len(drawn.latents), drawn.latents.device
    even = torch.rand(count, generator=generator, device=device)
    is_even = torch.rand(count, generator=generator, device=device) < 0.25
    sigma = torch.where(is_even, even, shift * even / (1 + (shift - 1) * even))
    noise = torch.randn(drawn.latents.shape, generator=generator, device=device)
    share = sigma.view(-1, 1, 1, 1, 1)
    return Batch(
        noisy=torch.lerp(drawn.latents, noise, share),
        timestep=(sigma * 1000).floor(),
        tokens=drawn.tokens,
        told=drawn.told,
        padding=padding_weight(drawn.tokens, padded_to),
        target=noise - drawn.latents,
    )


class Trainer:
    """Trains `text_encoder` and `transformer` in place; they end as the average of their last steps."""

    def __init__(
        self,
        text_encoder: UMT5EncoderModel,
        transformer: WanTransformer3DModel,
        recipe: Recipe,
        seed: int,
    ) -> None:
        self._text_encoder, self._transformer = text_encoder, transformer
        self._recipe = recipe
        self._rng = random.Random(seed)
        self._device = transformer.device
        self._cuda = self._device.type == "cuda"
        self._probe = Probe(recipe.text_width).to(self._device)
        self._attention = WeightedTextAttention()
        self._attention.attach(transformer)
        # The residual stream stays float32 under autocast, and so does everything that depends on the time alone.
        transformer.patch_embedding.register_forward_hook(lambda _module, _args, output: output.float())
        _keep_full_precision(transformer.condition_embedder.time_embedder, self._device)
        _keep_full_precision(transformer.condition_embedder.time_proj, self._device)
        self._shipped = [*transformer.parameters(), *text_encoder.parameters()]
        modules = {"transformer": transformer, "text_encoder": text_encoder, "probe": self._probe}
        self._named = [(f"{name}.{key}", p) for name, module in modules.items() for key, p in module.named_parameters()]
        for _, parameter in self._named:  # gradients stay in place: every graph adds into the same ones
            parameter.grad = torch.zeros_like(parameter)
        self._graphs = GraphedStep(self._step) if self._cuda else None

    def _autocast(self) -> torch.autocast:
        return torch.autocast(self._device.type, torch.bfloat16, enabled=self._cuda)

    def read_captions(self, pool: LatentPool) -> dict[str, Any]:
        """Text encoder and probe alone, before the transformer starts to listen."""
        named = [(name, p) for name, p in self._named if not name.startswith("transformer.")]
        optimizers = Optimizers(named, _muon_rate, _WARM_UP_ADAM_RATE)
        stage, accuracies = Stage(self._recipe.text_seconds, self._recipe.step_limit), []

        def step(tokens: Tensor, told: Tensor) -> tuple[Tensor, ...]:
            torch._foreach_zero_([p.grad for _, p in named])
            with self._autocast():
                states = encode_text(self._text_encoder, tokens)
            read = self._probe(states, tokens, told)
            read.loss.backward()
            return (read.accuracy,)

        graphed = GraphedStep(step) if self._cuda else None
        for progress in stage:
            drawn = pool.draw(pool.pick())
            batch = [drawn.tokens, drawn.told]
            (accuracy,) = graphed("text", batch) if graphed else step(*batch)
            optimizers.step(progress)
            accuracies.append(accuracy)
        accuracy = float(torch.stack(accuracies[-20:]).mean())
        return stage.summary(self._device) | {"accuracy": round(accuracy, 4)}

    def _step(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Fills the gradients; returns the mean squared error and the probe's accuracy."""
        batch = Batch(*tensors)
        torch._foreach_zero_([p.grad for _, p in self._named])
        self._attention.weight = batch.padding
        with self._autocast():
            states = encode_text(self._text_encoder, batch.tokens)
            velocity = self._transformer(
                hidden_states=batch.noisy, timestep=batch.timestep, encoder_hidden_states=states, return_dict=False
            )[0]
        error = (velocity.float() - batch.target).square().mean()
        read = self._probe(states, batch.tokens, batch.told)
        (error + self._recipe.probe_weight * read.loss).backward()
        return error.detach(), read.accuracy

    def _batch(self, pool: LatentPool, bucket: int) -> list[Tensor]:
        return flow_batch(pool, bucket, self._recipe.flow_shift, self._rng.choice(_PADDED_TO)).tensors()

    def _run(self, pool: LatentPool, bucket: int) -> tuple[Tensor, ...]:
        batch = self._batch(pool, bucket)
        return self._graphs(bucket, batch) if self._graphs else self._step(*batch)

    def rehearse(self, pool: LatentPool) -> None:
        """Compiles and captures the step for every bucket, on any latents, and logs how long one takes.

        Done before anything is trained, since it is what fails first on an unknown machine.
        """
        if self._cuda:
            self._transformer.compile_repeated_blocks()
        for bucket, kind in enumerate(self._recipe.buckets):
            self._run(pool, bucket)
            stage = Stage(seconds=60, step_limit=3)
            for _ in stage:
                self._run(pool, bucket)
            summary = stage.summary(self._device)
            log.info("%s: %.0f ms a step", kind.clip, 1000 * summary["seconds"] / summary["steps"])

    def denoise(self, pool: LatentPool, seconds: float) -> dict[str, Any]:
        recipe = self._recipe
        optimizers = Optimizers(self._named, _muon_rate, _ADAM_RATE, decay=_DECAY)
        stage = Stage(seconds, recipe.step_limit)
        live = [p.detach() for p in self._shipped]
        average = [p.clone() for p in live]
        history: list[dict[str, float]] = []
        for progress in stage:
            if stage.steps % recipe.refresh_every == 0:
                pool.add(pool.pick())
            bucket = pool.pick()
            error, accuracy = self._run(pool, bucket)
            optimizers.step(progress)
            keep = min(recipe.ema, (1 + stage.steps) / (10 + stage.steps))
            torch._foreach_lerp_(average, live, 1 - keep)
            if bucket == 0 and stage.steps >= recipe.log_every * len(history):
                entry = {"error": round(float(error), 4), "captions_read": round(float(accuracy), 3)}
                history.append({"step": stage.steps, "second": round(stage.elapsed, 1), **entry})
                log.info("dit step %d, %.0f s: %s", stage.steps, stage.elapsed, entry)
        torch._foreach_copy_(live, average)
        return stage.summary(self._device) | {"clips": pool.made, "history": history}

    @torch.no_grad()
    def largest_difference(self, pool: LatentPool, padded_to: int) -> float:
        """Of the text states and of the training forward to the stock ones on really padded text, relative."""
        batch = flow_batch(pool, 0, self._recipe.flow_shift, padded_to)
        states = encode_text(self._text_encoder, batch.tokens)
        mask = (batch.tokens != PAD).long()
        expected = self._text_encoder(batch.tokens, attention_mask=mask).last_hidden_state * mask[..., None]
        worst = float((states - expected).abs().max() / expected.abs().max())

        nn.init.normal_(self._transformer.proj_out.weight, std=0.1)  # at zero all outputs would be equal
        stock = WanTransformer3DModel.from_config(self._transformer.config).to(self._device)
        stock.load_state_dict(self._transformer.state_dict())
        self._attention.weight = batch.padding
        got = self._transformer(batch.noisy, batch.timestep, states, return_dict=False)[0]
        padded = torch.cat([states, states.new_zeros(len(states), padded_to - LENGTH, states.shape[2])], 1)
        expected = stock(batch.noisy, batch.timestep, padded, return_dict=False)[0]
        nn.init.zeros_(self._transformer.proj_out.weight)
        return max(worst, float((got - expected).abs().max() / expected.abs().max()))


def _keep_full_precision(module: nn.Module, device: torch.device) -> None:
    """Lets this one module ignore autocast."""
    inner = module.forward

    def forward(x: Tensor) -> Tensor:
        with torch.autocast(device.type, enabled=False):
            return inner(x.float())

    module.forward = forward  # type: ignore[method-assign]
