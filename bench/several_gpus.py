"""Runs `python -m bench shared`: `python -m bench.several_gpus --processes 8`.

Without ``--cases`` it runs all of them: a shared vocabulary, a shared sequence, a mesh of two
dimensions, FSDP2 of 1B from 8B, and DDP.
"""

from __future__ import annotations

import sys

from bench.__main__ import main

if __name__ == "__main__":
    sys.exit(main(["shared", *sys.argv[1:]]))
