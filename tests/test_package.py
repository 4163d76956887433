"""The package itself: its names, and what importing it costs."""

import subprocess
import sys

import prospr


def test_every_public_name_is_there():
    assert all(getattr(prospr, name) is not None for name in prospr.__all__)
    assert set(prospr.__all__) <= set(dir(prospr))
    assert callable(prospr.methods)


def test_an_unknown_name_is_an_attribute_error():
    assert not hasattr(prospr, "shear")


def test_help_does_not_import_torch():
    code = "import sys, runpy; sys.argv = ['demo', '--help']; runpy.run_module('prospr.lab.demo', run_name='__main__')"
    end = "\nimport atexit; atexit.register(lambda: print('torch' in sys.modules))\n"
    done = subprocess.run([sys.executable, "-c", f"import sys{end}{code}"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0
    assert "--seeds" in done.stdout
    assert done.stdout.strip().endswith("False")


def test_the_core_needs_neither_numpy_nor_the_labs_libraries():
    code = """
import sys
for name in ("numpy", "rich", "tyro", "matplotlib", "transformers", "lightning"):
    sys.modules[name] = None                 # an import of it fails
import torch, prospr
net = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
batches = [(torch.randn(8, 6), torch.randint(0, 2, (8,))) for _ in range(4)]
masks = prospr.prune(net, batches, sparsity=0.5)
import tempfile, os
path = os.path.join(tempfile.mkdtemp(), "m.safetensors")
masks.save(path)
assert prospr.Masks.load(path) == masks
print("fine")
"""
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "fine", done.stderr
