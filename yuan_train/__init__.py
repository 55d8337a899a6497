"""Pretraining of large language models on clusters of unlike cards."""

__version__ = "0.1.0"
