"""Runs that are killed, for test_runs.py: a process that has imported torch forks a child for each attempt.

    python kills.py random FOLDER     twenty SIGKILLs at random moments
    python kills.py writes FOLDER     a SIGKILL just before and just after every file takes its name
    python kills.py ticket FOLDER     the same for a run that is pruned after training and goes back to a step

After every kill each file in the folder must be whole. At the end the run must be that of an unbroken one, to the bit.
"""

import dataclasses
import json
import os
import random
import signal
import sys
import tempfile
import time
import warnings
from functools import partial
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file

from prospr.lab.experiment import Experiment, Pruning, Training
from prospr.lab.run import Options, run

KILLS = 20
EVERY_EPOCH = Options(save_every=0)


def experiment(epochs: int) -> Experiment:
    return Experiment(
        method="snip", settings={"width": 4}, training=Training(epochs=epochs, batch_size=512, evaluate_every=3)
    )


def child(folder: Path, work: Experiment, before=lambda: None) -> int:
    """Start the run in a process of its own."""
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        warnings.simplefilter("error")
        before()
        run(work, folder, "cpu", options=EVERY_EPOCH)
        code = 0
    finally:
        os._exit(code)


def ended(pid: int) -> int:
    """How a child ended: 0 well, -9 killed."""
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def check_files(folder: Path) -> None:
    for path in folder.rglob("*"):
        if path.name.endswith(".tmp"):
            continue  # not yet a file of the run
        if path.suffix == ".json":
            json.loads(path.read_text())
        elif path.suffix == ".jsonl":
            for line in path.read_text().splitlines():
                json.loads(line)
        elif path.suffix == ".safetensors":
            with safe_open(path, "pt") as file:
                for name in file.keys():  # noqa: SIM118  it is no dict
                    file.get_tensor(name)


def outcome(folder: Path) -> tuple:
    """Weights, momentum and curves of a finished run, and its figures; not its times."""
    (home,) = folder.iterdir()
    assert not list(home.glob(".*.tmp")), list(home.glob(".*"))
    state = load_file(home / "checkpoint.safetensors")
    figures = json.loads((home / "result.json").read_text())["figures"]
    rows = [json.loads(line) for line in (home / "metrics.jsonl").read_text().splitlines()]
    return state, figures, [{k: v for k, v in row.items() if k != "seconds"} for row in rows]


def assert_equal(left: tuple, right: tuple) -> None:
    assert left[1:] == right[1:]
    assert left[0].keys() == right[0].keys()
    for name, value in left[0].items():
        if name.startswith(("model.", "momentum.")):
            assert torch.equal(value, right[0][name]), name


def at_random_moments(folder: Path) -> None:
    work = experiment(epochs=60)
    start = time.perf_counter()
    assert ended(child(folder / "unbroken", work)) == 0
    whole = time.perf_counter() - start
    moments = random.Random(0)
    kills, runs, seen = 0, 0, set()
    while kills < KILLS:
        home = folder / f"killed-{runs}"
        pid = child(home, work)
        time.sleep(moments.uniform(0, 0.1 * whole))
        os.kill(pid, signal.SIGKILL)
        end = ended(pid)
        check_files(home)
        if end == 0:  # it came to its end before: the next is another
            assert_equal(outcome(folder / "unbroken"), outcome(home))
            runs += 1
            continue
        assert end == -signal.SIGKILL, end
        kills += 1
        for path in home.rglob("metrics.jsonl"):
            seen.add(len(path.read_text().splitlines()))
    assert len(seen) > 3, seen  # it got further between kills
    assert ended(child(home, work)) == 0
    check_files(home)
    assert_equal(outcome(folder / "unbroken"), outcome(home))
    print(f"killed {kills} times, with {sorted(seen)} epochs recorded; unbroken {whole:.1f} s")


def around_every_write(folder: Path, pruning: Pruning = Pruning()) -> None:  # noqa: B008  it is frozen
    work = dataclasses.replace(experiment(epochs=3), pruning=pruning)
    assert ended(child(folder / "unbroken", work)) == 0
    replace = os.replace

    def killing(which: int, after: bool):
        calls = 0

        def replacing(source, target):
            nonlocal calls
            calls += 1
            if calls == which and not after:
                os.kill(os.getpid(), signal.SIGKILL)
            replace(source, target)
            if calls == which:
                os.kill(os.getpid(), signal.SIGKILL)

        def install() -> None:
            os.replace = replacing

        return install

    which, killed = 1, 0
    while True:
        home = folder / f"{which}"
        ends = [ended(child(home / f"{after}", work, killing(which, after))) for after in (False, True)]
        if ends == [0, 0]:
            break  # there are not so many writes
        assert ends == [-signal.SIGKILL] * 2, ends
        for after in (False, True):
            check_files(home / f"{after}")
            assert ended(child(home / f"{after}", work)) == 0
            assert_equal(outcome(folder / "unbroken"), outcome(home / f"{after}"))
        which, killed = which + 1, killed + 2
    print(f"killed {killed} times")


if __name__ == "__main__":
    torch.set_num_threads(1)  # a child may not use threads that were its parent's
    with tempfile.TemporaryDirectory() as once:  # what is imported at first use is not imported in every child
        run(experiment(epochs=1), once, "cpu")
    ticket = partial(around_every_write, pruning=Pruning(after_training=True, rewind=4))
    ways = {"random": at_random_moments, "writes": around_every_write, "ticket": ticket}
    ways[sys.argv[1]](Path(sys.argv[2]))
