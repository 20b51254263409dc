"""The program behind `test_network`, run in namespaces of its own: a denoiser at the far end of a bad link.

Server, encoder and decoder are at the near end; tensors go over Mooncake's TCP. Prints what it saw, ends with 0 if
every request was done with the bytes of an undisturbed run.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

from tests.e2e.harness import SILENCE_SECONDS, Deployment, pretty, until
from tests.e2e.netns import HERE, THERE, Link, Weather

LEASE = 2.5
"""Seconds of silence after which an instance is given up."""
TRIES = 60
"""Requests that are submitted at the most to catch one in a certain state."""

REQUEST = {"size": "64x64", "num_frames": 9, "num_inference_steps": 12, "seed": 3}


class Far(Deployment):
    """A deployment that is spread over the link."""

    forked = False  # the nursery stands at neither end

    def spread(self, link: Link) -> None:
        self.start_server("--host", HERE, "--insecure")
        server = ("--disagg-server-addr", f"tcp://{HERE}:{self.frontend}", "--insecure", "--disagg-p2p-hostname")
        for role in ("encoder", "decoder"):
            self.start(f"{role}-0", *server, HERE)
        with link.there():
            self.start("denoiser-0", *server, THERE)
        self.wait_ready()


def main(folder: str) -> int:
    """All weathers, one after the other."""
    link = Link()
    with Far(Path(folder), plane="mooncake") as far:
        far.api.url = f"http://{HERE}:{far.port}"
        far.api._http.base_url = far.api.url
        far.spread(link)
        expected = far.api.make(**REQUEST)
        print("undisturbed", flush=True)

        link.weather = Weather(delay=0.05, jitter=0.03, loss=0.02)
        assert far.api.make(**REQUEST) == expected, "other bytes than an undisturbed run"
        assert link.lost > 0, f"{link.carried} packets were carried and none was lost"
        print("50 to 80 ms late, packets out of order, 2 % lost", flush=True)
        link.weather = Weather()

        for seconds in (1.0, 5.0):
            for state in ("denoising_running", "decoder"):
                job, denoiser, struck = _cut_in(far, link, state)
                if seconds > LEASE:
                    with far.api.healthy():
                        far.missed(denoiser, struck, SILENCE_SECONDS)
                        far.unready("denoiser", struck, SILENCE_SECONDS)
                time.sleep(max(0.0, struck + seconds - time.monotonic()))
                link.weather = Weather()
                video = far.api.done(job)
                assert far.api.content(job) == expected, f"other bytes than an undisturbed run: {pretty(video)}"
                if seconds > LEASE and state == "denoising_running":
                    assert video["attempt"] >= 2, f"the stage was not taken from {denoiser}: {pretty(video)}"
                until(lambda: len(far.registered()) == 3, "the denoiser being back")
                print(f"cut for {seconds:g} s in {state}: attempt {video['attempt']}", flush=True)
        assert far.api.make(**REQUEST) == expected, "other bytes than an undisturbed run"
    print("all done", flush=True)
    return 0


def _cut_in(far: Far, link: Link, state: str) -> tuple[str, str, float]:
    """Cut the link while a request is in a state; the request, the denoiser that is cut off, and when. One that was
    further when the cut came is left to end, and another one submitted; so is one whose denoiser was just given up
    for an earlier silence, since that is a fault of its own."""
    for _ in range(TRIES):
        job = far.api.submit(**REQUEST)
        reached = until(lambda job=job: _reached(far, job, state), f"the request being in {state}", every=0.002)
        if reached.startswith(state):
            link.weather = Weather(cut=True)
            struck = time.monotonic()
            time.sleep(0.1)  # not for readiness: words that had come through before the cut
            denoiser = far.registered().get("denoiser-0")
            if denoiser is not None and far.api.job(job)["stage"].startswith(state):
                return job, denoiser, struck
            link.weather = Weather()
        far.api.done(job)
    raise AssertionError(f"none of {TRIES} requests was cut off in {state}: {pretty(far.api.info()['instances'])}")


def _reached(far: Far, job: str, state: str) -> str:
    """The stage of the request, once it is in a state or past it."""
    stage = far.api.job(job)["stage"]
    return stage if stage.startswith((state, "decoder", "done")) else ""


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
