"""`python -m kvx_nixl install | check | remove | list`."""

import os
import sys

from kvx_nixl import KVX

COMMANDS = {
    "install": ["--install", sys.prefix],
    "check": ["--check"],
    "remove": ["--remove", sys.prefix],
    "list": [],
}


def kvx():
    """Replaces this process with the program `kvx`."""
    os.execv(KVX, ["kvx", *sys.argv[1:]])


def main():
    command = sys.argv[1] if len(sys.argv) == 2 else None
    if command not in COMMANDS:
        sys.exit("usage: python -m kvx_nixl install | check | remove | list\n"
                 "(before `pip uninstall kvx-nixl`: remove)")
    os.environ["VIRTUAL_ENV"] = sys.prefix  # where `kvx nixl` searches
    os.execv(KVX, ["kvx", "nixl", *COMMANDS[command]])


if __name__ == "__main__":
    main()
