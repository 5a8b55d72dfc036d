"""jprm: process reward models in JAX, trained and used as dense rewards in reinforcement learning."""

__version__ = "0.1.0"
