"""Which of the requests that one device computes goes first, where not all can go on at once.

Turns one after the other would be fair, but of requests that gain nothing from each other all would end when the last
one does. So turns are only reckoned with: each request is due when it would end if it took turns with as many others
as there may ever be, and the one that is due first goes first. Of equally long ones that is the oldest, so they end
one after the other. A short one passes by the long ones that are there, unless these are nearly due, and is not held up
for as long as they take. Nor do short ones that keep coming hold up a long one for ever: those that begin when the
others have had their turns beside it are due after it. The only cost is the order, since who goes first is still
joined with as many as pay off.
"""

from __future__ import annotations


class Precedence:
    """Says when each of at most ``places`` requests at a time is due. Used from one thread."""

    def __init__(self, places: int) -> None:
        self._places = places
        self._computed = 0

    def computed(self, steps: int) -> None:
        """So many steps, each of some request, are done."""
        self._computed += steps

    def due(self, left: int) -> int:
        """For a request that has ``left`` steps to come from now on: the number of steps, counted over all requests, at
        which it would end if each of its steps were one of a full round."""
        return self._computed + self._places * left
