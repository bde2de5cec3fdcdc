"""Slimmable networks: layers, SlimResNet, training, checkpoints, accuracy tables. The only package that needs torch."""
