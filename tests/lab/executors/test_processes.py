"""Sweeps in processes of this machine that die, and whose front dies."""

import signal

import pytest
from sweeps import (
    SMALL,
    Deadly,
    Diary,
    KilledOnce,
    Slow,
    at_the_gate,
    check_like_plain_runs,
    check_resumed,
    check_unbroken,
    diary,
    wait_for,
)

from prospr.errors import FolderError
from prospr.lab.executors import Processes
from prospr.lab.executors.front import DONE, Ended, Front, Task
from prospr.lab.grid import changed, grid
from prospr.lab.results import load
from prospr.lab.run import Options, run
from prospr.lab.runs.files import is_locked, locked
from prospr.lab.runs.folder import RunFolder
from prospr.lab.sweep import sweep


def test_a_process_that_is_killed_loses_nothing_and_nothing_is_done_twice(tmp_path):
    wanted = grid(SMALL, method=["snip", "dense"], seed=range(2))
    wanted.append(changed(SMALL, method="magnitude", sparsity=0.999))  # it fails
    run(wanted[2], tmp_path, "cpu")  # one is done
    told = []
    results = sweep(
        wanted,
        tmp_path,
        "cpu",
        lambda *words: told.append(words),
        processes=2,
        options=Options(save_every=0, loggers=[KilledOnce]),
    )
    assert [one.experiment for one in results] == wanted
    assert [one.error is None for one in results] == [True] * 4 + [False]
    assert "CollapseError" in results[-1].error
    assert "CollapseError" in RunFolder(wanted[-1], tmp_path).error()["error"]
    assert [done for done, _, _ in told] == [1, 2, 3, 4, 5]
    assert not (results[2].folder / "diary").exists()
    check_unbroken(results[0])
    check_resumed(results[1])
    check_resumed(results[3])
    check_like_plain_runs(results[:4], tmp_path / "plain")


def test_a_run_that_kills_its_process_is_given_up_and_the_others_go_on(tmp_path):
    wanted = grid(SMALL, seed=range(3))
    options = Options(save_every=1000, loggers=[Deadly])
    results = sweep(wanted, tmp_path, "cpu", processes=2, options=options)
    assert [one.error is None for one in results] == [True, False, True]
    assert results[1].error.startswith("2 workers died at it; the last was process ")
    assert results[1].error.endswith(", exit code -9")
    assert RunFolder(wanted[1], tmp_path).error()["error"] == results[1].error
    again = sweep(wanted, tmp_path, "cpu")  # in this process, and without the deadly logger
    assert [one.error for one in again] == [None] * 3
    assert RunFolder(wanted[1], tmp_path).error() is None


def test_processes_end_when_their_front_is_killed_and_another_front_goes_on(tmp_path, start_front):
    folder = tmp_path / "runs"
    wanted = grid(SMALL, seed=range(2))
    front = start_front("Processes(2)", folder, range(2), "Gate")
    wait_for(lambda: at_the_gate(wanted, folder))
    front.send_signal(signal.SIGKILL)
    front.wait()
    (folder / "go").touch()
    results = sweep(wanted, folder, "cpu", processes=2, options=Options(save_every=0, loggers=[Diary]))
    for result in results:
        check_resumed(result)
    check_like_plain_runs(results, tmp_path / "plain")


def test_two_sweeps_share_a_folder(tmp_path, start_front):
    folder = tmp_path / "runs"
    wanted = grid(SMALL, seed=range(3))
    other = start_front("Processes(2)", folder, range(3))
    wait_for(lambda: any(is_locked(RunFolder(one, folder).lock) for one in wanted))
    results = sweep(wanted, folder, "cpu", processes=2, options=Options(save_every=0, loggers=[Slow]))
    assert other.wait(60) == 0
    for result in results:
        check_unbroken(result)
    assert len({process for result in results for _, process in diary(result)}) > 2


def test_what_somebody_else_is_at_is_left_for_later(tmp_path):
    first, second = grid(SMALL, seed=range(2))
    front = Front([first, second], tmp_path, None)
    lock = RunFolder(first, tmp_path).lock
    assert not is_locked(lock)
    assert not lock.exists()
    lock.parent.mkdir()
    with locked(lock):
        assert is_locked(lock)
        front._waiting = [[first, second]]
        assert front._free(2) == [[second]]
        assert front._waiting == [[first]]
        assert front._free(2) == []
    assert front._free(0) == []
    assert front._free(2) == [[first]]
    assert front._waiting == []


def test_the_threads_are_shared_out():
    assert Processes(2).threads() == 1


def test_a_failure_outside_of_a_run_is_recorded_too(tmp_path):
    """Such as a node that has no GPU."""
    task = Task(str(tmp_path), "cuda:7", 1, Options(), 1)
    outcomes = task.run([SMALL])
    assert outcomes[SMALL.identity].startswith(("SettingError", "AcceleratorError", "RuntimeError"))
    place = RunFolder(SMALL, tmp_path)
    assert place.error()["error"] == outcomes[SMALL.identity]
    (row,) = load(tmp_path)
    assert row.error == outcomes[SMALL.identity]


def test_a_result_that_a_worker_wrote_elsewhere_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr("prospr.lab.executors.front.GRACE", 0.1)
    front = Front([SMALL], tmp_path, None)
    with pytest.raises(FolderError, match="must be on a file system that this machine and the workers share"):
        front._settle(Ended([SMALL], {SMALL.identity: DONE}))
