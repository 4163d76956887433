"""Sweeps on Ray: a cluster of two workers on this machine, one of which is killed."""

import subprocess
import sys

import pytest
from sweeps import (
    SMALL,
    KilledOnce,
    check_like_plain_runs,
    check_resumed,
    check_unbroken,
)

from prospr.errors import PruningError, SettingError
from prospr.lab.executors import Ray
from prospr.lab.grid import changed, grid
from prospr.lab.run import Options
from prospr.lab.sweep import sweep

ray = pytest.importorskip("ray", reason="ray is not installed: pip install 'prospect-pruning[ray]'")


@pytest.fixture(scope="module")
def cluster():
    """Two workers. It is the tests' own, and `sweep` uses the Ray it finds."""
    ray.init("local", num_cpus=2, include_dashboard=False, log_to_driver=False)
    yield
    ray.shutdown()


@pytest.mark.slow
def test_a_worker_that_is_killed_loses_nothing_and_nothing_is_done_twice(tmp_path, cluster):
    wanted = [*grid(SMALL, seed=range(3)), changed(SMALL, method="magnitude", sparsity=0.999)]
    options = Options(save_every=0, loggers=[KilledOnce])
    results = sweep(wanted, tmp_path, "cpu", options=options, executor=Ray())
    assert [one.error for one in results[:3]] == [None] * 3
    assert "CollapseError" in results[-1].error
    check_unbroken(results[0])
    check_resumed(results[1])
    check_unbroken(results[2])
    check_like_plain_runs(results[:3], tmp_path / "plain")
    assert ray.is_initialized()


def test_a_cluster_that_is_not_there_or_too_small(tmp_path):
    """In processes of their own: this one may be connected to a cluster."""
    code = """
import sys
from sweeps import *
from prospr.lab.executors import Ray
from prospr.lab.sweep import sweep
try:
    sweep([SMALL], sys.argv[1], executor=Ray(cpus=1000))
except Exception as error:
    print(type(error).__name__, error)
sys.modules["ray"] = None
try:
    sweep([SMALL], sys.argv[1], executor=Ray())
except Exception as error:
    print(type(error).__name__, error)
"""
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, timeout=120)
    lines = done.stdout.splitlines()
    assert lines[0].startswith("SettingError executor 'ray': a task asks for 1000 CPU, and the cluster has ")
    assert lines[1].startswith("SettingError executor 'ray' needs ray, which is not installed: pip install ")


def test_settings_that_cannot_be():
    with pytest.raises(SettingError, match="cpus=0, gpus=0"):
        Ray(cpus=0)
    assert Ray(gpus=0.25).device(None) == "cuda"
    assert issubclass(SettingError, PruningError)
