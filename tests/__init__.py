"""Tests, folder by folder as the code."""
