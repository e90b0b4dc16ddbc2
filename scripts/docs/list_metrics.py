"""The vocabulary of metrics as Markdown tables: of runs for the reference, ``diagnose`` for the columns of diagnose."""

from __future__ import annotations

import sys

from flashpoint.cli.diagnose_tables import BIAS_COLUMNS, COLUMNS
from flashpoint.cli.table import Table, show
from flashpoint.runs.metric_table import METRICS, Metric


def main() -> None:
    if sys.argv[1:] == ["diagnose"]:
        columns = {**BIAS_COLUMNS, **{measure.label: measure for measure in COLUMNS}}
        rows = [[column, measure.symbol, measure.unit, measure.sentence] for column, measure in columns.items()]
        show(Table(("column", "symbol", "unit", "meaning"), rows), "markdown")
        return
    rows = [
        [one.measured_by, f"`{_written(one)}`", one.symbol, one.unit, one.trouble or "", one.sentence]
        for one in METRICS.values()
    ]
    show(Table(("measured", "metric", "symbol", "unit", "trouble", "meaning"), rows), "markdown")


def _written(metric: Metric) -> str:
    """Return the name in the file; of a metric of tensors with NAME in the place of the tensor."""
    return metric.of_tensor("NAME") if metric.per == "tensor" else metric.name


if __name__ == "__main__":
    main()
