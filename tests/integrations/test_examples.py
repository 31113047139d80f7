"""Every example runs and prints that everything fused."""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integrations.flows import library

FOLDER = Path(__file__).resolve().parents[2] / "examples"
LIBRARIES = {  # what each needs next to tqdm
    "attention_maps": (),
    "lm_heads": (),
    "vit_maps": ("transformers",),
    "trl_gkd": ("transformers", "accelerate", "datasets", "trl"),
    "hf_trainer": ("transformers", "accelerate"),
    "accelerate_loop": ("transformers", "accelerate"),
    "peft_lora": ("transformers", "peft"),
    "lightning_module": ("transformers", "lightning"),
}


SLOW = (
    "trl_gkd",
    "hf_trainer",
    "accelerate_loop",
    "peft_lora",
    "lightning_module",
)  # flows that have fast tests


@pytest.mark.parametrize(
    "name", [pytest.param(x, marks=[pytest.mark.slow] * (x in SLOW)) for x in LIBRARIES]
)
def test_example(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for each in ("tqdm", *LIBRARIES[name]):
        library(each)
    monkeypatch.setattr(sys, "argv", [name, "--steps", "4"])
    runpy.run_module(f"examples.{name}", run_name="__main__")
    printed = capsys.readouterr().out
    assert "1 of 1 loss fused" in printed, printed
    assert "No score- or logit-sized tensor remains" in printed, printed
    assert printed.count("ms a step") == printed.count("MiB above what is held") == 2
    for first in ("uncompiled: first step", "streamkl: compiling"):
        assert re.search(rf"^{first}\.\.\. [\d.]+ s$", printed, re.MULTILINE), printed
    found = re.search(r"largest relative difference (\S+)", printed)
    assert found is not None
    assert float(found[1]) < 1e-3  # the same weights and data: rounding alone


def test_a_missing_library_is_named(tmp_path: Path) -> None:
    # the first that an example imports: none takes seconds to be found before it
    (tmp_path / "torch.py").write_text("raise ModuleNotFoundError(name='torch')")
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{FOLDER.parent}"}
    command = [sys.executable, "-m", "examples.attention_maps"]
    done = subprocess.run(
        command, env=environment, cwd=FOLDER.parent, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert done.stderr.startswith("this example needs torch, which is not installed: pip install")
    assert "Traceback" not in done.stderr


def test_trainers_of_several_gpus_use_one(tmp_path: Path) -> None:
    """Without torchrun, Trainer would wrap the model in nn.DataParallel, where nothing fuses."""
    for each in ("transformers", "accelerate"):
        library(each)
    from transformers import TrainingArguments

    from examples.one_gpu import use_one_gpu

    arguments = TrainingArguments(str(tmp_path), use_cpu=True, report_to=[])
    arguments._n_gpu = 3  # as many as the process sees
    use_one_gpu(arguments)
    assert arguments.n_gpu == 1


def test_none_is_long_or_untested() -> None:
    scripts = [p for p in FOLDER.glob("*.py") if 'name__ == "__main__"' in p.read_text()]
    assert {p.stem for p in scripts} == set(LIBRARIES)
    assert all(len(p.read_text().splitlines()) < 80 for p in FOLDER.glob("*.py"))
