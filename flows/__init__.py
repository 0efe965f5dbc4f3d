"""Thin Prefect flows around the stages. Only this package imports Prefect."""

import os
import sys

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.realpath(__file__))))  # before the working folder
import pipeline  # noqa: E402, F401

del sys.path[0]
