"""Answers of components as plain values: only what was read, as it was when it was read."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from diffusers.models.autoencoders.vae import DiagonalGaussianDistribution
from diffusers.models.modeling_outputs import AutoencoderKLOutput
from transformers.modeling_outputs import BaseModelOutputWithPooling

from triptych.errors import StageError
from triptych.pipeline.answers import OutputClasses, Unread, without_numbers
from triptych.pipeline.codec import decode_state, encode_state


@pytest.fixture(scope="module")
def classes() -> OutputClasses:
    return OutputClasses([torch.nn.Linear])


def crossed(classes: OutputClasses, value: Any) -> Any:
    """``value`` after a trip through the codec."""
    tree, tensors = encode_state({"answer": classes.flat(value)}, {})
    entries, _ = decode_state(tree, tensors, torch.device("cpu"))
    return classes.rebuilt(entries["answer"])


def layers(n: int) -> tuple[torch.Tensor, ...]:
    return tuple(torch.full((2, 3), float(i)) for i in range(n))


@pytest.mark.parametrize(
    "value", [None, True, 3, 0.5, "text", [1, [2, None]], (1, (2.0, "x")), {"a": 1, "b": (2,)}, torch.Size([1, 2])]
)
def test_plain_values_come_back(classes: OutputClasses, value: Any) -> None:
    assert crossed(classes, value) == value


def test_only_fields_that_were_read_cross(classes: OutputClasses) -> None:
    answer = BaseModelOutputWithPooling(
        last_hidden_state=torch.ones(1, 4), pooler_output=torch.zeros(1, 2), hidden_states=layers(5)
    )
    read = classes.noted(answer)
    assert "hidden_states" in read
    assert len(read) == 3
    assert torch.equal(read.hidden_states[-2], layers(5)[3])
    assert torch.equal(read[1], torch.zeros(1, 2))
    back = crossed(classes, read)
    assert isinstance(back, BaseModelOutputWithPooling)
    assert torch.equal(back[1], torch.zeros(1, 2))
    assert isinstance(back.last_hidden_state, Unread)
    assert [isinstance(layer, Unread) for layer in back.hidden_states] == [True, True, True, False, True]
    assert torch.equal(back.hidden_states[-2], layers(5)[3])


def test_a_tuple_that_torch_reads_for_itself_crosses_whole(classes: OutputClasses) -> None:
    read = classes.noted(BaseModelOutputWithPooling(last_hidden_state=torch.ones(1), hidden_states=layers(3)))
    assert torch.stack(read.hidden_states).shape == (3, 2, 3)
    assert torch.equal(torch.stack(crossed(classes, read).hidden_states), torch.stack(layers(3)))


def test_what_the_pipeline_changes_in_place_crosses_unchanged(classes: OutputClasses) -> None:
    read = classes.noted(BaseModelOutputWithPooling(last_hidden_state=torch.ones(1, 4), hidden_states=layers(2)))
    read.last_hidden_state.mul_(7)
    read.hidden_states[1].zero_()
    assert read[0].max() == 7
    back = crossed(classes, read)
    assert torch.equal(back.last_hidden_state, torch.ones(1, 4))
    assert torch.equal(back.hidden_states[1], layers(2)[1])


def test_what_cannot_cross_fails_only_when_it_is_used(classes: OutputClasses) -> None:
    read = classes.noted(BaseModelOutputWithPooling(last_hidden_state=torch.ones(1), pooler_output=object()))
    assert read.pooler_output is not None
    back = crossed(classes, read)
    with pytest.raises(AttributeError):
        back.pooler_output.shape  # noqa: B018


def test_a_distribution_samples_the_same(classes: OutputClasses) -> None:
    answer = AutoencoderKLOutput(latent_dist=DiagonalGaussianDistribution(torch.randn(1, 8, 2, 2)))
    read = classes.noted(answer)
    assert hasattr(read, "latent_dist")
    assert not hasattr(read, "latents")
    sample = read.latent_dist.sample(torch.Generator().manual_seed(1))
    assert torch.equal(crossed(classes, read).latent_dist.sample(torch.Generator().manual_seed(1)), sample)


@pytest.mark.parametrize(
    "plain",
    [
        ["output", "builtins.object", [], []],
        ["output", "subprocess.Popen", ["args"], [["value", "true"]]],
        ["call", "x"],
        ["tuple", 3],
        "value",
        ["zeros", [2], "float32", "cpu"],
    ],
)
def test_anything_else_is_refused(classes: OutputClasses, plain: Any) -> None:
    with pytest.raises(StageError, match="not a recorded answer"):
        classes.rebuilt(plain)


def test_shapes_alone_cost_no_tensor(classes: OutputClasses) -> None:
    value = (torch.ones(2, 3, dtype=torch.bfloat16), {"mask": torch.tensor([True, False])}, [torch.tensor([5])])
    light = without_numbers(classes.flat(value), floats_only=True)
    tree, tensors = encode_state({"answer": light}, {})
    assert [tensor.dtype for tensor in tensors] == [torch.bool, torch.int64]
    entries, _ = decode_state(tree, tensors, torch.device("cpu"))
    zeros, mask, numbers = classes.rebuilt(entries["answer"])
    assert (zeros.shape, zeros.dtype, int(zeros.count_nonzero())) == ((2, 3), torch.bfloat16, 0)
    assert mask["mask"].tolist() == [True, False]
    assert numbers[0].tolist() == [5]
    assert not encode_state({"a": without_numbers(classes.flat(value), floats_only=False)}, {})[1]
