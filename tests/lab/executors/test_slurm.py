"""Sweeps on a real Slurm of one node: jobs that are killed, put back into the queue, and left by their front."""

import signal
import subprocess

import pytest
from one_node_slurm import NoSlurmError, one_node_slurm
from sweeps import (
    SMALL,
    Diary,
    KilledOnce,
    at_the_gate,
    check_like_plain_runs,
    check_resumed,
    check_unbroken,
    wait_for,
)

from prospr.cli import main
from prospr.errors import SettingError
from prospr.lab.executors import Slurm
from prospr.lab.executors.front import Task
from prospr.lab.executors.slurm import Element
from prospr.lab.grid import changed, grid
from prospr.lab.run import Options, run
from prospr.lab.runs.folder import RunFolder
from prospr.lab.sweep import sweep

pytest.importorskip("submitit", reason="submitit is not installed: pip install 'prospect-pruning[slurm]'")


@pytest.fixture(scope="module")
def slurm(_like_plain_runs):
    try:
        with one_node_slurm() as environment, pytest.MonkeyPatch.context() as patch:
            patch.setenv("SLURM_CONF", environment["SLURM_CONF"])
            yield
    except NoSlurmError as error:
        pytest.skip(f"no Slurm (`make slurm` installs it on Debian): {error}")


def queue():
    done = subprocess.run(["squeue", "-h", "-r", "-o", "%F_%K %T"], capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


@pytest.mark.slow
def test_a_job_that_is_killed_loses_nothing_and_nothing_is_done_twice(tmp_path, slurm, monkeypatch):
    monkeypatch.setenv("SLURM_MEM_PER_CPU", "1")  # as in a job, which a front may be in
    monkeypatch.setenv("SLURM_CPUS_PER_TASK", "64")
    wanted = [*grid(SMALL, seed=range(3)), changed(SMALL, method="magnitude", sparsity=0.999)]
    run(wanted[2], tmp_path, "cpu")  # one is done
    options = Options(save_every=0, loggers=[KilledOnce])
    results = sweep(wanted, tmp_path, "cpu", options=options, executor=Slurm(poll=0.5, runs_per_job=2, memory=1))
    assert [one.error for one in results[:3]] == [None] * 3
    assert "CollapseError" in results[-1].error
    assert "CollapseError" in RunFolder(wanted[-1], tmp_path).error()["error"]
    check_unbroken(results[0])
    check_resumed(results[1])
    assert not (results[2].folder / "diary").exists()
    assert results[0].environment["threads"] == 1
    check_like_plain_runs(results[:3], tmp_path / "plain")
    (lost,) = (tmp_path / "slurm").iterdir()  # the logs of the job that died, and of no other
    assert list(lost.glob("*.err"))


@pytest.mark.slow
def test_jobs_outlive_their_front_and_go_on_after_a_requeue(tmp_path, slurm, start_front):
    """One job is put back by Slurm, as after a node's failure; the other by itself, as before its time limit."""
    folder = tmp_path / "runs"
    wanted = grid(SMALL, seed=range(2))
    front = start_front("Slurm(poll=0.5)", folder, range(2), "Gate")
    wait_for(lambda: at_the_gate(wanted, folder))
    front.send_signal(signal.SIGKILL)
    front.wait()
    jobs = sorted(line.split()[0] for line in queue())
    assert [job.partition("_")[2] for job in jobs] == ["0", "1"]
    subprocess.run(["scontrol", "requeue", jobs[0]], check=True)
    subprocess.run(["scancel", "--signal=USR2", jobs[1]], check=True)
    (record,) = (folder / "slurm").glob("*.json")
    options = Options(save_every=0, loggers=[Diary])
    results = sweep(wanted, folder, "cpu", options=options, executor=Slurm(poll=0.5))
    assert [one.error for one in results] == [None, None]
    for result in results:
        check_resumed(result)
        assert result.environment["command"].endswith(record.stem)  # sent by the first front; the second sent nothing
    assert not list((folder / "slurm").iterdir())
    check_like_plain_runs(results, tmp_path / "plain")


def test_an_interrupt_ends_the_jobs(tmp_path, slurm, start_front):
    front = start_front("Slurm(poll=0.5)", tmp_path / "runs", range(6))
    wait_for(lambda: len(queue()) == 6)
    front.send_signal(signal.SIGINT)
    front.wait(60)
    wait_for(lambda: not queue())
    assert not list((tmp_path / "runs" / "slurm").iterdir())


def test_jobs_that_slurm_refuses(tmp_path, slurm, capsys):
    with pytest.raises(SettingError, match=r"sbatch refused the jobs: .*invalid partition"):
        sweep([SMALL], tmp_path, "cpu", executor=Slurm(partition="nowhere"))
    assert not list((tmp_path / "slurm").iterdir())
    assert main(["sweep", "--folder", str(tmp_path), "--executor", "slurm", "--sbatch", "nodelist=nowhere"]) == 1
    assert "prospr: executor 'slurm': sbatch refused the jobs" in capsys.readouterr().err


def test_without_slurm(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SettingError, match="there is no sbatch on this machine; start this on a"):
        sweep([SMALL], tmp_path, "cpu", executor=Slurm())


def test_what_sbatch_is_asked_for():
    asked = Slurm("gpu", 30, 8, 2, 1.5, None, 7, ("account=vision", "--exclusive")).parameters("name")
    assert asked == {
        "job_name": "name", "partition": "gpu", "time": 30, "cpus_per_task": 8, "gpus_per_node": 2, "mem": "1536MB",
        "array_parallelism": 7, "signal_delay_s": 90, "srun_args": ["--cpus-per-task=8"],
        "additional_parameters": {"requeue": True, "account": "vision", "exclusive": True},
    }  # fmt: skip
    assert Slurm(gpus=1).device(None) == "cuda"
    assert (Slurm().size(4), Slurm(runs_per_job=9).size(4)) == (4, 9)
    with pytest.raises(SettingError, match=r"gpus=0\.5: Slurm takes a whole number"):
        Slurm(gpus=0.5)


def test_a_job_that_makes_no_headway_is_not_put_back_for_ever(tmp_path):
    one = changed(SMALL, epochs=2)
    element = Element(Task(str(tmp_path), "cpu", 1, Options(), 1), [one])
    again = element.checkpoint().function
    assert again.checkpoint() is None
    run(one, tmp_path, "cpu")
    assert again.checkpoint().function.stalls == 0
