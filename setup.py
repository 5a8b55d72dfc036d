"""Installs the package `jprm`, its recipes (the directory configs/, importable as `jprm.recipes`) and the command `jprm`."""

import pathlib
import re

import setuptools

VERSION = re.search(r'__version__ = "(.+)"', pathlib.Path("jprm/__init__.py").read_text()).group(1)

EXTRAS = {
    "test": ["pytest>=8.1", "hypothesis>=6.100"],
    "cuda12": ["jax[cuda12]>=0.10.2,<0.11"],
    "tpu": ["jax[tpu]>=0.10.2,<0.11"],
    "gguf": ["gguf>=0.17"],
    "verify": ["math-verify[antlr4-13-2]>=0.8"],
    "tasks": ["reasoning-gym>=0.1.23"],
    "parity": ["torch>=2.6"],  # the reference implementations that tests compare with; jprm itself never imports it
}

setuptools.setup(
    name="jprm",
    version=VERSION,
    description="Process reward models and process-reward RL in JAX",
    python_requires=">=3.11",
    packages=setuptools.find_packages(include=["jprm", "jprm.*"]) + ["jprm.recipes"],
    package_dir={"jprm": "jprm", "jprm.recipes": "configs"},
    package_data={"jprm.train": ["*.html", "*.js", "*.css"]},
    install_requires=[
        "jax>=0.10.2,<0.11",  # 0.11 wants Python 3.12
        "flax>=0.12.5,<0.13",
        "optax>=0.2.8",
        "orbax-checkpoint>=0.12.4",  # the v1 API that the checkpoints use
        "grain>=0.2.16",
        "transformers>=5.0",
        "tokenizers>=0.22",
        "safetensors>=0.6",
        "jinja2>=3.1",  # transformers needs it for chat templates and does not install it
        "ml-collections>=1.1",
        "absl-py>=2.1",
        "numpy>=2.0",
        "pyarrow>=18",  # parquet prompt files, verl's own format
        "tensorboardX>=2.6.2",
        "tqdm>=4.66",
    ],
    extras_require=EXTRAS,
    entry_points={"console_scripts": ["jprm = jprm.cli:main"]},
)
