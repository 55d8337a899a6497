import sys

from tools.bench import engine, experts, generation, planner, tiers, training  # noqa: F401 (they register their cases)
from tools.bench.harness import main

sys.exit(main())
