import sys

import tools.bench.ablation
import tools.bench.engine
import tools.bench.estimate
import tools.bench.faults
import tools.bench.kernels
import tools.bench.planner
import tools.bench.residence
import tools.bench.rl
import tools.bench.rl_trl
import tools.bench.roles
import tools.bench.scale
import tools.bench.serve
import tools.bench.testbed
import tools.bench.tiers
import tools.bench.training
import tools.bench.watch  # noqa: F401 (they register their cases)
from tools.bench.harness import main

sys.exit(main())
