"""Training of large language models on clusters of heterogeneous GPUs."""

__version__ = "0.1.0"
