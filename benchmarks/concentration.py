"""How many channels of ResNet-20 keep any weight, beside the same masks shuffled within each layer.

    python benchmarks/concentration.py --root DIR
    python benchmarks/concentration.py --root DIR --methods snip --sparsity 0.982 --seed 1

DIR holds cifar-10-batches-bin. On a CPU it takes half a minute. A share of 100 % says that every output (or input) of
every layer of a stage still has a weight.
"""

import argparse
import warnings
from collections.abc import Mapping

from torch import Tensor

import prospr
from prospr.lab.experiment import Data, Experiment
from prospr.lab.run import choose_device
from prospr.lab.runs.making import Loader, Parts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--root", help="where data sets lie")
    parser.add_argument("--methods", nargs="+", default=["snip", "synflow", "prospr-one-shot"])
    parser.add_argument("--sparsity", type=float, default=0.956)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    one, device = Experiment("cifar10", "resnet20", seed=args.seed, data=Data(validation=0.1)), choose_device(None)
    parts = Parts(one, Loader(device, args.root)(one), device)
    print(f"{'outputs, inputs with any weight, %':<36}{'stage 1':>14}{'stage 2':>14}{'stage 3':>14}")
    for method in args.methods:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", prospr.errors.CollapseWarning)
            masks = prospr.prune(
                parts.network(), parts.batches(512), args.sparsity, method=method, seed=args.seed, collapse="warn"
            )
        for name, those in ((method, masks), (f"{method}, shuffled", prospr.sanity.shuffle(masks, args.seed))):
            shown = "".join(
                f"{outputs:>7.1f}{inputs:>7.1f}" for outputs, inputs in (alive(those, s) for s in (1, 2, 3))
            )
            print(f"{name:<36}{shown}", flush=True)


def alive(masks: Mapping[str, Tensor], stage: int) -> tuple[float, float]:
    """The percentages of outputs and of inputs of a stage's layers that have a weight."""
    kept = [mask.flatten(2).any(2) for name, mask in masks.items() if name.startswith(f"layer{stage}.")]
    outputs = sum(int(k.any(1).sum()) for k in kept) / sum(k.shape[0] for k in kept)
    inputs = sum(int(k.any(0).sum()) for k in kept) / sum(k.shape[1] for k in kept)
    return 100 * outputs, 100 * inputs


if __name__ == "__main__":
    main()
