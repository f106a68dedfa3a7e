"""The names by which configs and committed records know the classical models."""

from east.lab.training.classical import (
    CCS,
    Estimator,
    GradientBoosting,
    LogisticRegression,
    RandomForest,
    TunedThreshold,
)

__all__ = ["CCS", "Estimator", "GradientBoosting", "LogisticRegression", "RandomForest", "TunedThreshold"]
