"""Charts of a page: every axis has numbers."""

import re

import numpy as np
import pytest

from data.statistics import Statistics
from pipeline.reporting.charts import draw_corpus


@pytest.mark.parametrize("shortest", [1, 2, 10, 60, 200, 1100, 2100, 5000])
@pytest.mark.parametrize("doublings", [3, 5])
def test_documents_of_any_length_have_numbers_below(shortest: int, doublings: int) -> None:
    found = Statistics()
    for number in range(30):
        found.count_document(shortest << number % doublings, True)
    found.count_chunks(np.zeros(27, np.uint8), np.full(9, 3, np.uint8))
    chart = draw_corpus(found.make_summary()).rpartition("<svg")[2]
    assert "number of documents, by length" in chart
    shown = [float(each.replace(",", "")) for each in re.findall(r"text-anchor='middle'>([\d,.]+)<", chart)]
    assert len(shown) >= 2 and shown == sorted(shown) and shown[0] >= 1
