"""What is compared stands on equal GPUs."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import pytest

from triptych.bench.arrangement import Arrangement, planned
from triptych.launch.args import ServerArgs


def gpus_of(command: tuple[str, ...]) -> list[int]:
    said = dict(pairwise(command))
    first, count = int(said.get("--base-gpu-id", 0)), int(said.get("--num-gpus", 1))
    return list(range(first, first + count))


@pytest.mark.parametrize("denoisers", [[[1]], [[1], [2]], [[1, 2]], [[0]]])
def test_replicas_get_each_gpu_of_the_roles_once_and_no_other(denoisers: list[list[int]]) -> None:
    arrangement = Arrangement(
        model="tiny", gpus={"encoder_gpus": [[0]], "denoiser_gpus": denoisers, "decoder_gpus": [[0]]}, options={}
    )
    args = ServerArgs.from_kwargs(model_path="tiny", device="cuda")
    split, replicas = (planned(arrangement, args, replicas=replicas) for replicas in (False, True))
    used = {gpu for spec in split.instances for gpu in gpus_of(spec.command)}
    assert Counter(gpu for spec in replicas.instances for gpu in gpus_of(spec.command)) == Counter(used)
    assert arrangement.gpu_count == len(used)
