"""Thin Prefect flows around the stages. Only this package imports Prefect."""

import gc
import os
import sys

# Imports make many objects and hardly any cycles. Looking for cycles took a seventh of a flow's start.
gc.set_threshold(5_000)
sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.realpath(__file__))))  # before the working folder
import pipeline  # noqa: E402, F401

del sys.path[0]
