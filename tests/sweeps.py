"""For tests of sweeps in other processes, jobs and clusters: loggers that workers import, and what must hold."""

import json
import os
import signal
import time
from collections import Counter
from pathlib import Path

from safetensors.torch import load_file

from prospr.lab.experiment import Experiment, Training
from prospr.lab.run import run_many
from prospr.lab.runs.folder import RunFolder

EPOCHS = 8
SMALL = Experiment(method="snip", settings={"width": 4}, training=Training(epochs=EPOCHS, batch_size=512))


class Diary:
    """Writes down which process trained which epoch, and which finished."""

    def __init__(self, experiment, folder, done):
        self.path = Path(folder) / "diary"

    def epoch(self, number, figures):
        self._write(number)

    def end(self, figures):
        self._write("end")

    def _write(self, what):
        with self.path.open("a") as file:
            file.write(f"{what} {os.getpid()}\n")


class Slow(Diary):
    """A diary that takes its time."""

    def epoch(self, number, figures):
        super().epoch(number, figures)
        time.sleep(0.3)


class Gate(Diary):
    """A diary whose first process waits at the fourth epoch until there is a file `go` beside the runs."""

    def __init__(self, experiment, folder, done):
        super().__init__(experiment, folder, done)
        self.go, self.shut = Path(folder).parent / "go", not self.path.exists()

    def epoch(self, number, figures):
        super().epoch(number, figures)
        if self.shut and number == 4:
            wait_for(self.go.exists)


class KilledOnce(Diary):
    """A diary whose process is killed at the fourth epoch of seed 1, the first time."""

    def __init__(self, experiment, folder, done):
        super().__init__(experiment, folder, done)
        self.deadly = experiment.seed == 1 and not self.path.exists()

    def epoch(self, number, figures):
        super().epoch(number, figures)
        if self.deadly and number == 4:
            os.kill(os.getpid(), signal.SIGKILL)


class Deadly:
    """Kills its process at the second epoch of seed 1, every time."""

    def __init__(self, experiment, folder, done):
        self.seed = experiment.seed

    def epoch(self, number, figures):
        if self.seed == 1 and number == 2:
            os.kill(os.getpid(), signal.SIGKILL)

    def end(self, figures):
        pass


def diary(result):
    lines = (Path(result.folder) / "diary").read_text().splitlines()
    return [(word if word == "end" else int(word), int(process)) for word, process in map(str.split, lines)]


def resumed_at(result):
    return json.loads((Path(result.folder) / "result.json").read_text())["resumed_at"]


def check_unbroken(result, epochs=EPOCHS):
    """Every epoch was trained once, by one process."""
    assert [word for word, _ in diary(result)] == [*range(1, epochs + 1), "end"]
    assert len({process for _, process in diary(result)}) == 1


def check_resumed(result, epochs=EPOCHS):
    """Two processes trained every epoch once, but for the one that was not saved; it was finished once."""
    counts = Counter(word for word, _ in diary(result))
    assert set(counts) == {*range(1, epochs + 1), "end"}
    assert counts["end"] == 1
    assert sum(counts.values()) <= epochs + 2
    assert len({process for _, process in diary(result)}) == 2
    assert resumed_at(result) > 0


def check_like_plain_runs(results, folder):
    """The same to the bit as the same runs one after another in this process, which has one thread."""
    plain = run_many([one.experiment for one in results], folder, "cpu")
    for result, alone in zip(results, plain, strict=True):
        assert result.figures == alone.figures
        ours, theirs = (load_file(one.folder / "checkpoint.safetensors") for one in (result, alone))
        weights = [name for name in theirs if name.startswith("model.")]
        assert weights
        assert all(bytes(ours[name].numpy()) == bytes(theirs[name].numpy()) for name in weights)


def at_the_gate(experiments, folder):
    return all(len(RunFolder(one, folder).metrics()) == 4 for one in experiments)


def wait_for(what, patience=60.0):
    end = time.monotonic() + patience
    while not what():
        assert time.monotonic() < end, f"waited {patience} s for {what}"
        time.sleep(0.05)
