"""Where the runs of a sweep are run: processes of this machine, a Slurm cluster, a Ray cluster.

An executor is a frozen dataclass of settings that makes a crew of workers; `front` is what they have in common: who is
handed which runs, and what becomes of them. No module here imports torch, submitit or ray to be read.
"""

from prospr.lab.executors.front import Executor
from prospr.lab.executors.processes import Processes
from prospr.lab.executors.ray import Ray
from prospr.lab.executors.slurm import Slurm

__all__ = ["Executor", "Processes", "Ray", "Slurm"]
