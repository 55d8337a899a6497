"""Tests, folder by folder as the code.

Each process has one thread for arithmetic, whoever starts them: a fork of one with more waits for them.
"""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
