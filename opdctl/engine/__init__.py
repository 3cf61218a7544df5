"""The embedded engine: models, sampling, losses and one training stage a file, in plain PyTorch."""
