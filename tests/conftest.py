"""What every test stands on: eight virtual CPU devices, optional packages, and the data files that are not in the repository.

Use: ``from tests.conftest import data_path, needs``.
"""

import importlib
import importlib.util
import os
import pathlib
import re
import types

# Before anything imports jax: flags are read once, when the backend starts. Tests compile much and compute little: without LLVM's
# optimisations a training step compiles in half the time.
FLAGS = "--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0"
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {FLAGS}".strip()
os.environ["JAX_PLATFORMS"] = "cpu"

# Compiled programs are kept between runs and shared with the processes that tests start; the key holds program and versions.
ROOT = pathlib.Path(__file__).resolve().parent.parent
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(ROOT / ".pytest_cache" / "jax"))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.2")

import pytest  # noqa: E402


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks the tests of files that ask for an optional package `extra`: `make test` skips them, `make test-slow` runs them."""
    for item in items:
        if re.search(r"\bneeds\(", item.path.read_text()):
            item.add_marker("extra")


def needs(package: str, load: bool = True) -> types.ModuleType | None:
    """The optional package, or a skip; under ``JPRM_REQUIRE=1`` a failure, so that CI cannot pass by lacking something.

    Args:
      package: import name (``"torch"``). Works at module level and inside a test.
      load: False only looks whether it is there (for packages whose import needs what the test does not).

    Returns:
      The imported module; None with ``load=False``.
    """
    if importlib.util.find_spec(package) is None:
        reason = f"the package {package} is not installed"
        if os.environ.get("JPRM_REQUIRE") == "1":
            pytest.fail(f"{reason}, and JPRM_REQUIRE=1", pytrace=False)
        pytest.skip(reason, allow_module_level=True)
    return importlib.import_module(package) if load else None


def data_path(name: str) -> pathlib.Path:
    """A file or folder of the test data (``"gsm8k/test.jsonl"``), or a skip where it is absent.

    The data lives outside the repository: in ``$JPRM_TEST_DATA``, by default ``../shared/data`` beside it.
    """
    folder = pathlib.Path(os.environ.get("JPRM_TEST_DATA") or ROOT.parent / "shared" / "data")
    if not (folder / name).exists():
        pytest.skip(f"no test data {name} (JPRM_TEST_DATA names its folder)", allow_module_level=True)
    return folder / name
