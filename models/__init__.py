"""Reference models with whole steps, to plan by name, from a file, or to start from."""

from shardwright.models.registry import ReferenceModel, build, known_models, model_names

__all__ = ["ReferenceModel", "build", "known_models", "model_names"]
