"""The names by which configs and committed records know the classical models."""

from east.lab.training.boosters import Booster
from east.lab.training.classical import CCS, GradientBoosting, LogisticRegression, RandomForest

__all__ = ["CCS", "Booster", "GradientBoosting", "LogisticRegression", "RandomForest"]
