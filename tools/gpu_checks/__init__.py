"""The checks of tools/gpu_day.py, by what they ask."""
