"""Lets a vLLM on the CPU use the MooncakeConnector.

The connector's worker asks torch for the index of its GPU, and needs a GPU for nothing else. Python
imports a module of this name when it starts."""

import torch

torch.accelerator.current_device_index = lambda: 0
