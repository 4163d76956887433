"""Training networks, dense or masked: written out in plain PyTorch, or with the whole step as one CUDA graph.

A `Run` says what to train. `EagerTrainer` trains one run, on a CPU to the bit; `GraphTrainer` trains one or several on
a GPU. `prospr.lab.train` chooses between them.
"""

from prospr.lab.training.eager import EagerTrainer
from prospr.lab.training.evaluation import evaluate
from prospr.lab.training.graph import CaptureError, GraphTrainer
from prospr.lab.training.loop import Trainer
from prospr.lab.training.runs import Epoch, Result, Run

__all__ = ["CaptureError", "EagerTrainer", "Epoch", "GraphTrainer", "Result", "Run", "Trainer", "evaluate"]
