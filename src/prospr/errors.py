"""What can go wrong, by name. Every message says what, where and what to do about it."""

__all__ = [
    "BatchError",
    "CollapseError",
    "CollapseWarning",
    "DerivativeError",
    "FolderError",
    "InexactWarning",
    "KeptWholeWarning",
    "LossError",
    "MaskError",
    "MaskFileError",
    "ModelError",
    "PackageError",
    "PlanError",
    "PruningError",
    "RankError",
    "ScoreError",
    "SettingError",
    "WaitingWarning",
    "ZeroScoreWarning",
]


class PruningError(Exception):
    """The root of every error this library raises on purpose."""


class SettingError(PruningError, ValueError):
    """A setting has a value it cannot have: a sparsity of 1.2, an unknown method, a negative rate."""


class BatchError(PruningError, ValueError):
    """The batches are missing, too few, or not of the form the loss expects."""


class LossError(PruningError, ValueError):
    """The loss is not a finite scalar that depends on the parameters."""


class DerivativeError(PruningError, RuntimeError):
    """A derivative does not exist for an operation of the network, or it overflowed."""


class ModelError(PruningError, ValueError):
    """The model has nothing that can be pruned, or names a parameter that is not there."""


class ScoreError(PruningError, ValueError):
    """Scores that rank nothing: NaN, infinite, all equal, or of the wrong shape."""


class MaskError(PruningError, ValueError):
    """Masks that do not fit the network they are put on."""


class MaskFileError(MaskError):
    """A mask file that is damaged, hostile, or of another format."""


class FolderError(PruningError):
    """A folder of stages that belongs to another run, or a file in it that is damaged."""


class PlanError(PruningError, ValueError):
    """A plan for a smaller network that is damaged, or of another network."""


class PackageError(PruningError, ModuleNotFoundError):
    """A package that is needed for this alone is not installed."""


class RankError(PruningError, RuntimeError):
    """Processes that score together: one died, failed, did not come, or differs from the others."""


class CollapseError(PruningError):
    """Pruning cut every path from the network's input to its output."""


class CollapseWarning(UserWarning):
    """A layer lost all its weights; a skip connection still carries the signal around it."""


class InexactWarning(UserWarning):
    """The result is not exactly the one that was asked for, and this says why."""


class KeptWholeWarning(UserWarning):
    """These layers, or their channels, cannot be pruned, and this says why."""


class WaitingWarning(UserWarning):
    """This process waits for others, which have not come yet."""


class ZeroScoreWarning(UserWarning):
    """Weights with a score of exactly zero were kept, because too few have any other."""
