"""A run as a folder: its files, and what can be read from them without torch."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prospr.atomic import write_text
from prospr.errors import FolderError
from prospr.lab.experiment import SCHEMA, Experiment
from prospr.lab.runs.files import read_json, write_json

if TYPE_CHECKING:
    from torch import nn

    from prospr import Masks

__all__ = ["FOLDER", "RunFolder", "RunResult", "find_run", "finished"]

FOLDER = "runs"
_ABSENT = float("nan")


@dataclass(frozen=True)
class RunResult:
    """What a run gave: the figures of the last epoch on the test images, never of the best.

    figures: by name, and the mean "loss"; `headline` names the one to quote. Empty where the run failed.
    epochs: one table an epoch: "epoch", "loss", "train", "lr", "seconds", and "validation" and "test" where seen.
    sizes: parameters before and after, weights kept, density of every layer.
    seconds: "score" and "train", tests not included.
    memory: bytes on the GPU, empty on a CPU: "score", what the scoring added at its peak; "train", all that the process
        held at the peak of the training, with its data and that of the "together" runs it trained side by side.
    steps: of training, in all epochs.
    environment: versions, git revision, device, command.
    notes: anything unusual, such as a damaged checkpoint.
    error: of a run that failed, in one line.
    """

    experiment: Experiment
    folder: Path
    headline: str
    figures: Mapping[str, float]
    epochs: Sequence[Mapping[str, float]]
    sizes: Mapping[str, Any]
    seconds: Mapping[str, float]
    environment: Mapping[str, Any]
    memory: Mapping[str, int] = field(default_factory=dict)
    steps: int = 0
    notes: Sequence[str] = ()
    error: str | None = None

    @property
    def figure(self) -> float:
        """The figure to quote."""
        if self.error is not None:
            raise FolderError(f"{self.folder}: this run failed and has no figures ({self.error})")
        return self.figures[self.headline]

    @property
    def masks(self) -> Masks | None:
        """What was kept; None for a dense network."""
        from prospr import Masks

        path = self.folder / "masks.safetensors"
        return Masks.load(path) if path.exists() else None

    def model(self) -> nn.Module:
        """The trained network, on the CPU."""
        from prospr.lab.run import trained

        return trained(self)


class RunFolder:
    """The files of the run of `experiment` in `folder`.

    experiment.json   what is run, and the recipe it is trained by
    byol.pt           first weights by BYOL, while they are needed
    first/, rewind/   the training before a pruning after training, while it is needed
    masks.safetensors what the method keeps (not for "dense")
    scores.json       how many weights of which score it kept and removed (not for sanity checks)
    plan.json         the smaller network, where one is trained
    metrics.jsonl     a line an epoch
    checkpoint.safetensors, checkpoint.previous.safetensors
    result.json       when it is finished
    error.json        when it failed
    lock              held by the process at work
    """

    def __init__(
        self, experiment: Experiment, folder: str | os.PathLike[str] = FOLDER, name: str | None = None
    ) -> None:
        self.experiment = experiment
        self.path = Path(folder) / (name or experiment.identity)
        self.masks, self.plan = self.path / "masks.safetensors", self.path / "plan.json"
        self.pretrained, self.lock = self.path / "byol.pt", self.path / "lock"
        self._experiment, self._metrics = self.path / "experiment.json", self.path / "metrics.jsonl"
        self._scores = self.path / "scores.json"
        self._result, self._error = self.path / "result.json", self.path / "error.json"

    @property
    def done(self) -> bool:
        return self._result.exists()

    def begin(self) -> None:
        """Write down what is run; an error where the folder is of a run by another recipe of that name."""
        experiment = self.experiment
        recipe = json.loads(json.dumps(asdict(experiment.trained_by)))
        if self._experiment.exists():
            stored = read_json(self._experiment)
            was = stored.get("recipe")
            if stored.get("identity") != experiment.identity or was != recipe:
                raise FolderError(
                    f"{self.path}: the run stored here was trained by {was}, and {experiment.recipe_name!r} is now "
                    f"{recipe}; move it away to run it anew"
                )
            return
        self.describe()

    def describe(self) -> None:
        """Write down what is run, where that is not done."""
        if not self._experiment.exists():
            experiment = self.experiment
            said = {"schema": SCHEMA, "identity": experiment.identity, "label": experiment.label}
            recipe = asdict(experiment.trained_by)
            write_json(self._experiment, {**said, "experiment": experiment.to_dict(), "recipe": recipe})

    def write_scores(self, content: Mapping[str, Any]) -> None:
        """What `prospr.lab.runs.scores` counted."""
        write_json(self._scores, {"schema": SCHEMA, "identity": self.experiment.identity, **content})

    def write_metrics(self, epochs: Sequence[Any]) -> None:
        """All epochs so far, so that the file never has more than the training."""
        write_text(self._metrics, "".join(json.dumps(row) + "\n" for row in _rows(epochs)))

    def finish(self, content: Mapping[str, Any]) -> RunResult:
        write_json(self._result, {"schema": SCHEMA, "identity": self.experiment.identity, **content})
        self._error.unlink(missing_ok=True)
        return self.result()

    def fail(self, content: Mapping[str, Any]) -> None:
        write_json(self._error, {"schema": SCHEMA, "identity": self.experiment.identity, **content})

    def metrics(self) -> list[dict[str, float]]:
        if not self._metrics.exists():
            return []
        try:
            rows = [json.loads(line) for line in self._metrics.read_text(encoding="utf-8").splitlines()]
            return [{key: _ABSENT if value is None else value for key, value in row.items()} for row in rows]
        except (ValueError, AttributeError) as error:
            raise FolderError(
                f"{self._metrics}: the file is damaged ({error}); delete it: it holds the curve alone, which a run "
                "that goes on writes again"
            ) from error

    def error(self) -> dict[str, Any] | None:
        return read_json(self._error) if self._error.exists() else None

    def result(self) -> RunResult:
        """What the finished run gave."""
        stored = read_json(self._result)
        schema = stored.get("schema")
        if schema != SCHEMA:
            raise FolderError(
                f"{self._result}: a result of schema {schema!r}, and this release reads {SCHEMA}; use the release that "
                "wrote it"
            )
        try:
            figures = {key: _ABSENT if value is None else value for key, value in stored["figures"].items()}
            return RunResult(
                experiment=self.experiment,
                folder=self.path,
                headline=stored["headline"],
                figures=figures,
                epochs=self.metrics(),
                sizes=stored["sizes"],
                seconds=stored["seconds"],
                environment=stored["environment"],
                memory=stored.get("memory", {}),
                steps=stored["steps"],
                notes=stored["notes"],
            )
        except (KeyError, AttributeError, ValueError) as error:
            raise FolderError(f"{self._result}: the file is damaged ({error!r}); delete it to run on") from error

    def failure(self, error: str) -> RunResult:
        """The result of a run that failed."""
        try:
            epochs = self.metrics()
        except FolderError:
            epochs = []
        return RunResult(self.experiment, self.path, "", {}, epochs, {}, {}, {}, error=error)


def find_run(run: str, folder: str | os.PathLike[str] = FOLDER) -> RunFolder:
    """The run in the folder `run`, or the one in `folder` whose identity begins with `run`."""
    path = Path(run) if Path(run).name else Path(run).resolve()
    if not (path / "experiment.json").is_file():
        found = sorted(one.parent for one in Path(folder).glob("*/experiment.json") if one.parent.name.startswith(run))
        if not found:
            raise FolderError(f"there is no run {run!r}: no folder with an experiment.json, and none so in {folder}/")
        if len(found) > 1:
            names = ", ".join(one.name for one in found[:5])
            raise FolderError(f"{len(found)} runs in {folder}/ begin with {run!r} ({names}); give more digits")
        (path,) = found
    stored = read_json(path / "experiment.json")
    return RunFolder(Experiment.from_dict(stored.get("experiment", {})), path.parent, path.name)


def finished(folder: str | os.PathLike[str] = FOLDER) -> Iterator[RunResult]:
    """Every finished run in `folder`, in the order of their names.

    >>> list(finished("no such folder"))
    []
    """
    for path in sorted(Path(folder).glob("*/result.json")):
        yield find_run(str(path.parent)).result()


def _rows(epochs: Sequence[Any]) -> Iterator[dict[str, float | None]]:
    """Epochs as plain values; a figure that was not seen is left out, one that is no number (a loss) is null."""
    for number, epoch in enumerate(epochs, 1):
        values = epoch._asdict()
        seen = {key: value for key, value in values.items() if key not in ("validation", "test") or value == value}
        yield {"epoch": number, **{key: value if math.isfinite(value) else None for key, value in seen.items()}}
