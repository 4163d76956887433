"""What each method costs: time in training steps, and peak memory in units of a training step's.

    python benchmarks/methods.py                                  # ResNet-20, batch 64, on the CPU
    python benchmarks/methods.py --device cuda --batch 512

A training step is one plain forward and backward pass and SGD update on the same batch in the same process. On the CPU
every method is a process of its own, because a process does not give memory back.
"""

import argparse
import json
import subprocess
import sys

import torch
from harness import GIB, machine, timed, training_step, watched


def main() -> None:
    args = _arguments()
    if args.one:
        print(json.dumps(measure(args.one, args.network, args.batch, args.device)))
        return
    import prospr

    run = lambda name: measure(name, args.network, args.batch, args.device)  # noqa: E731
    if args.device == "cpu":
        run = lambda name: _in_process(name, args)  # noqa: E731
    unit = run("step")
    print(f"torch {torch.__version__}, {machine(args.device)}")
    print(f"{args.network}, batch {args.batch}; one training step: {unit['step_ms']:.1f} ms, {unit['gib']:.2f} GiB\n")
    print(f"{'method':<18}{'rounds':>7}{'steps':>9}{'memory':>9}")
    rows = []
    for name in args.methods or prospr.methods():
        row = run(name)
        rows.append({"method": name, "network": args.network, "batch": args.batch, "device": args.device, **row})
        rounds = prospr.methods()[name].rule.rounds
        print(f"{name:<18}{rounds:>7}{row['steps']:>9.1f}{row['gib'] / unit['gib']:>8.2f}x", flush=True)
        if args.out:
            with open(args.out, "w") as file:
                json.dump({"machine": machine(args.device), "step_gib": unit["gib"], "rows": rows}, file, indent=1)


def measure(name: str, network: str, batch: int, device: str) -> dict[str, float]:
    import prospr
    from prospr.lab.models import build

    torch.manual_seed(0)
    where = torch.device(device)
    model = build(network).to(where)
    images = [torch.randn(batch, 3, 32, 32, device=where) for _ in range(10)]
    batches = [(x, torch.randint(0, 10, (batch,), device=where)) for x in images]
    if name == "step":
        ms, gib = training_step(model, batches[0], where)
        return {"step_ms": ms, "steps": 1.0, "gib": gib}

    def prune() -> None:
        masks = prospr.prune(model, batches, 0.9, method=name, collapse="ignore")
        masks.remove(model)

    state = {key: value.clone() for key, value in model.state_dict().items()}
    if where.type == "cuda":
        prune()  # kernels are chosen and modules loaded at the first call
        model.load_state_dict(state)
    _, peak = watched(prune, where)
    model.load_state_dict(state)
    before, _ = training_step(model, batches[0], where)
    seconds = timed(prune, where)
    model.load_state_dict(state)
    after, _ = training_step(model, batches[0], where)
    ms = min(before, after)
    return {"step_ms": ms, "steps": 1000 * seconds / ms, "gib": peak / GIB}


def _in_process(name: str, args) -> dict[str, float]:
    command = [sys.executable, "-W", "ignore", __file__, "--one", name]
    command += ["--network", args.network, "--batch", str(args.batch), "--device", args.device]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{name}: {done.stderr}")
    return json.loads(done.stdout.strip().splitlines()[-1])


def _arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--network", default="resnet20", choices=["resnet20", "vgg16", "vgg19", "resnet18"])
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--methods", nargs="+", help="names (default: all)")
    parser.add_argument("--out", help="write the rows as JSON to this file")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    main()
