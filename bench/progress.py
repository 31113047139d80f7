"""A progress bar that also works without tqdm."""

from __future__ import annotations

import sys


class Progress:
    """A bar on standard error: tqdm's where it is installed, otherwise a line for each step."""

    def __init__(self, steps: int) -> None:
        self.steps = steps

    def __enter__(self) -> Progress:
        try:
            from tqdm import tqdm

            self.bar = tqdm(
                total=self.steps, unit="step", file=sys.stderr, dynamic_ncols=True, leave=False
            )
        except ImportError:
            self.bar = None
            self.done = 0
        return self

    def __exit__(self, *_: object) -> None:
        if self.bar is not None:
            self.bar.close()

    def show(self, what: str) -> None:
        if self.bar is not None:
            self.bar.set_description(what)
            self.bar.update()
        else:
            self.done += 1
            print(f"[{self.done}/{self.steps}] {what}", file=sys.stderr, flush=True)

    def write(self, text: str) -> None:
        if self.bar is not None:
            self.bar.clear()
        print(text, flush=True)
