"""Self-supervised starting points for pruning, by BYOL (Grill et al., 2020; appendix E of the ProsPr paper).

>>> from prospr.lab.data import digits
>>> from prospr.lab.models import build
>>> start = pretrain(build("small_convnet", seed=0, width=4), digits(), Pretraining(hidden=32), epochs=1).network
"""

from prospr.lab.byol.network import Byol, distance, find_classifier, loss
from prospr.lab.byol.norms import Norms, layer_norms, norms_figure, write_norms
from prospr.lab.byol.pretrain import Pretrained, Pretraining, pretrain
from prospr.lab.byol.probe import linear_probe
from prospr.lab.byol.views import BYOL_VIEWS, SMALL_VIEWS, View, as_bytes, two_views

__all__ = [
    "BYOL_VIEWS",
    "SMALL_VIEWS",
    "Byol",
    "Norms",
    "Pretrained",
    "Pretraining",
    "View",
    "as_bytes",
    "distance",
    "find_classifier",
    "layer_norms",
    "linear_probe",
    "loss",
    "norms_figure",
    "pretrain",
    "two_views",
    "write_norms",
]
