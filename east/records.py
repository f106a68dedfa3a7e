"""`east.records.load(results_dir)`: every trial on record as a DataFrame."""

from east.lab.experiment.records import load

__all__ = ["load"]
