"""What each process of the test of several does; imported by name in the processes."""

from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from prospr.errors import PruningError
from prospr.integrations.start import Start

RANKS = 2


def run(rank: int, folder: str) -> None:
    """Prune on data that differ between the processes; then fail in the first alone. Write what each has."""
    torch.set_num_threads(1)
    store = dist.FileStore(str(Path(folder) / "store"), RANKS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
    generator = torch.Generator().manual_seed(rank)
    batches = [(torch.randn(8, 6, generator=generator), torch.arange(8) % 3)]
    start = Start(0.5, method="snip")
    start.begin(model, batches, lambda m, b: nn.functional.cross_entropy(m(b[0]), b[1]), resumed=False)
    assert start.masks is not None
    try:
        Start(0.5, method="snip").begin(nn.Linear(2, 2), [], lambda m, b: m(b).sum(), resumed=False)
        said = ""
    except PruningError as error:
        said = str(error)
    torch.save({"masks": dict(start.masks), "state": model.state_dict(), "said": said}, Path(folder) / f"{rank}.pt")
    dist.destroy_process_group()
