import sys

from tools.bench import engine, experts, faults, generation, planner, tiers, training  # noqa: F401 (they register their cases)
from tools.bench.harness import main

sys.exit(main())
