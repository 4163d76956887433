"""The commands of `prospr`, as frozen dataclasses that tyro fills from the command line. None imports torch to be read.

`prospr run` takes every value of an `Experiment` under its own name, with its own default.
"""

from __future__ import annotations

from collections.abc import Sequence

import tyro

from prospr.lab.commands.base import Command
from prospr.lab.commands.listings import Datasets, Methods, Networks, Recipes
from prospr.lab.commands.many import Figures, Paper, Results, Sweep
from prospr.lab.commands.single import Prune, Report, Run, Serve, Show

__all__ = ["COMMANDS", "parse"]

COMMANDS = (
    Run | Prune | Show | Report | Serve | Paper | Sweep | Results | Figures | Methods | Networks | Datasets | Recipes
)


def parse(words: Sequence[str]) -> Command:
    """The command that `words` are; ends the program with 2 where they are none, and with 0 after --help.

    >>> parse(["run", "--method", "snip", "--epochs", "3"]).experiment.training.epochs
    3
    """
    return tyro.cli(
        COMMANDS,
        prog="prospr",
        description="Prune neural networks before they are trained. `prospr COMMAND --help` tells more.",
        args=list(words),
        config=(tyro.conf.OmitArgPrefixes, tyro.conf.FlagCreatePairsOff),
    )
