"""`east.data.load("adult")` and `east.data.split(data)`; see east.lab.data."""

from east.lab.data import *  # noqa: F403
