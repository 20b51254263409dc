"""`triptych WORDS`, run by a child of the nursery, where what the command starts in turn is forked too."""

import sys

from tests.e2e.nursery import fork_nursery, forking

if __name__ == "__main__":
    fork_nursery()
    from triptych.cli.main import main

    with forking():
        sys.exit(main())
