"""From folders of runs to files of figures."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Literal, get_args

from prospr.atomic import write
from prospr.errors import FolderError, SettingError
from prospr.lab.experiment import DENSE
from prospr.lab.figures.draw import Scene, figures_of
from prospr.lab.figures.style import COLUMN, looks, save, styled
from prospr.lab.names import slug
from prospr.lab.report.setups import Setup, setups
from prospr.lab.runs.records import gather

__all__ = ["FORMATS", "KINDS", "Format", "Kind", "write_figures"]

Format = Literal["pdf", "svg", "png"]
FORMATS: tuple[Format, ...] = get_args(Format)
Kind = Literal["accuracy", "difference", "density", "layers", "loss", "train", "validation", "test"]
KINDS: tuple[Kind, ...] = get_args(Kind)
LONGEST = 120  # letters of a setup in a file's name


def write_figures(
    runs: str | os.PathLike[str] | Iterable[str | os.PathLike[str]],
    folder: str | os.PathLike[str],
    formats: Sequence[Format] = ("pdf",),
    *,
    only: Sequence[Kind] = (),
    baseline: str | None = None,
    paper: bool = True,
    width: float = COLUMN,
) -> list[Path]:
    """Draw every figure the runs have, `<what>_<setup>.<format>` in `folder`; the files written.

    runs: folders of runs, or of one run each.
    only: some of `KINDS`; by default all of them.
    baseline: the method the others' paired differences are taken to; by default "random", else the first by name.
    paper: draw the paper's numbers behind the accuracies, where it has any of this network and data.
    width: inches. Letters have 7 and 8 points at any width, so give the width the figure will have on paper.

    A method has the same colour and mark in all of them.
    """
    if not formats or not set(formats) <= set(FORMATS):
        raise SettingError(f"formats={list(formats)!r}: use some of {', '.join(FORMATS)}")
    if not set(only) <= set(KINDS):
        raise SettingError(f"only={list(only)!r}: use some of {', '.join(KINDS)}")
    if not 1.5 <= width <= 20:
        raise SettingError(f"width={width:g}: use inches, from 1.5 to 20")
    found = gather([runs] if isinstance(runs, (str, os.PathLike)) else runs)
    for path, why in found.unread.items():
        raise FolderError(f"{path}: this run cannot be read ({why}); mend it, or take it out of the folder")
    parts = setups(found.records)
    methods = sorted({method for part in parts for method in part.methods})
    if baseline is not None and baseline not in (*methods, DENSE):
        raise SettingError(
            f"baseline={baseline!r} is not among the methods; choose from {', '.join([*methods, DENSE])}"
        )
    written: list[Path] = []
    with styled():
        for part, name in zip(parts, _names(parts), strict=True):
            scene = Scene(part, looks(methods), width)
            against = baseline or ("random" if "random" in part.methods else min(part.methods, default=DENSE))
            for what, draw in figures_of(scene, against, paper).items():
                figure = draw() if not only or what.partition("-")[0] in only else None
                if figure is None:
                    continue
                for kind in formats:
                    path = Path(folder) / f"{slug(what)}_{name}.{kind}"
                    write(path, partial(save, figure, kind, part.title))
                    written.append(path)
    return written


def _names(parts: Sequence[Setup]) -> list[str]:
    """A short name for each setup's files, cut where it is too long; no two alike."""
    names: list[str] = []
    for part in parts:
        name = slug(part.title.replace(" on ", " ").replace(" by ", " "))
        if len(name) > LONGEST or name in names:
            name = f"{name[: LONGEST - 9]}-{hashlib.sha256(part.title.encode()).hexdigest()[:8]}"
        names.append(name)
    return names
