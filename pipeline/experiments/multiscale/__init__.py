"""Subramanian et al. 2020, "Multi-scale Transformer Language Models"."""

from pipeline.experiments.multiscale.figure4 import FIGURE4
from pipeline.experiments.multiscale.figure5 import FIGURE5
from pipeline.experiments.multiscale.table4 import TABLE4
from pipeline.experiments.multiscale.table5 import TABLE5
from pipeline.experiments.multiscale.table6 import TABLE6
from pipeline.experiments.multiscale.table7 import TABLE7
from pipeline.experiments.multiscale.table8 import TABLE8

MULTISCALE = (FIGURE4, FIGURE5, TABLE4, TABLE5, TABLE6, TABLE7, TABLE8)
