"""Eight host devices for every test, set before JAX starts; fixtures that start services."""

import os
import signal
import sys
import tempfile
from pathlib import Path

os.environ["JAX_PLATFORMS"] = "cpu"
# Programs run once and are small: most of their time is LLVM's, which need not optimise them.
os.environ["XLA_FLAGS"] = (
    "--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0 "
    "--xla_cpu_parallel_codegen_split_count=1"
)
# What runs keep on disk is neither read from the user's cache nor left there.
_CACHE = tempfile.TemporaryDirectory(prefix="shardwright-tests-")
os.environ["SHARDWRIGHT_CACHE"] = _CACHE.name
# Every process that a test starts imports the whole package: it is compiled once.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
# pytest-xdist tells its workers that their terminal has 80 columns; there is no terminal.
os.environ.pop("COLUMNS", None)
# What starts the tests in the background may have them, and all that they start, ignore interrupts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

sys.path.append(str(Path(__file__).parent))
pytest_plugins = ("service_fixtures", "api_fixtures", "kept_children")
