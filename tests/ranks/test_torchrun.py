"""The command under torchrun."""

import re
import subprocess
import sys

import pytest

from prospr.cli import main

pytest.importorskip("tyro")
NETWORK = ["--settings", "width", "4", "--device", "cpu", "--sparsity", "0.9"]


def torchrun(*words):
    start = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "prospr", *words]
    return subprocess.run(start, capture_output=True, text=True, timeout=120)


@pytest.mark.slow
def test_two_processes_write_the_masks_of_one(tmp_path, capsys):
    """Batch norm included: its statistics are those of the whole batch."""
    one, two = tmp_path / "one.safetensors", tmp_path / "two.safetensors"
    once = [*NETWORK, "--method", "prospr-one-shot"]  # in 20 rounds of float32, other roundings are other masks
    assert main(["prune", *once, "--out", str(one)]) == 0
    alone = capsys.readouterr().out
    done = torchrun("prune", *once, "--out", str(two))
    assert done.returncode == 0, done.stderr
    assert two.read_bytes() == one.read_bytes()
    assert done.stdout == alone.replace(str(one), str(two))  # once


@pytest.mark.slow
def test_an_error_is_told_and_ends_all(tmp_path):
    done = torchrun("prune", *NETWORK, "--method", "magnitude", "--sparsity", "0.9999", "--out", str(tmp_path / "m"))
    assert done.returncode != 0
    assert re.search(r"^prospr: no path is left", done.stderr, re.MULTILINE)
    assert not (tmp_path / "m").exists()
