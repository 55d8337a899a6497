import pkgutil
import sys
from importlib import import_module

import tools.bench
from tools.bench.harness import main

for module in pkgutil.iter_modules(tools.bench.__path__, "tools.bench."):
    if not module.name.endswith("__main__"):
        import_module(module.name)  # it registers its cases

sys.exit(main())
