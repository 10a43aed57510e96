"""For a vLLM on the CPU with MooncakeConnector: its worker asks torch for the number of its card, and torch has none to tell. This is
the one thing of it that needs a card. Python imports a module of this name when it starts."""

import torch

torch.accelerator.current_device_index = lambda: 0
