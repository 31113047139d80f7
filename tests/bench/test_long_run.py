"""The long run in small: it compares, stops, resumes, draws, and its verdict can be red."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers", reason="transformers is not installed")
from bench import demo, long_run

TINY = long_run.Settings(
    "cpu", steps=4, teacher_steps=1, batch=2, seqlen=24, hidden_size=64, student_layers=1,
    inner="eager",
)  # fmt: skip


def test_in_small(tmp_path: Path) -> None:
    found = long_run.curves(TINY)
    assert [(c.name, c.seed, len(c.losses)) for c in found] == [
        ("eager", 0, 4), ("eager", 1, 4), ("streamkl", 0, 4), ("resumed", 0, 2),
    ]  # fmt: skip
    verdict = long_run.verdict(found)
    assert verdict["is_within_band"]
    assert verdict["largest_relative_difference_of_a_step"] < 1e-4
    assert verdict["resumed_off_by"] == 0.0  # the same bits on a CPU
    assert verdict["held_out_resumed_0"] == verdict["held_out_streamkl_0"]
    long_run.draw(found, tmp_path / "picture.png")
    assert (tmp_path / "picture.png").stat().st_size > 10_000
    json.dumps(verdict)


def curve(name: str, *losses: float) -> long_run.Curve:
    return long_run.Curve(name, 0, list(losses))


def test_a_curve_outside_of_the_band_is_red() -> None:
    eager, other = curve("eager", *[2.0] * 60), curve("eager", *[2.1] * 60)
    near, far = (curve("streamkl", *[x] * 60) for x in (2.05, 2.2))
    for plugin, expected in ((near, True), (far, False)):
        resumed = curve("resumed", *plugin.losses[30:])
        found = long_run.verdict([eager, other, plugin, resumed])
        assert found["is_within_band"] == expected
        assert found["resumed_off_by"] == 0.0
        assert not found["learned"]


def test_steps_are_a_function_of_their_number() -> None:
    first, again = (long_run.batch_of(TINY, 0, 3) for _ in range(2))
    assert torch.equal(first, again)
    assert not torch.equal(first, long_run.batch_of(TINY, 1, 3))
    assert first.shape == (2, 24)


def test_held_out_text_is_seen_by_no_step() -> None:
    split = int(len(demo.text()) * (1 - long_run.HELD_OUT))
    large = replace(TINY, batch=1, seqlen=2000)
    part: Tensor = long_run.held_out_batch(large)[0]
    assert bytes(part.tolist()) == demo.text()[split : split + 2000]
