"""The program behind `test_network`, run in namespaces of its own: a denoiser at the far end of a bad link.

Server, encoder and decoder are at the near end; tensors go over Mooncake's TCP. Prints what it saw, ends with 0 if
every request was done with the bytes of an undisturbed run.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

from tests.e2e.harness import Deployment, until
from tests.e2e.netns import HERE, THERE, Link, Weather

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
        assert far.api.make(**REQUEST) == expected
        assert link.lost > 0
        print("50 to 80 ms late, packets out of order, 2 % lost", flush=True)
        link.weather = Weather()

        for seconds in (1.0, 5.0):  # an instance is given up after 2.5 s
            for state in ("denoising_running", "decoder"):
                job = far.api.submit(**REQUEST)
                until(lambda job=job, state=state: _reached(far, job, state), f"the request being in {state}")
                link.weather = Weather(cut=True)
                time.sleep(seconds)
                link.weather = Weather()
                video = far.api.done(job)
                assert far.api.content(job) == expected
                print(f"cut for {seconds:g} s in {state}: attempt {video['attempt']}", flush=True)
        until(lambda: len(far.registered()) == 3, "the denoiser being back")
        assert far.api.make(**REQUEST) == expected
    print("all done", flush=True)
    return 0


def _reached(far: Far, job: str, state: str) -> bool:
    stage = far.api.job(job)["stage"]
    return stage.startswith(state) or stage == "done"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
