"""`python -m kvx`: the program `kvx`; and `python -m kvx nixl install | check | remove | list`, for the NIXL of this environment."""

import os
import sys

from kvx import KVX

NIXL = {
    "install": ["--install", sys.prefix],
    "check": ["--check"],
    "remove": ["--remove", sys.prefix],
    "list": [],
}


def main():
    """Replaces this process with the program `kvx`."""
    arguments = sys.argv[1:]
    if arguments[:1] == ["nixl"] and arguments[1:2] and arguments[1] in NIXL:
        os.environ["VIRTUAL_ENV"] = sys.prefix  # where `kvx nixl` searches
        arguments = ["nixl", *NIXL[arguments[1]], *arguments[2:]]
    os.execv(KVX, ["kvx", *arguments])


if __name__ == "__main__":
    main()
