"""`east.records.load(results_dir)`: every trial on record as a DataFrame."""

from east.experiment.records import load

__all__ = ["load"]
