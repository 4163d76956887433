"""Experiments with pruned networks: data, networks, recipes, training, runs, paired results and their page.

The lab uses the core (`prospr.score`, `prospr.select`) and the core never uses the lab. This file imports nothing, so
that a command's `--help` need not wait for torch: import the module you want (`from prospr.lab.train import train`).
"""
