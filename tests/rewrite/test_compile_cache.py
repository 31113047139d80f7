"""Compiled graphs outlive the process in Inductor's caches: never with the gradient of other code.

A graph holds a custom operator's backward by name only. With warm caches, a changed source file of
the package or a changed option has to be a miss, and an unchanged one a hit.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest
from torch import fx

import torch_streamkl
from torch_streamkl import compile_caches
from torch_streamkl.fx_passes import inductor_passes as passes

SCRIPT = Path(__file__).parents[1] / "support" / "cached_step.py"
# the autograd formula is traced into compiled graphs; the operators are called by name
FORMULA = re.compile(r"(def _autograd\(ctx.*\n)")
NEGATED = r"\1    grad = None if grad is None else -grad\n"


def _copy_of_the_package(root):
    package = root / "torch_streamkl"
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(Path(torch_streamkl.__file__).parent, package, ignore=ignored)
    rewrite = Path(passes.__file__).parent
    shutil.copytree(rewrite, package / "fx_passes", ignore=ignored, dirs_exist_ok=True)
    return package


@contextmanager
def _processes(root):
    """Calls answer requests in a new process each, which has imported nothing of ours before."""
    environment = {
        **os.environ,
        "PYTHONPATH": str(root),
        "TORCHINDUCTOR_CACHE_DIR": str(root / "cache"),
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
        # with an empty cache every vector instruction set would be tried out first
        "TORCHINDUCTOR_VEC_ISA_OK": "0",
    }
    command = [sys.executable, "-W", "ignore", str(SCRIPT)]
    pipe, errors = subprocess.PIPE, root / "errors"
    with (
        errors.open("w") as stderr,
        subprocess.Popen(
            command, env=environment, stdin=pipe, stdout=pipe, stderr=stderr, text=True, cwd=root
        ) as server,
    ):
        assert server.stdin is not None and server.stdout is not None

        def run(*requests):
            print(*requests, file=server.stdin, flush=True)
            for line in server.stdout:
                if line.startswith("["):
                    return json.loads(line)
            raise AssertionError(errors.read_text()[-3000:])

        yield run
        server.stdin.close()
        assert server.wait() == 0, errors.read_text()[-3000:]


def _uses(result):
    """Hits, misses and bypasses of the AOTAutograd cache, before the FX graph cache."""
    return tuple(result[f"autograd_cache_{e}"] for e in ("hit", "miss", "bypass"))


def test_changed_code_or_option_is_a_miss_and_the_same_a_hit(tmp_path):
    package = _copy_of_the_package(tmp_path)
    front_ends = ("backend", "inductor_options", "direct")
    with _processes(tmp_path) as run:
        eager, *first = run("eager", *front_ends)
        for result in first:
            assert _uses(result) == (0, 1, 0)
            assert result["gradient"] == pytest.approx(eager["gradient"], abs=1e-6)

        *again, backend_option, inductor_option = run(
            *front_ends, "backend,strict", "inductor_options,strict"
        )
        for result, before in zip(again, first, strict=True):
            assert _uses(result) == (1, 0, 0)
            assert result["gradient"] == before["gradient"]
        for result in (backend_option, inductor_option):
            assert _uses(result) == (0, 1, 0)

        operators = package / "attention" / "ops.py"
        text, count = FORMULA.subn(NEGATED, operators.read_text())
        assert count == 1
        operators.write_text(text)
        for result in run("backend", "direct"):
            assert _uses(result) == (0, 1, 0)
            assert result["gradient"] == pytest.approx([-x for x in eager["gradient"]], abs=1e-6)


def test_every_source_file_is_part_of_the_key(tmp_path):
    package = _copy_of_the_package(tmp_path)
    for path in package.rglob("*"):
        if path.is_file():  # as many files, of a few bytes each: every one is read for every other
            path.write_bytes(path.read_bytes()[-40:])
    seen = {compile_caches.digest_of(package)}
    assert compile_caches.digest_of(package) in seen
    files = [path for path in package.rglob("*") if path.is_file()]
    assert len(files) > 20
    # one of each folder, and of each kind of name: a digest reads all files
    kinds = {p.parent: p for p in files} | {(p.suffix, p.name[:1] == "_"): p for p in files}
    for path in kinds.values():
        path.write_bytes(path.read_bytes() + b"\n# changed\n")
        digest = compile_caches.digest_of(package)
        assert digest not in seen, path
        seen.add(digest)
    renamed = files[0].with_name("renamed.py")
    files[0].rename(renamed)
    assert compile_caches.digest_of(package) not in seen


def test_a_pass_of_the_user_runs_and_is_part_of_the_key():
    class Users(passes.CustomGraphPass):
        def __init__(self, name):
            self.name = name
            self.ran = 0

        def __call__(self, graph):
            self.ran += 1

        def uuid(self):
            return self.name

    ours, one, two = passes.JointPass({}, None), Users("one"), Users("two")
    assert passes.chained(ours, None) is ours
    both = passes.chained(ours, [one, two])
    both(fx.Graph())
    assert (one.ran, two.ran) == (1, 1)
    keys = {passes.chained(ours, p).uuid() for p in (one, two, [one, two], [two, one])}
    assert len(keys) == 4
    assert passes.chained(ours, [one, Users(None)]).uuid() is None
