"""The same tensors joined again are the same tensor, as long as they are there and nobody has written to them."""

from __future__ import annotations

import torch

from triptych.accel.merging import Merged


def test_what_comes_together_again_is_one_tensor() -> None:
    merged = Merged()
    cat, dog = torch.ones(1, 3), torch.zeros(1, 3)
    first = merged.of((cat, dog))
    second, third = merged.of((cat, dog)), merged.of((cat, dog))
    assert second is third
    for whole in (first, second):
        assert torch.equal(whole, torch.cat([cat, dog]))
    assert torch.equal(merged.of((dog, cat)), torch.cat([dog, cat]))
    assert merged.of((dog, cat)) is not second


def test_what_was_written_to_is_joined_anew() -> None:
    merged = Merged()
    cat, dog = torch.ones(1, 3), torch.zeros(1, 3)
    for _ in range(3):
        whole = merged.of((cat, dog))
    cat += 1
    assert torch.equal(merged.of((cat, dog)), torch.cat([cat, dog]))
    for _ in range(2):
        whole = merged.of((cat, dog))
    whole += 1  # by a model that changes what it is given
    assert torch.equal(merged.of((cat, dog)), torch.cat([cat, dog]))


def test_it_is_gone_with_any_of_its_parts() -> None:
    merged = Merged()
    cat, dog = torch.ones(1, 3), torch.zeros(1, 3)
    for _ in range(3):
        merged.of((cat, dog))
        merged.of((cat, cat))
    assert len(merged) == 2
    del dog
    assert len(merged) == 1
    del cat
    assert len(merged) == 0
