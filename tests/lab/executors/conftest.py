import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

TESTS = Path(__file__).parents[2]

FRONT = """
import sys
from sweeps import *
from prospr.lab.executors import *
from prospr.lab.grid import grid
from prospr.lab.run import Options
from prospr.lab.sweep import sweep

if __name__ == "__main__":
    wanted = grid(SMALL, seed={seeds})
    sweep(wanted, sys.argv[1], "cpu", executor={executor}, options=Options(save_every=0, loggers=[{logger}]))
"""


@pytest.fixture(scope="module", autouse=True)
def _like_plain_runs():
    """One thread, because results are compared to the bit; and workers find what the tests import."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    paths = [str(TESTS), *(os.path.abspath(path) for path in sys.path if path)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(paths))
        yield
    torch.set_num_threads(threads)


@pytest.fixture
def start_front(tmp_path):
    """Start a sweep in a process of its own."""
    started = []

    def start(executor, folder, seeds, logger="Slow"):
        path = tmp_path / f"front{len(started)}.py"
        path.write_text(FRONT.format(executor=executor, seeds=list(seeds), logger=logger))
        with path.with_suffix(".log").open("w") as log:
            process = subprocess.Popen([sys.executable, str(path), str(folder)], stdout=log, stderr=log)
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.wait()
