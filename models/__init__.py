"""Reference models with whole train steps, to plan by name or to start from."""

from shardwright.models.registry import ReferenceModel, build, model_names

__all__ = ["ReferenceModel", "build", "model_names"]
